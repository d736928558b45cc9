"""Paged, ragged and contiguous decoding against the row-by-row oracle."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ejkernel.kernels.xla import (
    mla_decode,
    page_attention,
    ragged_decode_attention,
    ragged_page_attention,
    ragged_page_attention_v3,
)
from ejkernel.kernels.xla._paged.decode import step_tokens
from ejkernel.kernels.xla._paged.kernel import split_count
from ejkernel.kernels.xla._paged.layouts import Tables
from ejkernel.kernels.xla._paged.ragged import choose_shape
from ejkernel.types.arrays import quantise
from ejktest.drawn import array
from ejktest.grids import without
from ejktest.oracles import paged as oracle
from ejktest.tolerance import check_close
from ejktest.transforms import check_transformations

RNG = np.random.default_rng(0)
B, H, HK, D, DV, PS, COLUMNS = 4, 4, 2, 16, 24, 4, 5
PAGES = B * COLUMNS + 2


def normal(*shape, dtype=np.float32):
    return array(RNG.standard_normal(shape), dtype)


def wide(*arrays):
    return [np.asarray(a, np.float64) for a in arrays]


def pulled(fn, args, weight):
    """Output, and ``weight`` pulled back to the arguments."""
    out, pull = jax.vjp(fn, *args)
    return out, pull(weight.astype(out.dtype))


def compare(ours, theirs, args, names, *, dtype=np.float32, factor=3.0):
    """Values and every gradient of ``ours(*args)`` against ``theirs`` in float64."""
    shape = jax.eval_shape(ours, *args).shape
    weight = np.random.default_rng(1).standard_normal(shape)
    with jax.enable_x64(True):
        reference, exact = jax.jit(partial(pulled, theirs))(wide(*args), weight)
    out, grads = jax.jit(partial(pulled, ours))(args, weight.astype(np.float32))
    check_close(out, reference, dtype=dtype)
    for name, g, r in zip(names, grads, exact, strict=True):
        assert g.dtype == args[names.index(name)].dtype
        check_close(
            g,
            r,
            dtype=dtype,
            name=f"d{name}",
            rms_limit=4 * (1e-5 if dtype == np.float32 else 5e-3),
        )


def joined(outputs):
    """The output and, as one more column, the finite values of lse."""
    o, lse = outputs
    return jnp.concatenate([o, jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None]], -1)


def tables():
    return RNG.permutation(PAGES)[: B * COLUMNS].reshape(B, COLUMNS).astype(np.int32)


LENS = np.array([17, 0, 1, COLUMNS * PS], np.int32)

OPTIONS = {
    "plain": {},
    "cap-window-sinks": {"logits_soft_cap": 2.0, "sliding_window": (3, 0), "sinks": 2},
    "splits": {"num_splits": 3, "sinks": 1},
    "one-page-steps": {"cfg": {"pages_per_block": 1}, "sliding_window": 6},
}


def test_counts_are_bounded_by_the_call():
    table = Tables(16, 100, 5)
    assert split_count(table, None, 10**30) == 5 and split_count(table, 10**30, 1) == 80
    assert split_count(table, None, 3) == 3 and split_count(table, 7, 1) == 7
    assert step_tokens(table, table.capacity, 64, 10**30) == 80
    assert choose_shape(9, 2, 10**30).rows == 9


@pytest.mark.parametrize("name", OPTIONS)
def test_page_attention(name):
    options = dict(OPTIONS[name])
    sinks = options.pop("sinks", 0)
    bt = tables()
    args = [normal(B, H, D), normal(PAGES, PS, HK, D), normal(PAGES, PS, HK, DV)]
    names = ["q", "k", "v"]
    if sinks:
        args.append(normal(H, sinks))
        names.append("aux")

    def ours(q, k, v, aux=None):
        call = partial(page_attention, q, k, v, LENS, bt, softmax_aux=aux, **options)
        return joined(call(return_lse=True))

    window = options.get("sliding_window")

    def theirs(q, k, v, aux=None):
        outputs = oracle.page_attention(
            q, k, v, LENS, bt, scale=D**-0.5, aux=aux, cap=options.get("logits_soft_cap"),
            left=window[0] if isinstance(window, tuple) else window, return_lse=True,
        )  # fmt: skip
        return joined(outputs)

    compare(ours, theirs, args, names)


def test_page_attention_rank_dtype_and_shared_pages():
    q, k, v = normal(B, 1, H, D), normal(PAGES, PS, HK, D), normal(PAGES, PS, HK, D)
    bt = np.zeros((B, COLUMNS), np.int32)  # every row reads page 0 again and again
    lens = np.full(B, 9, np.int32)
    half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    out = page_attention(*half, lens, bt)
    assert out.shape == q.shape and out.dtype == jnp.bfloat16
    with jax.enable_x64(True):
        q64, k64, v64 = wide(*half)
        reference = oracle.page_attention(q64[:, 0], k64, v64, lens, bt, scale=D**-0.5)
    check_close(out[:, 0], reference, factor=3)


def test_unseen_memory_and_wild_tables_do_not_matter():
    bt = tables()
    q, k, v = normal(B, H, D), normal(PAGES, PS, HK, D), normal(PAGES, PS, HK, D)
    out = page_attention(q, k, v, LENS, bt)
    seen = np.zeros((PAGES, PS), bool)
    for r, n in enumerate(LENS):
        for j in range(n):
            seen[bt[r, j // PS], j % PS] = True
    poison = jnp.where(jnp.asarray(seen)[..., None, None], 0.0, jnp.nan)
    wild = bt.copy()
    for r, n in enumerate(LENS):
        wild[r, -(-n // PS) :] = [-1, 10**6, -(2**31), 7, 2**31 - 1][: COLUMNS - (-(-n // PS))]
    again = page_attention(q, k + poison, v + poison, LENS, wild)
    np.testing.assert_array_equal(out, again)
    grads = jax.grad(lambda *a: page_attention(*a, LENS, wild).sum(), (0, 1, 2))(
        q, k + poison, v + poison
    )
    assert all(np.isfinite(g).all() for g in grads)
    assert not np.asarray(out)[1].any()  # the empty context


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_quantised_cache_with_scales(dtype):
    bt = tables()
    q = normal(B, H, D)
    k, v = ((normal(PAGES, PS, HK, D) * 8).astype(dtype) for _ in range(2))
    scales = [jnp.asarray([0.05, 0.11]), jnp.asarray(0.07)]
    with jax.enable_x64(True):
        k64, v64 = wide(k, v)
    reference_of = lambda q, ks, vs: oracle.page_attention(  # noqa: E731
        q, k64, v64, LENS, bt, scale=D**-0.5, k_scale=ks, v_scale=vs * jnp.ones(HK)
    )

    def ours(q, ks, vs):
        return page_attention(q, k, v, LENS, bt, k_scale=ks, v_scale=vs)

    compare(ours, reference_of, [q, *scales], ["q", "k_scale", "v_scale"])


@pytest.mark.parametrize("left", [None, 5])
def test_ragged_decode(left):
    length = 23
    q, k, v = normal(B, H, D), normal(B, length, HK, D), normal(B, length, HK, DV)
    aux = normal(3)
    start, end = np.array([0, 7, 9, -4]), np.array([23, 7, 20, 99])

    def ours(q, k, v, aux):
        outputs = ragged_decode_attention(
            q, k, v, start, end, aux, sliding_window=left, return_lse=True,
            cfg={"fwd_params": {"kv_blocksize": 8}},
        )  # fmt: skip
        return joined(outputs)

    def theirs(q, k, v, aux):
        outputs = oracle.ragged_decode_attention(
            q, k, v, start, end, scale=D**-0.5, aux=aux, left=left, return_lse=True
        )
        return joined(outputs)

    compare(ours, theirs, [q, k, v, aux], ["q", "k", "v", "aux"])


@pytest.mark.parametrize(("rows", "splits", "window"), [(1, 1, None), (3, 2, 4)])
def test_mla_decode(rows, splits, window):
    latent, dc = 16, 24
    bt = tables()
    q, cache, k_scale = normal(B, rows, H, dc), normal(PAGES, PS, dc), jnp.float32(0.7)

    def ours(q, cache, k_scale):
        return joined(
            mla_decode(
                q, cache, LENS, bt, latent_dim=latent, k_scale=k_scale, num_splits=splits,
                sliding_window=window, return_lse=True, logits_soft_cap=4.0,
            )
        )  # fmt: skip

    def theirs(q, cache, k_scale):
        return joined(
            oracle.mla_decode(
                q, cache, LENS, bt, latent, k_scale, scale=dc**-0.5, left=window, cap=4.0
            )
        )

    compare(ours, theirs, [q, cache, k_scale], ["q", "cache", "k_scale"])


STARTS = np.array([0, 1, 1, 8, 13, 2, 0], np.int32)  # entries past the last sequence are noise
CONTEXT = np.array([9, 5, 11, 5, 1000, -3], np.int32)
COUNT, TOKENS = 4, 16


def ragged_case(dtype=np.float32):
    bt = np.full((6, 4), -1, np.int32)
    order = iter(RNG.permutation(PAGES))
    for r in range(COUNT):
        for c in range(-(-CONTEXT[r] // PS)):
            bt[r, c] = next(order)
    return normal(TOKENS, H, D, dtype=dtype), normal(PAGES, PS, 2 * HK, D, dtype=dtype), bt


@pytest.mark.parametrize(
    ("cap", "window", "sinks", "cfg"),
    [(None, None, 0, None), (2.0, 3, 2, {"num_queries_per_block": 4, "num_kv_pages_per_block": 2})],
)
def test_ragged_page_attention(cap, window, sinks, cfg):
    q, pages, bt = ragged_case()
    aux = [normal(H, sinks)] if sinks else []

    def ours(q, pages, aux=None):
        outputs = ragged_page_attention(
            q, pages, CONTEXT, bt, STARTS, np.array([COUNT]), aux,
            logits_soft_cap=cap, sliding_window=window, cfg=cfg, return_lse=True,
        )  # fmt: skip
        return joined(outputs)

    def theirs(q, pages, aux=None):
        outputs = oracle.ragged_page_attention(
            q, pages, CONTEXT, bt, STARTS, COUNT, scale=D**-0.5, cap=cap, left=window, aux=aux,
            return_lse=True,
        )  # fmt: skip
        return joined(outputs)

    compare(ours, theirs, [q, pages, *aux], ["q", "pages", "aux"][: 2 + len(aux)])


def pack(pages, per):
    """The packed form of ``[P, ps, 2 * hk, d]`` with ``per`` heads to a word."""
    groups = -(-pages.shape[2] // per)
    padded = -(-pages.shape[3] // 128) * 128
    room = [(0, 0), (0, 0), (0, groups * per - pages.shape[2]), (0, padded - pages.shape[3])]
    pages = jnp.pad(pages, room, constant_values=7)
    return pages.reshape(*pages.shape[:2], groups, per, padded)


@pytest.mark.parametrize("packed", [False, True])
def test_ragged_page_attention_v3_writes_and_attends(packed):
    q, pages, bt = ragged_case()
    keys, values = normal(TOKENS, HK, D), normal(TOKENS, HK, D)

    def ours(q, keys, values, pages):
        cache = pack(pages, 1) if packed else pages
        out, lse, cache = ragged_page_attention_v3(
            q, keys, values, cache, CONTEXT, bt.reshape(-1) if packed else bt, STARTS,
            np.array([0, 0, COUNT]), return_lse=True,
        )  # fmt: skip
        if packed:
            assert cache.shape == pack(pages, 1).shape
            cache = cache[..., : 2 * HK, :, :D].reshape(pages.shape)
        return jnp.concatenate([joined((out, lse)).reshape(-1), cache.reshape(-1)])

    def theirs(q, keys, values, pages):
        cache = oracle.write_pages(pages, keys, values, CONTEXT, bt, STARTS, COUNT)
        outputs = oracle.ragged_page_attention(
            q, cache, CONTEXT, bt, STARTS, COUNT, scale=D**-0.5, return_lse=True
        )
        return jnp.concatenate([joined(outputs).reshape(-1), cache.reshape(-1)])

    compare(ours, theirs, [q, keys, values, pages], ["q", "keys", "values", "pages"])


def test_v3_quantises_on_write_and_leaves_padding_alone():
    q, pages, bt = ragged_case()
    keys, values = normal(TOKENS, HK, D), normal(TOKENS, HK, D)
    cache = pack((pages * 20).astype(jnp.int8), 4)
    k_scale, v_scale = jnp.asarray([0.02, 0.03]), 0.025
    write = jax.jit(partial(ragged_page_attention_v3, k_scale=k_scale, v_scale=v_scale))
    counts = np.array([0, 0, COUNT])
    out, new = write(q, keys, values, cache, CONTEXT, bt, STARTS, counts)
    np.testing.assert_array_equal(np.asarray(new)[..., D:], np.asarray(cache)[..., D:])

    def stored(x, scale):
        return np.clip(np.rint(np.asarray(x, np.float64) / scale), -128, 127)

    k8, v8 = (
        stored(keys, np.float64(np.float32([0.02, 0.03]))[:, None]),
        stored(values, np.float32(v_scale)),
    )
    with jax.enable_x64(True):
        plain = jnp.asarray(np.asarray(cache)[..., :D].reshape(PAGES, PS, 2 * HK, D), jnp.float64)
        expected = oracle.write_pages(plain, k8, v8, CONTEXT, bt, STARTS, COUNT)
        reference = oracle.ragged_page_attention(
            wide(q)[0], expected, CONTEXT, bt, STARTS, COUNT, scale=D**-0.5,
            k_scale=jnp.asarray(np.float32([0.02, 0.03]), jnp.float64),
            v_scale=jnp.full(HK, np.float32(v_scale), jnp.float64),
        )  # fmt: skip
    got = np.asarray(new)[..., :D].reshape(PAGES, PS, 2 * HK, D)
    assert np.abs(got - np.asarray(expected)).max() <= 1  # a tie may round either way
    check_close(out, reference, rms_limit=5e-3)


@pytest.mark.parametrize(("dtype", "scale"), [("int8", 0.04), ("float8_e4m3fn", 0.5)])
def test_v3_queries_that_are_quantised_have_gradients_of_exact_ones(dtype, scale):
    q, pages, bt = ragged_case()
    weights = normal(TOKENS, H, D)
    keys, values = (quantise(normal(TOKENS, HK, D), scale, dtype) for _ in range(2))
    cache = quantise(pages.reshape(-1, 2 * HK, D), scale, dtype).reshape(pages.shape)

    def gradient(convert, **scales):
        def total(q):
            out, _ = ragged_page_attention_v3(
                q, convert(keys), convert(values), convert(cache), CONTEXT, bt, STARTS,
                jnp.asarray([0, 0, COUNT]), **scales,
            )  # fmt: skip
            return (out * weights).sum()

        return jax.jit(jax.grad(total))(q)

    exact = gradient(lambda x: x.astype(jnp.float32) * scale)
    got = gradient(lambda x: x, q_scale=scale, k_scale=scale, v_scale=scale)
    # scores have the error of a rounded query: about half a step, 1 / 16 of it in float8
    assert jnp.abs(got - exact).max() <= 0.1 * jnp.abs(exact).max()
    assert jnp.abs(exact).max() > 0


def test_packed_equals_batched_and_contiguous():
    """The same decoding step through four doors."""
    bt = tables()
    lens = np.array([9, 3, 20, 1], np.int32)
    q, pages = normal(B, H, D), normal(PAGES, PS, 2 * HK, D)
    k, v = pages[:, :, 0::2], pages[:, :, 1::2]
    paged, lse = jax.jit(partial(page_attention, return_lse=True))(q, k, v, lens, bt)
    attend = jax.jit(partial(ragged_page_attention, return_lse=True))
    ragged, ragged_lse = attend(q, pages, lens, bt, np.arange(B + 1), B - 1)
    flat_k, flat_v = (x[bt].reshape(B, COLUMNS * PS, HK, D) for x in (k, v))
    starts = np.array([0, 3, 0, 0], np.int32)  # the second row sees nothing
    attend = jax.jit(partial(ragged_decode_attention, return_lse=True))
    decode, decode_lse = attend(q, flat_k, flat_v, starts, lens)
    np.testing.assert_allclose(paged[:-1], ragged[:-1], atol=2e-6)
    np.testing.assert_allclose(lse[:-1], ragged_lse[:-1], atol=2e-6)
    assert not np.asarray(ragged[-1]).any() and np.isneginf(ragged_lse[-1]).all()
    rows = np.array([0, 2, 3])
    np.testing.assert_allclose(paged[rows], decode[rows], atol=2e-6)
    np.testing.assert_allclose(lse[rows], decode_lse[rows], atol=2e-6)
    assert not np.asarray(decode[1]).any() and np.isneginf(decode_lse[1]).all()
    for x in (lse, ragged_lse, decode_lse):
        assert x.dtype == jnp.float32 and x.shape == (B, H)


def test_transformations_and_empty_shapes():
    bt = tables()
    q, k, v = normal(2, B, H, D), normal(PAGES, PS, HK, D), normal(PAGES, PS, HK, D)
    pairs = {"query": q, "key_cache": k, "value_cache": v, "block_tables": bt}
    pairs["context_lens"] = jnp.stack([LENS, LENS])
    check_transformations(page_attention, pairs, ("key_cache", "value_cache", "block_tables"))
    assert page_attention(q[0], k[:0], v[:0], jnp.asarray(LENS), bt).shape == (B, H, D)
    assert page_attention(q[0], k, v, jnp.asarray(LENS), bt[:, :0]).sum() == 0
    assert page_attention(q[0, :0], k, v, LENS[:0], bt[:0]).shape == (0, H, D)
    empty = ragged_decode_attention(q[0], normal(B, 0, HK, D), normal(B, 0, HK, D), LENS, LENS)
    assert empty.shape == (B, H, D) and not np.asarray(empty).any()


def test_float64_matches_the_reference():
    with jax.enable_x64(True):
        q, k, v = (
            normal(*s, dtype=np.float64)
            for s in ((B, H, D), (PAGES, PS, HK, D), (PAGES, PS, HK, D))
        )
        bt = tables()
        out = page_attention(q, k, v, LENS, bt)
        check_close(out, oracle.page_attention(q, k, v, LENS, bt, scale=D**-0.5))


def test_gradient_of_a_float_cache_beside_a_quantised_one():
    bt = tables()
    q, k = normal(B, H, D), normal(PAGES, PS, HK, D)
    v8 = (normal(PAGES, PS, HK, D) * 9).astype(jnp.int8)

    def loss(q, k, v):
        return page_attention(q, k, v, LENS, bt, v_scale=0.1).sum()

    with_float = jax.grad(loss, (0, 1))(q, k, v8.astype(jnp.float32))
    mixed = jax.grad(loss, (0, 1))(q, k, v8)
    for a, b in zip(mixed, with_float, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("splits", without([1, 3], 1))
def test_sinks_of_minus_infinity_are_none(splits):
    q, k, v, bt = normal(B, H, D), normal(PAGES, PS, HK, D), normal(PAGES, PS, HK, D), tables()
    sinks = jnp.full((H, 2), -jnp.inf)

    def loss(q, sinks):
        return page_attention(q, k, v, LENS, bt, softmax_aux=sinks, num_splits=splits).sum()

    (dq, dsinks), without = jax.grad(loss, (0, 1))(q, sinks), jax.grad(loss)(q, None)
    np.testing.assert_allclose(dq, without, atol=1e-6)
    assert (dsinks == 0).all()


def test_gradients_with_numpy_caches_and_tables():
    q, k, v = np.ones((2, 2, 8), np.float32), *(np.ones((3, 4, 1, 8), np.float32) for _ in "kv")
    lens, tables = np.array([3, 6]), np.array([[1, 0], [0, 2]])

    def loss(x, *others):
        return (page_attention(x, *others) ** 2).sum()

    ours = jax.grad(loss, (0, 2))(q, k, v, lens, tables)
    jaxs = jax.grad(loss, (0, 2))(*map(jnp.asarray, (q, k, v, lens, tables)))
    np.testing.assert_array_equal(ours[0], jaxs[0])
    np.testing.assert_array_equal(ours[1], jaxs[1])

"""Native sparse attention through Triton's interpreter, against its definition in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.triton.flash_attention.dkv_kernel import DkvLaunch
from ejkernel.kernels.triton.flash_attention.implementation import flash_attention
from ejkernel.kernels.triton.native_sparse_attention import launch as launches
from ejkernel.kernels.triton.native_sparse_attention import lists, select, tiles
from ejkernel.kernels.triton.native_sparse_attention.dkv_kernel import SelectedDkv
from ejkernel.kernels.triton.native_sparse_attention.implementation import native_sparse_attention
from ejkernel.kernels.triton.native_sparse_attention.problem import Problem
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode
from ejkernel.types.masks.structure import Unsupported
from ejkernel.types.masks.token_blocks import block_means, find_blocks, means_mask
from ejktest.cases.sparse import check_chosen, compare
from ejktest.drawn import array
from ejktest.grids import cover
from ejktest.oracles import sparse as oracle
from ejktest.programs import equations_of, sizes_of
from ejktest.tolerance import check_close
from ejktest.triton_calls import traced_launches

pytest.importorskip("triton")

S, HK, D, DV, SIZE = 21, 2, 16, 8, 4
RNG = np.random.default_rng(0)
TARGET = cuda_target(90)


@pytest.fixture(autouse=True)
def interpreted():
    with interpret_mode(), compile_for(TARGET):
        yield


def normal(*shape):
    return array(RNG.standard_normal(shape), jnp.float32)


def inputs(group, gates=3, length=S, hk=HK):
    h = hk * group
    arrays = [normal(1, length, h, D), normal(1, length, hk, D), normal(1, length, hk, DV)]
    return arrays + [normal(1, length, h) for _ in range(gates)]


def test_selection_and_all_branches():
    length, size, window, count, scale = 13, 3, 4, 2, -0.3
    args = inputs(3, length=length)

    def ours(q, k, v, g_cmp, g_slc, g_swa):
        return native_sparse_attention(
            q, k, v, g_cmp, g_slc, block_counts=count, block_size=size, sliding_window=window,
            g_swa=g_swa, softmax_scale=scale,
        )  # fmt: skip

    def theirs(q, k, v, *gates):
        return oracle.sequence(
            q[0], k[0], v[0], [g[0] for g in gates], size=size, count=lambda t, m: count,
            scale=scale, window=window, length=length,
        )[None]  # fmt: skip

    compare(ours, theirs, args)


@pytest.mark.parametrize(("group", "size", "tile"), [(2, SIZE, None), (1, 20, 16)])
def test_given_blocks_with_counts_duplicates_and_strangers(group, size, tile, monkeypatch):
    """A block of more keys than a tile has two of them; lists that are cut into pieces."""
    monkeypatch.setattr(launches, "piece_length", lambda p: 16)
    args, slots = inputs(group, gates=0), 5
    indices = RNG.integers(-2, S // size + 3, (1, S, HK, slots)).astype(np.int32)
    indices[0, :, :, 2] = indices[0, :, :, 0]
    indices[0, :, :, 3] = 0  # of all tokens: more than one piece
    counts = RNG.integers(1, slots + 1, (1, S, HK)).astype(np.int32)

    def ours(q, k, v):
        return native_sparse_attention(
            q, k, v, block_indices=indices, block_counts=counts, block_size=size,
            cfg={"kv_tile": tile, "q_tile": tile},
        )  # fmt: skip

    def theirs(q, k, v):
        return oracle.sequence(
            q[0], k[0], v[0], (None, None, None), size=size, scale=D**-0.5, length=S,
            count=lambda t, m: int(counts[0, t, m]), indices=indices[0].tolist(),
        )[None]  # fmt: skip

    compare(ours, theirs, args)


def test_ds_is_stored_for_queries():
    """Gradients of one key head after the other; blocks of 20 keys are cut by tiles of 16."""
    size, slots = 20, 4
    q, k, v, do = (x.astype(jnp.bfloat16) for x in [*inputs(2, gates=0), normal(1, S, 2 * HK, DV)])
    indices = RNG.integers(-1, 2, (1, S, HK, slots)).astype(np.int32)
    p = Problem(1, S, 2 * HK, HK, D, DV, size, 2, slots, D**-0.5, "bfloat16", False)
    assert p.stores_ds and p.at_once == 1 < HK
    assert not replace(p, slots=5).stores_ds and not replace(p, dtype="float32").stores_ds

    def run(*x):
        options = {"block_size": size, "cfg": {"kv_tile": 16}}
        return native_sparse_attention(*x, block_indices=indices, **options)

    out, back = jax.vjp(run, q, k, v)
    want = oracle.over_lists(q[0], k[0], v[0], indices[0], size, D**-0.5, do[0])
    for name, a, b in zip(("o", "dq", "dk", "dv"), (out, *back(do)), want, strict=True):
        check_close(a[0], b, dtype="bfloat16", name=name)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 64])
@pytest.mark.parametrize(("dim", "size", "slots"), [(128, 64, 16), (64, 32, 9), (256, 128, 16)])
def test_stored_ds_takes_four_arrays_of_queries_at_most(kv_heads, dim, size, slots):
    length, h = 1000, 64 * kv_heads
    p = Problem(2, length, h, kv_heads, dim, 64, size, 16, slots, 1.0, "bfloat16", False)
    launch = SelectedDkv(p, tiles.Tiles(16, 4, 1), p.at_once, p.at_once)
    ds = launch.outputs()["ds"]
    stored = 0 if ds is None else ds.size
    assert stored <= 4 * 2 * length * p.heads * dim
    assert p.stores_ds == (stored > 0) == (kv_heads > 1)
    # and no more launches than that
    assert p.at_once == kv_heads or stored > 2 * 2 * length * p.heads * dim


def test_without_gradients_one_launch_adds_the_branches():
    """With the bits of the one that keeps what gradients need; packed, since tokens of no sequence
    have no list."""
    q, k, v, g_cmp, g_slc, g_swa = inputs(2, length=14, hk=1)
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    cu = jnp.asarray([0, 5, 12], jnp.int32)

    def call(*x, gates=(g_cmp, g_slc), **options):
        return native_sparse_attention(
            *x, *gates, cu_seqlens=cu, block_counts=2, block_size=2, **options
        )

    window = {"sliding_window": 3}
    for options in ({}, {**window, "g_swa": g_swa}, {**window, "gates": (None, None)}):
        run = jax.jit(partial(call, **options))
        alone, (together, _) = run(q, k, v), jax.vjp(run, q, k, v)
        np.testing.assert_array_equal(alone, together)
        assert not np.asarray(alone, np.float32)[:, 12:].any()
    text = str(jax.make_jaxpr(run)(q, k, v))
    assert "for_gradients=False" in text and "'o_swa'" in text and "'o_cmp'" not in text
    text = str(jax.make_jaxpr(lambda *x: jax.vjp(run, *x)[0])(q, k, v))
    assert "for_gradients=True" in text and "'o_swa'" in text
    assert "for_gradients=False" not in text


def test_every_block_is_causal_attention():
    """Without a ranking too the own block, which alone has keys behind a token, is the first."""
    args = inputs(2, gates=0, length=6, hk=1)

    def ours(q, k, v):
        return native_sparse_attention(q, k, v, block_counts=2, block_size=4)

    def theirs(q, k, v):
        return oracle.sequence(
            q[0], k[0], v[0], (None, None, None), size=6, scale=D**-0.5, length=6,
            count=lambda t, m: 1, indices=[[[0]]] * 6,
        )[None]  # fmt: skip

    compare(ours, theirs, args)


def test_packed_equals_each_sequence_alone():
    """Counts below the bound take the best blocks; nothing of padding is read."""
    lengths, total = [7, 0, 7], 17
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    args = inputs(2, gates=1, length=total, hk=1)
    counts = RNG.integers(1, 4, (1, total, 1)).astype(np.int32)

    @jax.jit
    def pull(args, counts, cu=None):
        def call(q, k, v, g_cmp):
            return native_sparse_attention(
                q, k, v, g_cmp, None, None, counts, cu, block_size=2, max_block_count=3
            )

        out, back = jax.vjp(call, *args)
        return out, *back(jnp.cos(out))

    padded = [x.at[:, cu[-1] :].set(jnp.nan) for x in args]
    with compile_for(cuda_target(90, 1)):  # means are enough for one multiprocessor
        packed = pull(padded, counts, cu)
    for a, b in ((0, 7), (7, 14)):
        alone = pull([x[:, a:b] for x in args], counts[:, a:b])
        for got, want in zip(packed, alone, strict=True):
            np.testing.assert_allclose(got[:, a:b], want, atol=4e-6)
    assert not any(np.asarray(x)[:, cu[-1] :].any() for x in packed)


def test_wide_groups_in_half_precision_and_vmap(monkeypatch):
    """40 query heads share a key head, 16 at a time; two rows are two calls, with the same bits."""
    monkeypatch.setattr(tiles, "_heads", lambda p: 16)
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs(40, gates=0, length=5, hk=1))
    every = jnp.asarray([[0, 1]] * 5, jnp.int32)[None, :, None]

    @jax.jit
    def pull(q, k, v):
        def run(q, k, v):
            return native_sparse_attention(q, k, v, block_indices=every, block_size=SIZE)

        out, back = jax.vjp(run, q, k, v)
        return out, *back(out)

    batch = [jnp.stack([x, 2 * x]) for x in (q, k, v)]
    single, lifted = pull(q, k, v), jax.jit(jax.vmap(pull))(*batch)
    assert single[0].dtype == jnp.bfloat16
    for a, b in zip(single, lifted, strict=True):
        np.testing.assert_array_equal(a, b[0])
    x = jnp.einsum("bqhd,bkxd->bhqk", q.astype(jnp.float32), k.astype(jnp.float32)) * D**-0.5
    p = jax.nn.softmax(jnp.where(np.tri(5, dtype=bool), x, -jnp.inf))
    want = jnp.einsum("bhqk,bkxd->bqhd", p, v.astype(jnp.float32))
    check_close(single[0], want, rms_limit=5e-3)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_means_are_sums_of_exact_terms(size):
    """Two float16 hold a float32 but for its last bit, next to one 10^4 times larger."""
    means = normal(1, 4, 2, 8) * jnp.asarray([1e-4, 1e-2, 1e-2, 1])[:, None, None] * size
    terms, factors = map(np.asarray, jax.jit(select.exact_terms, static_argnums=1)(means, 3))
    assert terms.dtype == np.float16
    assert terms.shape == (1, 2, 4 + 3, 2, 8)
    found = np.moveaxis(terms[:, :, :4].astype(np.float64).sum(3), 1, 2) * factors[0][:, None]
    scale = np.abs(means).max()
    np.testing.assert_allclose(
        found, np.asarray(means, np.float64), rtol=2**-23, atol=2**-39 * scale
    )


def ranked(q, k, size, slots, scale=0.25):
    s, h, d = q.shape[1:]
    blocks = find_blocks(s, size)
    p = Problem(q.shape[0], s, h, 1, d, d, size, blocks.count, slots, scale, q.dtype.name, False)
    rank = jax.jit(lambda q, k: select.select(p, TARGET, q, k, blocks, True))
    return rank(q, k), blocks


@pytest.mark.parametrize(
    ("dtype", "most"),
    cover(
        [("bfloat16", 129), ("float32", 129), ("bfloat16", 0)], ("float32", 129), ("bfloat16", 0)
    ),
)
def test_ties_go_to_the_lower_block_across_tiles(dtype, most, monkeypatch):
    """Of equal scores, and against scores computed in one product; 70 blocks are three tiles.

    Ranked by a kernel, or some tokens of two rows at a time by XLA (``most`` 0).
    """
    monkeypatch.setattr(select, "MAX_RANKED", most)
    monkeypatch.setattr(select, "MAX_SCORES", 70 * 60)
    s, size, slots = 140, 2, 4
    same, _ = ranked(jnp.ones((1, s, 2, 16)), jnp.ones((1, s, 1, 16)), size, slots)
    for t in range(s):
        local_block = t // size
        earlier_blocks = [c for c in range((t + 1) // size) if c != local_block]
        want = ([local_block, *earlier_blocks] + [-1] * slots)[:slots]
        np.testing.assert_array_equal(same[0, t, 0], want)
    q, k = normal(1, s, 2, 16).astype(dtype), normal(1, s, 1, 16).astype(dtype)
    both = [jnp.concatenate([x] * (1 if most else 2)) for x in (q, k)]
    got, blocks = ranked(*both, size, slots)
    score = oracle.scores(q[0], block_means(k, blocks)[0], size, 0.25)[:, 0]
    want = np.argsort(-score, axis=-1, kind="stable")[:, :slots]
    want = np.where(np.take_along_axis(score, want, -1) < 0, -1, want)
    for row in got:
        np.testing.assert_array_equal(row[:, 0], want)


def test_small_means_beside_a_large_one():
    """The last block's mean is 2^20 times the others, which keep no bit below 2^-39 of it: scores
    are float64's within twice (logit and lse) what their logits lose; of equal means, however
    small, the lower number goes first."""
    q, k = normal(1, 24, 2, 16), normal(1, 24, 1, 16)
    k = k.at[:, 10:14].set(k[:, 2:6]).at[:, 16:20].set(k[:, 2:6] * (1 + 2**-12))
    k = k.at[:, 22:].multiply(2.0**20)
    got, blocks = ranked(q, k, 2, 12)
    means = np.abs(np.asarray(block_means(k, blocks)[0]))
    lost = 2**-39 * 0.25 * np.abs(q[0]).sum(-1).max() * means.max()
    score = oracle.scores(q[0, :22], block_means(k, blocks)[0], 2, 0.25)
    check_chosen(got[0, :22], score, rtol=2 * lost + 2**-20)
    for row in np.asarray(got)[0, 14:22, 0].tolist():  # those of the last block see little else
        assert row.index(1) + 1 == row.index(5) and row.index(2) + 1 == row.index(6)


def test_groups_of_more_heads_than_rows(monkeypatch):
    """The scores of a group are added part by part: the same blocks as with all heads at once."""
    q, k = normal(1, 24, 6, 16), normal(1, 24, 1, 16)
    full_rank, _ = ranked(q, k, 2, 4)
    chosen = tiles.SelectTiles(2, 16, 4, 1, 3)
    monkeypatch.setattr(select, "choose_select_tiles", lambda p, target: chosen)
    np.testing.assert_array_equal(ranked(q, k, 2, 4)[0], full_rank)


def test_choice_by_huge_logits_and_by_none():
    """Logits of 4e10: every head has one block, of score 1 but for the rounding of a quotient, then
    come the others by number. A scale of 0: all by number."""
    q, k = 1e5 * normal(1, 24, 2, 16), 1e5 * normal(1, 24, 1, 16)
    huge, blocks = ranked(q, k, 2, 4)
    none, _ = ranked(q, k, 2, 4, 0.0)
    x = np.einsum(
        "bshd,bnxd->bshn", *(np.asarray(y, np.float64) for y in (q, block_means(k, blocks)))
    )
    for t in range(1, 24):
        local_block = t // 2
        others = [c for c in range((t + 1) // 2) if c != local_block]
        first = sorted(
            {int(np.argmax(x[0, t, h, : (t + 1) // 2])) for h in range(2)} - {local_block}
        )
        for got, best in ((huge, first), (none, [])):
            want = [local_block, *best, *(c for c in others if c not in best), -1, -1, -1][:4]
            found, end = got[0, t, 0].tolist(), 1 + len(best)
            assert [found[0], *sorted(found[1:end]), *found[end:]] == want


def test_large_logits_and_a_scale_of_zero():
    """Logits of 4e10, all alike, and no logits: the answer is the mean of what is seen."""
    k, v = jnp.full((1, 10, 1, 16), 1e5), normal(1, 10, 1, 16)
    indices = jnp.zeros((1, 10, 1, 1), jnp.int32)
    for options in ({"softmax_scale": 1.0}, {"softmax_scale": 0.0}):
        run = partial(native_sparse_attention, block_indices=indices, block_size=10, **options)
        o, back = jax.vjp(jax.jit(lambda v, run=run: run(k, k, v)[:, -1]), v)
        np.testing.assert_allclose(o, v.mean(1), atol=1e-6)
        np.testing.assert_allclose(back(jnp.ones_like(o))[0], np.full(v.shape, 0.1), atol=1e-6)


@pytest.mark.parametrize("blocks", ["given", "selected"])
def test_nan_that_a_token_sees_is_in_its_output_and_gradients(blocks):
    q, k, v = inputs(2, gates=0, hk=1)
    k = k.at[0, 5].set(jnp.nan)
    options = {"block_counts": 2}
    if blocks == "given":
        block = jnp.arange(S, dtype=jnp.int32) // SIZE
        options = {"block_indices": jnp.stack([0 * block, block], -1)[None, :, None]}
    attend = jax.jit(partial(native_sparse_attention, **options, block_size=SIZE))
    with np.errstate(invalid="ignore"):  # the interpreter computes in numpy
        o, pull = jax.vjp(attend, q, k, v)
        *_, dv = pull(jnp.ones_like(o))
    # a block with NaN among its keys is selected by every later token
    saw = slice(5, 8 if blocks == "given" else S)
    has_nan, dv_has_nan = (np.isnan(x[0]).any((1, 2)) for x in (o, dv))
    assert has_nan[saw].all() and has_nan.sum() == len(has_nan[saw])
    assert dv_has_nan[:8].all() and (blocks == "selected" or not dv_has_nan[8:].any())


def test_gradients_pass_over_the_branches_once():
    """For do . o, which gates and all branches share; no row is cleared."""
    length, heads = 70, 6
    args = [jnp.zeros((1, length, n, D), jnp.bfloat16) for n in (heads, 2, 2)]
    args += [jnp.zeros((1, length, heads))] * 3

    def run(q, k, v, g_cmp, g_slc, g_swa):
        out, back = jax.vjp(
            lambda *x: native_sparse_attention(
                *x[:5], g_swa=x[5], sliding_window=9, block_counts=2, block_size=5
            ),
            q, k, v, g_cmp, g_slc, g_swa,
        )  # fmt: skip
        return back(out)

    names = [
        equation.primitive.name
        for equation in equations_of(jax.make_jaxpr(run)(*args).jaxpr)
        if any(getattr(x.aval, "shape", ()) == args[0].shape for x in equation.invars)
    ]
    assert names.count("reduce_sum") == 3
    assert "select_n" not in names and "dot_general" not in names


@pytest.mark.parametrize("rows", [16, 5])
@pytest.mark.parametrize("largest", [2**31, 0])
def test_tokens_of_every_block(rows, largest, monkeypatch):
    """Rows sorted one by one or together, one number or two: places of a block rise."""
    monkeypatch.setattr(lists, "MAX_SINGLE_ROWS", rows)
    monkeypatch.setattr(lists, "INT32", largest)
    blocks, slots = find_blocks(40, 4), 3
    chosen = np.argsort(RNG.random((2, 40, 3, blocks.count)), -1)[..., :slots]
    chosen[:, ::3, :, 1:] = -1
    transpose = jax.jit(lambda chosen: lists.transpose_lists(chosen, blocks))
    places, bounds = transpose(array(chosen, jnp.int32))
    for b, hk in np.ndindex(2, 3):
        for block in range(blocks.count):
            t, slot = np.nonzero(chosen[b, :, hk] == block)
            np.testing.assert_array_equal(
                places[b, hk, bounds[b, hk, block] : bounds[b, hk, block + 1]], t * 4 + slot
            )


@pytest.mark.parametrize("group", cover([1, 2], 2))
def test_few_means_of_many_tokens(group):
    """Programs of all heads' first tile come first: 20 means of 200 tokens, in tiles of 16."""
    q, k, v = normal(1, 200, 2, D), normal(1, 20, 2 // group, D), normal(1, 20, 2 // group, DV)
    blocks = find_blocks(200, 10)
    tile = {"q_blocksize": 16, "kv_blocksize": 16}
    cfg = {"fwd_params": tile, "bwd_params": tile}

    def ours(q, k, v):
        return flash_attention(q, k, v, mask_info=means_mask(blocks, 1), cfg=cfg)

    def theirs(q, k, v):
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        x = jnp.einsum("bqhd,bkhd->bhqk", q, k) * D**-0.5
        seen = (jnp.arange(200)[:, None] + 1) // 10 > jnp.arange(20)
        p = jnp.where(seen, jnp.exp(x), 0.0)
        p /= jnp.maximum(p.sum(-1, keepdims=True), 1e-30)
        return jnp.einsum("bhqk,bkhd->bqhd", p, v)

    traced = compare(ours, jax.jit(theirs), [q, k, v])
    launches = (launch for launch, _ in traced_launches(traced.jaxpr))
    assert [x.neighbours() for x in launches if isinstance(x, DkvLaunch)] == [2]


def test_memory_is_linear_in_the_length():
    """All branches with gradients: no array grows faster than the tokens, none has a number for
    every query head, token and block."""

    def largest(length):
        q, k = (jax.ShapeDtypeStruct((1, length, n, 128), jnp.bfloat16) for n in (64, 4))
        gates = [jax.ShapeDtypeStruct((1, length, 64), jnp.float32)] * 3

        def run(q, k, v, g_cmp, g_slc, g_swa):
            out, back = jax.vjp(
                lambda *x: native_sparse_attention(*x[:5], g_swa=x[5], sliding_window=512),
                q, k, v, g_cmp, g_slc, g_swa,
            )  # fmt: skip
            return out, *back(out)

        return max(sizes_of(jax.make_jaxpr(run)(q, k, k, *gates).jaxpr))

    length = 1 << 16
    assert largest(2 * length) <= 2 * largest(length) < 4 * length * 64 * (length // 64)


def test_unsupported_calls_are_refused():
    q, k, v = inputs(2, gates=0)
    with pytest.raises(Unsupported, match=r"head dim 12"):
        native_sparse_attention(q, k, v[..., :1].repeat(12, -1))
    assert native_sparse_attention(q[:, :0], k[:, :0], v[:, :0]).shape == (1, 0, 2 * HK, DV)


def test_configs_are_read_back():
    p = Problem(1, 512, 8, 2, 64, 64, 64, 8, 4, 0.1, "bfloat16", False)
    chosen = tiles.choose(p, TARGET)
    assert chosen.apply_config(chosen.fields, p, TARGET) == chosen
    given = chosen.apply_config({"kv_tile": 16, "q_tile": 16, "num_warps": 8}, p, TARGET)
    assert (given.fwd.keys, given.dkv.keys, given.dkv.tokens) == (16, 16, 4)
    assert (given.dq.num_warps, given.dkv.num_warps) == (8, chosen.dkv.num_warps)
    for near in tiles.neighbours(p, TARGET, chosen):
        assert chosen.apply_config(near.fields, p, TARGET) == near != chosen

"""Logits of any finite size: values, lse and gradients of every softmax operation."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.xla import (
    attention,
    blocksparse_attention,
    flash_attention,
    mla_attention,
    mla_decode,
    native_sparse_attention,
    page_attention,
    ring_attention,
    scaled_dot_product_attention,
)
from ejktest.cases import large_logits
from ejktest.cases.large_logits import MAX, MIN
from ejktest.drawn import array

# what the others add to these, a causal mask and bfloat16, shares its code with them
CASES = [c for c in large_logits.CASES if str(c) not in ("bias_bfloat16", "bias_causal")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flash_attention_matches_the_reference(case: large_logits.Case) -> None:
    large_logits.check(case, flash_attention)


def ring(q, k, v, *, bias, softmax_aux, return_lse, **options):
    """On two devices, each with half of the queries and of the keys."""
    given = {"query": (q, P(None, "sp")), "key": (k, P(None, "sp")), "value": (v, P(None, "sp"))}
    given |= {"bias": (bias, P(None, None, "sp")), "softmax_aux": (softmax_aux, P())}
    given = {n: x for n, x in given.items() if x[0] is not None}
    return jax.shard_map(
        lambda x: ring_attention(**x, axis_name="sp", return_lse=True, **options),
        mesh=Mesh(np.array(jax.devices()[:2]), ("sp",)),
        in_specs=({n: spec for n, (_, spec) in given.items()},),
        out_specs=(P(None, "sp"), P(None, "sp")),
    )({n: x for n, (x, _) in given.items()})


BY_NAME = {c.call.name: c for c in large_logits.CASES}


@pytest.mark.parametrize("function", [blocksparse_attention, ring], ids=["blocksparse", "ring"])
@pytest.mark.parametrize("name", ["bias_cap_sinks"])
def test_other_walks(function, name: str) -> None:
    if function is ring and jax.device_count() < 2:
        pytest.skip("needs two devices")
    large_logits.check(BY_NAME[name], function)


N = 24
Q, K, V = (
    array(np.random.default_rng(i).standard_normal((1, n, 1, 16)), jnp.float32)
    for i, n in enumerate((3, N, N))
)


@jax.jit
def _all(q, k, v, bias, sinks):
    """Outputs and gradients of flash attention, and of attention without sinks."""

    def flash(q, k, v, bias, sinks):
        blocks = {"q_blocksize": 16, "kv_blocksize": 16}
        cfg = {"fwd_params": blocks, "bwd_params": blocks}
        o, lse = flash_attention(q, k, v, bias, softmax_aux=sinks, return_lse=True, cfg=cfg)
        return (o**2).sum(), (o, lse)

    def plain(q, k, v, bias, sinks):
        o, _ = attention(q, k, v, bias, softmax_aux=sinks)
        return (o**2).sum(), o

    (_, (o, lse)), grads = jax.value_and_grad(flash, (0, 1, 2, 3, 4), has_aux=True)(
        q, k, v, bias, sinks
    )
    (_, o_plain), grads_plain = jax.value_and_grad(plain, (0, 1, 2, 3, 4), has_aux=True)(
        q, k, v, bias, sinks
    )
    return (o, lse, grads), (o_plain, grads_plain)


# powers of two above 2**34: lost or kept whole in float32, whatever the order of the sums
SIZES = st.one_of(
    st.just(0.0),
    st.sampled_from([MIN, MAX]),
    st.builds(lambda e, s: s * 2.0**e, st.integers(34, 127), st.sampled_from([-1.0, 1.0])),
)


@settings(max_examples=10)
@given(st.lists(SIZES, min_size=3, max_size=3), st.lists(st.booleans(), min_size=N, max_size=N),
       SIZES, SIZES)  # fmt: skip
def test_any_magnitude(rows, chosen, sink, other) -> None:
    """A bias of one size on some keys and none on the others, and two sinks."""
    bias = np.where(chosen, np.array(rows)[:, None], 0.0)[None, None].astype(np.float32)
    sinks = np.array([[sink, other]], np.float32)
    (o, lse, grads), (o_plain, grads_plain) = _all(Q, K, V, bias, sinks)
    x = np.einsum("bqhd,bkhd->bhqk", *(np.asarray(a, np.float64) for a in (Q, K))) / 4 + bias
    x = x.astype(np.float32).astype(np.float64)  # the rounding that decides
    logits = np.concatenate([x, np.broadcast_to(sinks.astype(np.float64), (1, 1, 3, 2))], -1)
    top = logits.max(-1, keepdims=True)
    e = np.exp(logits - top)
    p = e / e.sum(-1, keepdims=True)
    v = np.asarray(V, np.float64)[0, :, 0]
    want = p[0, 0, :, :N] @ v
    want_lse = (top + np.log(e.sum(-1, keepdims=True)))[0, 0, :, 0]
    ds = p[0, 0] * (np.pad(2 * want @ v.T, ((0, 0), (0, 2))) - (2 * want * want).sum(-1)[:, None])
    for got in (o, o_plain):
        np.testing.assert_allclose(got[0, :, 0], want, atol=5e-6)
    np.testing.assert_allclose(lse[0, :, 0], want_lse, atol=2e-5, rtol=1e-6)
    for _, dk, dv, dbias, dsinks in (grads, grads_plain):
        np.testing.assert_allclose(dbias[0, 0], ds[:, :N], atol=1e-5)
        np.testing.assert_allclose(dsinks[0], ds[:, N:].sum(0), atol=1e-5)
        np.testing.assert_allclose(dv[0, :, 0], p[0, 0, :, :N].T @ (2 * want), atol=1e-5)
        want_dk = ds[:, :N].T @ np.asarray(Q)[0, :, 0] / 4
        np.testing.assert_allclose(dk[0, :, 0], want_dk, atol=1e-5)


def mla(q, _, v, bias):
    return mla_attention(q, v[:, :, 0], jnp.eye(16)[:, None], jnp.eye(16)[:, None], bias=bias)


@pytest.mark.parametrize(
    "function",
    [flash_attention, lambda *x: attention(*x)[0], scaled_dot_product_attention, mla],
    ids=["flash", "attention", "sdpa", "mla"],
)
def test_a_float64_bias_is_a_number_to_float32_logits(function) -> None:
    with jax.enable_x64(True):
        bias = jnp.full((1, 1, 3, N), np.finfo(np.float64).min)
        o, vjp = jax.vjp(jax.jit(lambda b: function(Q, K, V, b)), bias)
        np.testing.assert_allclose(o[0, :, 0], V[0, :, 0].mean(0)[None].repeat(3, 0), atol=1e-6)
        assert np.abs(np.asarray(vjp(jnp.ones_like(o))[0])).max() > 1e-3


@pytest.mark.parametrize("splits", [1, 3])
def test_page_attention_with_sinks_and_inputs_of_any_size(splits: int) -> None:
    pages = array(np.random.default_rng(3).standard_normal((4, 4, 2, 16)), jnp.float32)
    table = np.arange(4, dtype=np.int32)[None]

    def out(q, pages, sinks):
        lens = np.array([5], np.int32)
        return page_attention(
            q, pages, pages, lens, table, softmax_aux=sinks, num_splits=splits
        ).sum()

    every = jax.jit(jax.value_and_grad(out, (0, 1, 2)))
    q = array(np.random.default_rng(4).standard_normal((1, 2, 16)), jnp.float32)
    for size in (1.0, 1e5):
        for sink in (1e10, MIN, MAX):
            sinks = jnp.full((2, 2), sink)
            value, grads = every(q * size, pages * size, sinks)
            assert all(np.isfinite(g).all() for g in (value, *grads)), (size, sink)


CACHE = jnp.full((3, 4, 1, 16), 1e5)
SEEN = 10  # of its 12 tokens


def page(splits, v):
    lens, table = np.array([SEEN], np.int32), np.arange(3, dtype=np.int32)[None]
    v = v.reshape(CACHE.shape)
    return page_attention(CACHE[:1, 0], CACHE, v, lens, table, num_splits=splits)


def latent(splits, v):
    lens, table = np.array([SEEN], np.int32), np.arange(3, dtype=np.int32)[None]
    cache, k = v.reshape(3, 4, 16), jnp.zeros((1, 1, 32)).at[..., 16:].set(1e5)
    both = jnp.concatenate([cache, jnp.full((3, 4, 16), 1e5)], -1)
    return mla_decode(k, both, lens, table, latent_dim=16, num_splits=splits)


def selected(_, v):
    k, indices = jnp.full((1, SEEN, 1, 16), 1e5), jnp.zeros((1, SEEN, 1, 1), jnp.int32)
    v = v.reshape(1, -1, 1, 16)[:, :SEEN]
    return native_sparse_attention(k, k, v, block_indices=indices, block_size=SEEN)[:, -1]


@pytest.mark.parametrize(
    "function, splits", [(page, 1), (page, 3), (latent, 1), (latent, 3), (selected, 1)]
)
def test_equal_logits_share_the_row(function, splits: int) -> None:
    """Logits of 4e10, all alike: the answer is a mean, which every value moves alike."""
    v = jax.random.normal(jax.random.key(0), (12, 16))
    o, back = jax.vjp(jax.jit(partial(function, splits)), v)
    np.testing.assert_allclose(o.reshape(16), v[:SEEN].mean(0), atol=1e-6)
    want = np.where(np.arange(12) < SEEN, 1 / SEEN, 0.0)
    np.testing.assert_allclose(back(jnp.ones_like(o))[0], want[:, None].repeat(16, 1), atol=1e-6)


@pytest.mark.parametrize("op", ["page", "mla"])
def test_gradients_with_an_empty_split_and_a_small_lse(op: str) -> None:
    """Three splits of two keys leave one empty; lse is about -400."""
    q = jnp.full((1, 1, 2, 16), 5.0)
    cache = jnp.full((2, 4, 1, 16), -20.0).at[:, :, :, 0].add(jnp.arange(4.0)[:, None])
    lens, table = np.array([2], np.int32), np.array([[0, 1]], np.int32)

    def out(splits):
        def f(q, cache):
            if op == "page":
                return page_attention(q[:, 0], cache, cache, lens, table, num_splits=splits).sum()
            return mla_decode(q, cache[:, :, 0], lens, table, latent_dim=8, num_splits=splits).sum()

        return jax.jit(jax.grad(f, (0, 1)))(q, cache)

    for a, b in zip(out(3), out(1), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=1e-3)  # an ulp of lse times values of 20

"""Recurrent, gated linear and lightning attention against the float64 recurrence."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.xla import gla_attention, lightning_attention, recurrent_attention
from ejktest.cases.linear import check_linear, linear_cotangents
from ejktest.cases.linear import linear_arguments as make
from ejktest.grids import without
from ejktest.oracles import linear as oracle
from ejktest.tolerance import check_close
from ejktest.transforms import check_shard_map, check_transformations


class Tile(NamedTuple):
    """A config: small chunks compile fast and give many of them."""

    time_tile: int | None = 4


TILE = Tile()
DIMS = dict(b=2, s=50, h=4, hk=2, dk=8, dv=6)
KINDS = {
    "none": (),
    "per key channel": ("g4",),
    "per head": ("g3",),
    "constant": ("g_gamma",),
    "per head and constant": ("g3", "g_gamma"),
    "per value channel": ("gv",),
    "key and value": ("gk", "gv"),
    "head and value": ("g3", "gv"),
    "all": ("g4", "g_gamma", "gk", "gv"),
}


@partial(jax.jit, static_argnames="options")
def run_and_pull(args, cu_seqlens, cotangents, options):
    def run(args):
        return recurrent_attention(
            **args, cu_seqlens=cu_seqlens, return_state=True, **dict(options)
        )

    out, back = jax.vjp(run, args)
    return out, back(cotangents)[0]


def pull(args, cu_seqlens=None, *, tile=4, **options):
    """Output, state and gradients of every argument."""
    options["cfg"] = Tile(tile)
    back = linear_cotangents(args)
    (o, state), grads = run_and_pull(args, cu_seqlens, back, tuple(options.items()))
    return o, state, grads


def check(args, cu_seqlens=None, *, tile=4, **options):
    """Values and all gradients against the oracle."""
    found = pull(args, cu_seqlens, tile=tile, **options)
    check_linear(args, found, cu_seqlens=cu_seqlens, **options)


@pytest.mark.parametrize(
    "kind", without(KINDS, "constant", "per head and constant", "key and value")
)
def test_values_and_gradients(kind):
    check(make(KINDS[kind], **DIMS))


@pytest.mark.parametrize(("kind", "s"), [("per key channel", 5), ("head and value", 40)])
def test_reverse_matches_the_reference(kind, s):
    check(make(KINDS[kind], **{**DIMS, "s": s}), reverse=True, softmax_scale=-0.7)


@pytest.mark.parametrize(("kind", "reverse"), [("all", False), ("per head", True)])
def test_packed_sequences_match_the_reference(kind, reverse):
    # an empty sequence, one longer than a chunk, one that ends on a chunk, rows of padding
    cu = np.array([0, 3, 3, 40, 56], np.int32)
    args = make(KINDS[kind], **{**DIMS, "b": 1, "s": 60}, states=4)
    check(args, cu, reverse=reverse)


def test_packed_steps():
    cu = np.array([0, 1, 1, 5, 6], np.int32)
    args = make(KINDS["all"], **{**DIMS, "b": 1, "s": 8}, states=4)
    check(args, cu)
    check(args, cu, reverse=True)


def test_packed_equals_batched():
    args = make(KINDS["all"], **DIMS)
    flat = {
        n: x if n in ("g_gamma", "initial_state") else x.reshape(1, -1, *x.shape[2:])
        for n, x in args.items()
    }
    o, state = recurrent_attention(**args, return_state=True, cfg=TILE)
    cu = jnp.array([0, 50, 100])
    o_flat, state_flat = recurrent_attention(**flat, cu_seqlens=cu, return_state=True, cfg=TILE)
    np.testing.assert_allclose(o.reshape(o_flat.shape), o_flat, atol=2e-6)
    np.testing.assert_allclose(state, state_flat, atol=2e-6)


def test_empty_sequences_and_padding():
    args = make(KINDS["all"], **{**DIMS, "b": 1, "s": 40}, states=3)
    cu = jnp.zeros(4, jnp.int32)
    o, state, grads = pull(args, cu)
    _, dstate = linear_cotangents(args)
    np.testing.assert_array_equal(o, 0)
    np.testing.assert_array_equal(state, args["initial_state"])
    np.testing.assert_array_equal(grads["initial_state"], dstate)
    for name in set(args) - {"initial_state"}:
        np.testing.assert_array_equal(grads[name], 0)


@pytest.mark.parametrize("kind", ["per key channel", "per head", "per value channel"])
@pytest.mark.parametrize("level", [-20.0, -3.0e38])  # one compilation for both
def test_strong_decay(kind, level):
    """All tokens at ``level``, but runs of tokens that hardly decay."""
    args = make(KINDS[kind], **{**DIMS, "s": 70}, size=1e-2)
    for name in ("g", "gv"):
        if name in args:
            t = jnp.arange(70).reshape(1, -1, *[1] * (args[name].ndim - 2))
            args[name] = jnp.where(t % 7 < 3, level, args[name])
    check(args, tile=None if kind == "per key channel" else 16)


def test_positive_gates_match_the_reference():
    """Positive gates are what they say, and strong ones that cancel do no harm."""
    args = make(("g4",), **{**DIMS, "s": 40})
    sign = jnp.where(jnp.arange(40)[None, :, None, None] % 2 == 0, 30.0, -30.5)
    check({**args, "g": jnp.broadcast_to(sign, args["g"].shape)})


def test_minus_infinity_forgets():
    args = make(("g4",), **{**DIMS, "s": 40})
    cut = args["g"].at[:, 20].set(-jnp.inf)
    o, _, grads = pull({**args, "g": cut})
    tail = {n: x[:, 20:] for n, x in args.items() if n != "initial_state"}
    fresh = recurrent_attention(**tail, cfg=TILE)
    np.testing.assert_allclose(o[:, 20:], fresh, rtol=1e-5, atol=1e-5)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    np.testing.assert_array_equal(grads["g"][:, 20], 0)


def test_rounding_does_not_grow_with_length():
    """64k tokens that hardly decay: rounding does not accumulate."""
    check(make(("g4",), b=1, s=65536, h=1, hk=1, dk=4, dv=4, size=1e-3), tile=None)


def test_gradients_keep_a_state_per_chunk():
    """The gradient keeps a state per chunk, none per token."""
    s, d = 4096, 64
    args = make(("g3",), b=1, s=s, h=1, hk=1, dk=d, dv=d)
    grad = jax.jit(jax.grad(lambda a: recurrent_attention(**a).sum()))
    used = grad.lower(args).compile().memory_analysis().temp_size_in_bytes / (4 * s * d)
    print(f"temporaries of {used:.1f} row arrays; a state per token would be {d}")
    assert used < 24


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_dtypes_match_the_reference(dtype):
    args = make(KINDS["all"], **DIMS)
    check({n: x.astype(dtype) for n, x in args.items()})


def test_float64_matches_the_reference():
    with jax.enable_x64(True):
        args = make(KINDS["all"], **DIMS, dtype=np.float64)
        check(args)
        mixed = {**args, "query": args["query"].astype(jnp.float32)}
        o, state = recurrent_attention(**mixed, return_state=True)
        assert (o.dtype, state.dtype) == (jnp.float32, jnp.float64)


def test_chunk_lengths_agree():
    args = make(("g4",), **{**DIMS, "s": 130})
    outs = [recurrent_attention(**args, cfg={"time_tile": n}) for n in (1, 16, 128)]
    for o in outs[1:]:
        np.testing.assert_allclose(o, outs[0], atol=2e-5, rtol=1e-5)
    again = recurrent_attention(**args, cfg={"time_tile": 16})
    np.testing.assert_array_equal(outs[1], again)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    s=st.sampled_from([1, 15, 16, 33]),
    heads=st.sampled_from([(1, 1), (4, 1), (6, 3)]),
    dk=st.sampled_from([1, 5]),
    dv=st.sampled_from([1, 7]),
    bounds=st.none() | st.lists(st.integers(0, 33), max_size=4),
    reverse=st.booleans(),
)
def test_any_shape(s, heads, dk, dv, bounds, reverse):
    cu = None if bounds is None else np.array([0, *sorted(min(c, s) for c in bounds)], np.int32)
    states = 2 if cu is None else len(cu) - 1
    args = make(
        ("g4",), b=1 if bounds is not None else 2, s=s, h=heads[0], hk=heads[1], dk=dk, dv=dv
    )
    args["initial_state"] = jnp.ones((states, heads[0], dk, dv))
    o, state = recurrent_attention(
        **args, cu_seqlens=cu, return_state=True, reverse=reverse, cfg=TILE
    )
    want = oracle.linear_attention(**args, cu_seqlens=cu, reverse=reverse)
    check_close(o, want.o)
    check_close(state, want.state)


@pytest.mark.parametrize("cu", [None, np.zeros(3, np.int32)])
def test_no_tokens(cu):
    args = make(KINDS["all"], **{**DIMS, "s": 0, "b": 1 if cu is not None else 2}, states=2)
    o, state = recurrent_attention(**args, cu_seqlens=cu, return_state=True)
    assert o.shape == (1 if cu is not None else 2, 0, 4, 6)
    np.testing.assert_array_equal(state, args["initial_state"])


def test_gla_is_recurrent():
    args = make(("g4", "g_gamma"), **DIMS)
    np.testing.assert_array_equal(gla_attention(**args), recurrent_attention(**args))


def test_lightning_is_linear_attention_with_slopes():
    args = make((), **DIMS)
    slopes = oracle.slopes(4, 1, 3)
    o, state = lightning_attention(**args, layer_idx=1, num_layers=3, return_state=True)
    want = oracle.linear_attention(**args, g_gamma=slopes)
    check_close(o, want.o)
    check_close(state, want.state)
    for layer in (-1, 3):
        with pytest.raises(ValueError, match="layer_idx"):
            lightning_attention(**args, layer_idx=layer, num_layers=3)


def test_transformations_keep_results():
    args = make(("g3", "gv"), **{**DIMS, "s": 18})
    pairs = {name: jnp.stack([x, 0.5 * x]) for name, x in args.items()}
    check_transformations(partial(recurrent_attention, cfg=TILE), pairs)


def test_shard_map():
    """Some arguments sharded over the heads, others replicated."""
    args = make(("g_gamma",), **{**DIMS, "b": 1}, states=2)
    heads = P(None, None, "x")
    specs = {n: heads for n, x in args.items() if x.ndim == 4 and n != "initial_state"}
    run = partial(recurrent_attention, cu_seqlens=jnp.array([0, 20, 45]), cfg=TILE)
    check_shard_map(run, args, specs, heads)


def test_a_chunk_is_a_power_of_two():
    with pytest.raises(ValueError, match="time_tile"):
        recurrent_attention(**make((), **DIMS), cfg={"time_tile": 24})

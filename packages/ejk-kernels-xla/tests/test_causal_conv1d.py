"""The short causal convolution against the float64 formula."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.xla import causal_conv1d
from ejktest.cases.convolution import check_convolution
from ejktest.cases.convolution import convolution_arguments as make
from ejktest.cases.linear import cotangents
from ejktest.transforms import check_shard_map, check_transformations

# an empty sequence, one shorter than the taps, two longer ones, rows of padding
CU = np.array([0, 1, 1, 3, 12, 17], np.int32)


@partial(jax.jit, static_argnames="activation")
def differentiate(args, cu_seqlens=None, activation=None):
    """Output, state and gradients of every argument."""

    def convolve(args):
        return causal_conv1d(
            **args, cu_seqlens=cu_seqlens, activation=activation, return_state=True
        )

    out, back = jax.vjp(convolve, args)
    return *out, back(cotangents(*out))[0]


def check(args, cu_seqlens=None, activation=None):
    found = differentiate(args, cu_seqlens, activation)
    check_convolution(args, found, cu_seqlens=cu_seqlens, activation=activation)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("width", "s"), [(2, 9), (4, 9), (8, 5), (4, 1)])
def test_values_and_gradients(width, s, activation):
    check(make(b=2, s=s, c=3, width=width), activation=activation)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_packed_sequences_match_the_reference(width):
    check(make(b=1, s=20, c=3, width=width, states=5), CU, "silu")


def test_without_bias_and_state():
    args = make(b=2, s=9, c=3, width=4)
    zeros = {**args, "bias": args["bias"] * 0, "initial_state": args["initial_state"] * 0}
    y, state = causal_conv1d(args["x"], args["weight"], return_state=True)
    want, _, _ = differentiate(zeros)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(state, np.swapaxes(args["x"][:, -3:], 1, 2))


def test_decoding_continues():
    args = make(b=2, s=9, c=3, width=4)
    x, state = args.pop("x"), args.pop("initial_state")
    run = partial(causal_conv1d, **args, activation="silu", return_state=True)
    full, last = run(x, initial_state=state)
    outs = []
    for t in range(9):
        y, state = run(x[:, t : t + 1], initial_state=state)
        outs.append(y)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), full, atol=1e-6)
    np.testing.assert_array_equal(state, last)


def test_padding_may_hold_nan():
    args = make(b=1, s=20, c=3, width=4, states=5)
    dirty = {**args, "x": args["x"].at[:, 17:].set(jnp.nan)}
    found, want = differentiate(dirty, CU, "silu"), differentiate(args, CU, "silu")
    jax.tree.map(np.testing.assert_array_equal, found, want)
    assert not np.asarray(found[0][:, 17:]).any()


@pytest.mark.parametrize("cu", [None, np.zeros(3, np.int32), np.zeros(1, np.int32)])
def test_no_tokens(cu):
    states = 2 if cu is None else len(cu) - 1
    args = make(b=2 if cu is None else 1, s=0, c=3, width=4)
    args["initial_state"] = jnp.ones((states, 3, 3))
    y, state = causal_conv1d(**args, cu_seqlens=cu, return_state=True)
    assert y.shape == args["x"].shape
    np.testing.assert_array_equal(state, args["initial_state"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_dtypes_match_the_reference(dtype):
    check(make(b=1, s=20, c=3, width=4, states=5, dtype=dtype), CU, "silu")


def test_float64_matches_the_reference():
    with jax.enable_x64(True):
        args = make(b=2, s=9, c=3, width=4, dtype=np.float64)
        check(args, activation="silu")
        y, state = causal_conv1d(args["x"].astype(jnp.float32), args["weight"], return_state=True)
        assert y.dtype == state.dtype == jnp.float32


def test_transformations_keep_results():
    args = make(b=1, s=9, c=3, width=4)
    pairs = {name: jnp.stack([x, 0.5 * x]) for name, x in args.items()}
    check_transformations(partial(causal_conv1d, activation="silu", return_state=True), pairs)


def test_shard_map():
    """Tokens sharded over the channels, packed, without a state."""
    args = make(b=1, s=20, c=4, width=4)
    del args["initial_state"]
    specs = {"x": P(None, None, "x"), "weight": P("x"), "bias": P("x")}
    run = partial(causal_conv1d, cu_seqlens=jnp.asarray(CU))
    check_shard_map(run, args, specs, P(None, None, "x"))

"""The short causal convolution through Triton's interpreter, against the float64 formula."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from ejkernel.kernels.triton import causal_conv1d
from ejkernel.kernels.triton.causal_conv1d import segments, tiles
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode
from ejkernel.types.masks.structure import Unsupported
from ejkernel.types.problems.convolution import ConvolutionProblem
from ejktest.cases.convolution import check_convolution
from ejktest.cases.convolution import convolution_arguments as make
from ejktest.cases.linear import cotangents
from ejktest.grids import cover
from ejktest.transforms import check_transformations
from ejktest.triton_calls import resources

# an empty sequence, one shorter than the taps, one that ends with a segment, rows of padding
CU = np.array([0, 1, 1, 3, 16, 21], np.int32)
SMALL = {"token_tile": 16, "channel_tile": 16}


@pytest.fixture(autouse=True)
def interpreted():
    with interpret_mode(), compile_for(cuda_target(90, 1)):
        yield


@partial(jax.jit, static_argnames="activation")
def differentiate(args, cu_seqlens=None, activation=None):
    """Output, state and gradients of every argument."""

    def convolve(args):
        return causal_conv1d(
            **args, cu_seqlens=cu_seqlens, activation=activation, return_state=True, cfg=SMALL
        )

    out, back = jax.vjp(convolve, args)
    return *out, back(cotangents(*out))[0]


def check(args, cu_seqlens=None, activation=None):
    found = differentiate(args, cu_seqlens, activation)
    check_convolution(args, found, cu_seqlens=cu_seqlens, activation=activation)
    return found


@pytest.mark.parametrize(
    ("width", "s", "c", "activation"),
    [
        (2, 9, 3, None),
        (4, 21, 20, "silu"),
        (4, 40, 20, "silu"),
        (8, 5, 3, "silu"),
        (4, 16, 3, None),
        (4, 1, 3, "silu"),
    ],
)
def test_values_and_gradients(width, s, c, activation):
    check(make(b=2, s=s, c=c, width=width), activation=activation)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_packed_sequences_match_the_reference(width):
    check(make(b=1, s=24, c=3, width=width, states=5), CU, "silu")


def test_many_sequences(monkeypatch):
    """More sequences than a program looks at together."""
    monkeypatch.setattr(segments, "lane_count", lambda sequences: 4)
    cu = np.array([0, 0, 2, 2, 2, 9, 10, 10, 20, 20, 20], np.int32)
    check(make(b=1, s=24, c=3, width=3, states=10), cu, "silu")


def test_without_bias_and_state():
    args = make(b=2, s=9, c=3, width=4)
    zeros = {**args, "bias": args["bias"] * 0, "initial_state": args["initial_state"] * 0}
    few = {name: args[name] for name in ("x", "weight")}
    (y, state, grads), want = differentiate(few), differentiate(zeros)
    np.testing.assert_array_equal(y, want[0])
    np.testing.assert_array_equal(state, np.swapaxes(args["x"][:, -3:], 1, 2))
    jax.tree.map(np.testing.assert_array_equal, grads, {name: want[2][name] for name in few})


def test_a_state_that_is_not_returned():
    args = make(b=1, s=9, c=3, width=4)
    y, back = jax.vjp(lambda args: causal_conv1d(**args), args)
    grads = back(jnp.ones_like(y))[0]
    _, back = jax.vjp(lambda args: causal_conv1d(**args, return_state=True), args)
    want = back((jnp.ones_like(y), jnp.zeros((1, 3, 3))))[0]
    jax.tree.map(np.testing.assert_array_equal, grads, want)


def test_padding_may_hold_nan():
    args = make(b=1, s=24, c=3, width=4, states=5)
    dirty = {**args, "x": args["x"].at[:, 21:].set(jnp.nan)}
    found, want = differentiate(dirty, CU, "silu"), differentiate(args, CU, "silu")
    jax.tree.map(np.testing.assert_array_equal, found, want)
    assert not np.asarray(found[0][:, 21:]).any()


@pytest.mark.parametrize("cu", [None, np.zeros(3, np.int32)])
def test_no_tokens(cu):
    args = make(b=2 if cu is None else 1, s=0, c=3, width=4, states=2)
    y, state = causal_conv1d(**args, cu_seqlens=cu, return_state=True)
    assert y.shape == args["x"].shape
    np.testing.assert_array_equal(state, args["initial_state"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_dtypes_match_the_reference(dtype):
    check(make(b=1, s=24, c=3, width=4, states=5, dtype=dtype), CU, "silu")


def test_taps_wider_than_tokens():
    """x and the state are bfloat16, weight and bias float32."""
    args = make(b=2, s=9, c=3, width=4)
    args |= {name: args[name].astype(jnp.bfloat16) for name in ("x", "initial_state")}
    y, state, grads = differentiate(args, activation="silu")
    assert y.dtype == state.dtype == grads["x"].dtype == jnp.bfloat16
    wide = {name: x.astype(jnp.float32) for name, x in args.items()}
    want = differentiate(wide, activation="silu")
    np.testing.assert_allclose(y.astype(jnp.float32), want[0], rtol=2**-8)


def test_transformations_keep_results():
    args = make(b=1, s=9, c=3, width=4)
    pairs = {name: jnp.stack([x, 0.5 * x]) for name, x in args.items()}
    run = partial(causal_conv1d, activation="silu", return_state=True, cfg=SMALL)
    check_transformations(run, pairs)


def test_vmap_of_shared_taps():
    args = make(b=1, s=9, c=3, width=4)
    x = jnp.stack([args.pop("x"), jnp.ones((1, 9, 3))])
    both = jax.vmap(lambda x: causal_conv1d(x, **args))(x)
    for i in range(2):
        np.testing.assert_array_equal(both[i], causal_conv1d(x[i], **args))


def test_unsupported_calls_are_refused():
    with jax.enable_x64(True), pytest.raises(Unsupported, match=r"^weight: float64"):
        causal_conv1d(np.zeros((2, 3, 4), np.float32), np.zeros((4, 2)))


def test_backward_programs_leave_no_round_almost_empty():
    """A multiprocessor of a Hopper GPU has room for four backward programs of four warps."""
    target = cuda_target(90, 132)
    for batch, rows, channels in [(2, 8192, 8192), (1, 8192, 8192), (1, 32768, 8192)]:
        p = ConvolutionProblem(batch, rows, channels, 4, 0, True, False, "bfloat16")
        t = tiles.choose(p, target).backward(p, target, has_state=False)
        rounds = t.programs(p) / (4 * target.cores)
        assert (t.channels, t.num_warps) == (512, 4)
        assert 0.9 * np.ceil(rounds) < rounds <= 2


@pytest.mark.parametrize("call", cover(["convolution", "convolution packed"], "convolution packed"))
def test_twelve_warps_have_registers(call):
    """Registers for twelve warps per multiprocessor, which hide the latency of the memory."""
    for kernel, used in resources(call, "sm_90").items():
        print(f"{call} {kernel}: {used}")
        assert used.spills == 0
        assert used.registers * 32 * 12 <= 65536

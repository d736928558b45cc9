"""The short causal convolution in Pallas' TPU interpreter, against the float64 convolution."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.causal_conv1d.implementation import causal_conv1d
from ejkernel.kernels.pallas.tpu.causal_conv1d.tiles import Tiles, choose
from ejkernel.kernels.pallas.tpu.common.chip import get_chip, on_chip
from ejkernel.ops import interpret_mode
from ejkernel.types.masks.structure import Unsupported
from ejkernel.types.problems.convolution import ConvolutionProblem
from ejktest.cases.convolution import check_convolution
from ejktest.cases.convolution import convolution_arguments as make
from ejktest.cases.linear import cotangents
from ejktest.device import assert_no_races, interpreted_tpu
from ejktest.grids import cover

PARAMS = pltpu.InterpretParams(detect_races=True)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    # several blocks of rows and of channels, the last of either not full
    monkeypatch.setattr(causal_conv1d, "choose", lambda p, chip: Tiles(32, min(128, p.channels)))
    with interpreted_tpu(PARAMS):
        yield


def check(args, cu_seqlens=None, **options):
    """Compares values and all gradients with the oracle; arrays are traced."""

    @jax.jit
    def compute(args, cu):
        run = partial(causal_conv1d, cu_seqlens=cu, return_state=True, **options)
        out, back = jax.vjp(lambda args: run(**args), args)
        return *out, back(cotangents(*out))[0]

    results = compute(args, cu_seqlens)
    check_convolution(args, results, cu_seqlens=cu_seqlens, **options)
    assert_no_races()
    return results


@pytest.mark.parametrize("dtype", cover(["bfloat16", "float32"], "bfloat16"))
def test_blocks_past_the_end_match_the_reference(dtype):
    """Rows of two sequences in a block, and a block of which 90 % lies outside."""
    check(make(b=2, s=50, c=160, width=4, dtype=dtype), activation="silu")


@pytest.mark.parametrize("width", cover([2, 8], 8))
def test_packed_sequences_match_the_reference(width):
    """Sequences empty, shorter than the taps, across blocks; NaN in rows of no sequence."""
    cu = np.array([0, 0, 3, 3, 31, 33, 90], np.int32)
    args = make(b=1, s=110, c=24, width=width, states=6)
    args["x"] = args["x"].at[:, 90:].set(jnp.nan)
    y, _, grads = check(args, cu, activation="silu")
    assert not y[:, 90:].any() and not grads["x"][:, 90:].any()


def test_a_state_that_nobody_gets():
    """Neither bias nor silu; the gradient of the taps alone."""
    args = make(b=1, s=40, c=8, width=3)
    x, weight = args["x"], args["weight"]

    def total(weight):
        return causal_conv1d(x, weight).sum()

    padded = np.pad(np.asarray(x, np.float64), ((0, 0), (2, 0), (0, 0)))
    want = np.stack([padded[:, i : i + 40].sum((0, 1)) for i in range(3)], 1)
    np.testing.assert_allclose(jax.jit(jax.grad(total))(weight), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["TPU v4", "TPU7x"])
def test_lowers_to_mosaic_kernels(kind):
    shapes = [jax.ShapeDtypeStruct(size, "bfloat16") for size in ((2, 512, 1024), (1024, 4))]

    def loss(x, weight):
        return causal_conv1d(x, weight, activation="silu").astype(jnp.float32).sum()

    with interpret_mode(False), on_chip(kind):
        made = export.export(jax.jit(jax.value_and_grad(loss, range(2))), platforms=["tpu"])
        assert made(*shapes).mlir_module().count("tpu_custom_call") == 2


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
def test_tiles_fit(kind):
    chip = get_chip(kind)
    for channels in (96, 512, 8192):
        p = ConvolutionProblem(2, 8192, channels, 4, 0, True, False, "float32")
        assert choose(p, chip).vmem() <= chip.vmem // 2


def test_refuses_single_tokens():
    with pytest.raises(Unsupported, match="x: fewer than 16 rows"):
        causal_conv1d(**make(b=2, s=1, c=8, width=4))

"""TPU linear attention in Pallas' TPU interpreter, against the float64 recurrence."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.common.chip import get_chip, on_chip
from ejkernel.kernels.pallas.tpu.linear_attention import problem
from ejkernel.kernels.pallas.tpu.linear_attention.implementation import (
    gla_attention,
    lightning_attention,
    recurrent_attention,
)
from ejkernel.ops import interpret_mode
from ejkernel.types.masks.structure import Unsupported
from ejktest.cases.linear import check_linear, linear_cotangents
from ejktest.cases.linear import linear_arguments as make
from ejktest.device import assert_no_races, interpreted_tpu
from ejktest.oracles import linear as oracle
from ejktest.tolerance import check_close

PARAMS = pltpu.InterpretParams(detect_races=True)
DIMS = dict(b=2, s=150, h=2, hk=1, dk=24, dv=40)
# values of whole registers, which kernels read as the call gives them
PACKED = {**DIMS, "b": 1, "s": 300, "dv": 128}
# an empty sequence, one that spans three chunks, rows of padding
CU = np.array([0, 3, 3, 270, 290], np.int32)


@pytest.fixture(autouse=True)
def interpreted():
    with interpreted_tpu(PARAMS):
        yield


def check(function, args, cu_seqlens=None, **options):
    """Compares values and all gradients with the oracle; arrays are traced."""

    @jax.jit
    def compute(args, cu):
        run = partial(function, cu_seqlens=cu, return_state=True, **options)
        out, back = jax.vjp(lambda args: run(**args), args)
        return *out, back(linear_cotangents(args))[0]

    found = compute(args, cu_seqlens)
    options = {name: x for name, x in options.items() if name in ("softmax_scale", "reverse")}
    check_linear(args, found, state_dtype=args["query"].dtype, cu_seqlens=cu_seqlens, **options)
    assert_no_races()
    return found


def test_gates_and_shared_keys():
    args = make(("g3", "g_gamma"), **DIMS, dtype=jnp.bfloat16)
    check(recurrent_attention, args, softmax_scale=0.3)


def test_packed_in_reverse(monkeypatch):
    """Strong decays, one of minus infinity, and NaN in the rows that belong to no sequence."""
    monkeypatch.setattr(gla_attention, "choose", lambda p, chip: problem.Tiles(2))
    args = make(("g3",), **PACKED, states=4, size=20.0)
    args["g"] = args["g"].at[0, 170].set(-jnp.inf)
    outside = jnp.arange(PACKED["s"]) >= CU[-1]
    for name in ("query", "key", "value", "g"):
        shape = (1, -1) + (1,) * (args[name].ndim - 2)
        args[name] = jnp.where(outside.reshape(shape), jnp.nan, args[name])
    o, _, grads = check(gla_attention, args, CU, reverse=True)
    assert not o[:, CU[-1] :].any() and not grads["g"][:, CU[-1] :].any()


def test_lightning_is_linear_attention_with_slopes():
    args = make((), **DIMS)
    options = {"layer_idx": 1, "num_layers": 4, "return_state": True}
    o, state = jax.jit(partial(lightning_attention, **options))(**args)
    want = oracle.linear_attention(**args, g_gamma=oracle.slopes(2, 1, 4))
    check_close(o, want.o)
    check_close(state, want.state)


def test_no_decay():
    args = make((), **{**DIMS, "b": 1})
    check_close(jax.jit(recurrent_attention)(**args), oracle.linear_attention(**args).o)


@pytest.mark.parametrize("kind", ["TPU v4", "TPU7x"])
def test_lowers_to_mosaic_kernels(kind):
    shapes = [jax.ShapeDtypeStruct((1, 512, h, 128), "bfloat16") for h in (4, 2, 2)]
    gate = jax.ShapeDtypeStruct((1, 512, 4), "float32")

    def loss(q, k, v, g):
        return gla_attention(q, k, v, g).astype(jnp.float32).sum()

    with interpret_mode(False), on_chip(kind):
        made = export.export(jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3))), platforms=["tpu"])
        assert made(*shapes, gate).mlir_module().count("tpu_custom_call") == 2


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
def test_tiles_fit(kind):
    chip = get_chip(kind)
    for dim in (64, 128, 256):
        for dtype in ("bfloat16", "float32"):
            p = problem.Problem(
                1, 4096, 8, 8, dim, dim, 0, 1.0, False, dtype, dtype, dtype, gated=True
            )
            assert problem.choose(p, chip).vmem(p, backward=True) <= chip.vmem // 4 * 3


def test_refuses_what_it_cannot_do():
    args = make(("g4",), **DIMS)
    with pytest.raises(Unsupported, match="g: a decay for each key channel"):
        gla_attention(**args)
    with pytest.raises(Unsupported, match="gv: not supported"):
        recurrent_attention(**make(("gv",), **DIMS))
    with pytest.raises(Unsupported, match="query: fewer than 16 rows"):
        recurrent_attention(**make((), **{**DIMS, "s": 4}))
    with pytest.raises(Unsupported, match="query: float16 is not supported"):
        recurrent_attention(**make((), **DIMS, dtype=np.float16))

"""The gated delta rule in Pallas' TPU interpreter, against the float64 recurrence."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.common.chip import get_chip, on_chip
from ejkernel.kernels.pallas.tpu.gated_delta_rule import problem
from ejkernel.kernels.pallas.tpu.gated_delta_rule.chunk import invert
from ejkernel.kernels.pallas.tpu.gated_delta_rule.implementation import gated_delta_rule
from ejkernel.ops import interpret_mode
from ejktest.cases.delta import check_delta, serving_batch
from ejktest.cases.delta import delta_arguments as make
from ejktest.cases.linear import cotangents
from ejktest.device import assert_no_races, interpreted_tpu
from ejktest.grids import cover

PARAMS = pltpu.InterpretParams(detect_races=True)
DIMS = dict(b=1, s=150, h=2, hk=1, dk=24, dv=40)
# values of whole registers, which kernels read as the call gives them
PACKED = {**DIMS, "s": 300, "dv": 128, "states": 4}
# an empty sequence, one that spans three chunks, rows of padding
CU = np.array([0, 3, 3, 270, 290], np.int32)


@pytest.fixture(autouse=True)
def interpreted():
    with interpreted_tpu(PARAMS):
        yield


@partial(jax.jit, static_argnames=("softmax_scale", "normalize_qk", "reverse"))
def compute(args, cu_seqlens=None, **options):
    """Output, state and gradients; arrays are traced."""
    run = partial(gated_delta_rule, cu_seqlens=cu_seqlens, return_state=True, **options)
    out, back = jax.vjp(lambda args: run(**args), args)
    return *out, back(cotangents(*out))[0]


def check(args, cu_seqlens=None, rounded=False, reference=None, **options):
    """Compares values and all gradients with the oracle.

    ``reference``: the oracle's arguments, where the kernel's hold NaN that nobody may read.
    """

    results = compute(args, cu_seqlens, **options)
    accuracy = {"state_dtype": args["query"].dtype, "rounded_beta": rounded}
    check_delta(reference or args, results, cu_seqlens=cu_seqlens, **accuracy, **options)
    assert_no_races()
    return results


@pytest.mark.parametrize(("dtype", "rounding"), [("bfloat16", 2.0**-9), ("float32", 2.0**-12)])
def test_inverses_of_systems_whose_keys_repeat(dtype, rounding):
    """Their error is small next to the rounding of the inverse, with ``beta`` up to 1.9."""
    rng, size = np.random.default_rng(0), 128
    key, noise = rng.standard_normal((1, 64)), rng.standard_normal((size, 64))
    systems = []
    for keys, beta in ((key + 0 * noise, 1.9), (key + 0.1 * noise, 1.0), (noise, 1.9)):
        unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
        systems.append(beta * np.tril(unit @ unit.T, -1))
    p = SimpleNamespace(dtype=dtype, reverse=False)
    inverses = invert(p, [jnp.asarray(x, jnp.float32) for x in systems])
    for system, inverse in zip(systems, inverses, strict=True):
        exact = np.linalg.inv(np.eye(size) + system)
        assert np.abs(inverse - exact).max() < rounding * np.abs(exact).max() / 4


@pytest.mark.parametrize("gate", cover(["head", "channel"], "head"))
def test_shared_keys_in_bfloat16(gate):
    """Every batch row has states of its own."""
    args = make(gate, **{**DIMS, "b": 2}, dtype=jnp.bfloat16)
    check(args, softmax_scale=0.3, normalize_qk=True)


@pytest.mark.parametrize("gate", cover(["head", "channel"], "channel"))
def test_packed_in_reverse(monkeypatch, gate):
    """Tokens that forget everything, and NaN in the rows that belong to no sequence."""
    monkeypatch.setattr(gated_delta_rule, "choose", lambda p, chip: problem.Tiles(2))
    args = make(gate, **PACKED)
    args["g"] = args["g"].at[0, 20::7].set(-50.0)
    outside, hidden = jnp.arange(PACKED["s"]) >= CU[-1], dict(args)
    for name in set(args) - {"initial_state"}:
        shape = (1, -1) + (1,) * (args[name].ndim - 2)
        hidden[name] = jnp.where(outside.reshape(shape), jnp.nan, args[name])
    o, _, grads = check(hidden, CU, reference=args, reverse=True, normalize_qk=True)
    assert not o[:, CU[-1] :].any() and not grads["g"][:, CU[-1] :].any()


def test_a_serving_batch_at_its_limits():
    args, cu = serving_batch("head")
    check(args, cu, rounded=True)


def test_equal_keys_that_reflect():
    """No gates, no beta: every token replaces or, with beta 2, reflects one direction."""
    args = make("none", b=1, s=130, h=1, hk=1, dk=16, dv=8)
    args["key"] = jnp.broadcast_to(args["key"][:, :1], args["key"].shape)
    args["beta"] = jnp.full((1, 130, 1), 2.0)
    check(args, rounded=True)


def test_channels_that_forget_or_keep():
    """Channels without decay and channels that end at once, among them minus infinity."""
    args = make("channel", b=1, s=140, h=1, hk=1, dk=16, dv=8)
    args["g"] = args["g"].at[..., ::3].set(0.0).at[:, 60:90, :, 1::3].set(-60.0)
    check(args)
    o, ended = (
        compute(args | {"g": args["g"].at[:, 70, :, 1].set(gate)})[0] for gate in (-jnp.inf, -1e3)
    )
    np.testing.assert_array_equal(o, ended)


@pytest.mark.parametrize(("kind", "channels"), [("TPU v4", ()), ("TPU7x", (128,))])
def test_lowers_to_mosaic_kernels(kind, channels):
    shapes = [jax.ShapeDtypeStruct((1, 512, h, 128), "bfloat16") for h in (2, 2, 4)]
    gates = [jax.ShapeDtypeStruct((1, 512, 4, *more), "float32") for more in (channels, ())]

    def loss(q, k, v, g, beta):
        return gated_delta_rule(q, k, v, g, beta).astype(jnp.float32).sum()

    with interpret_mode(False), on_chip(kind):
        made = export.export(jax.jit(jax.value_and_grad(loss, range(5))), platforms=["tpu"])
        assert made(*shapes, *gates).mlir_module().count("tpu_custom_call") == 2


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
def test_tiles_fit(kind):
    chip = get_chip(kind)
    for dim in (64, 128, 256):
        for dtype in ("bfloat16", "float32"):
            sizes = (1, 4096, 8, 8, dim, dim, 0, 1.0, False, dtype, dtype, dtype)
            p = problem.Problem(*sizes, gated=True, normalize=False, channels=True)
            assert problem.choose(p, chip).vmem(p, backward=True) <= chip.vmem // 4 * 3


@pytest.mark.parametrize(("kind", "supported"), [("TPU v4", False), ("TPU v6 lite", True)])
def test_states_of_a_group_may_be_too_many(kind, supported):
    """Gradients hold a state for each value head of a key; compiled by libtpu, 27 MiB here."""
    sizes = (1, 4096, 32, 1, 128, 128, 0, 1.0, False, *["float32"] * 3)
    p = problem.Problem(*sizes, gated=True, normalize=False, channels=True)
    reason = gated_delta_rule.unsupported_reason(p, get_chip(kind))
    assert reason is None if supported else "32 heads of 128 that share a key" in reason

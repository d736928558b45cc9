"""From a launch to the launcher: the launcher's parameters and buffers, vmap, errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")


from ejkernel.kernels.triton import bridge, compat, flash_attention
from ejkernel.kernels.triton.bound_launch import MAP_ROWS, In, TensorMap, leaves, runs_map
from ejkernel.kernels.triton.bridge import call, specialize
from ejkernel.kernels.triton.compiled import (
    Code,
)
from ejkernel.kernels.triton.launch import BATCHED, SEQUENTIAL, SHARED
from ejkernel.kernels.triton.targets import compile_for, cuda_target, rocm_target
from ejkernel.ops import interpret_mode
from ejkernel.types import MaskInfo
from ejktest.drawn import normal as numbers
from ejktest.launcher import Affine, custom_calls, lowered

HOPPER, AMPERE = cuda_target(90), cuda_target(80)


# -- the launcher -------------------------------------------------------------------------------


def test_lowers_to_one_custom_call(launcher) -> None:
    x = numbers(2, 520)
    text = lowered(lambda x, y: call(Affine(2, 520, a=3.0), x=x, y=y)["out"], x, x)
    ((name, _, types),) = custom_calls(text)
    assert name == launcher.name
    assert types == ["tensor<2x520xf32>"] * 2
    (launch,) = launcher.launches
    assert launch.grid == (3, 1, 1)
    assert launch.parameters == [
        ("array", 16), ("array", 16), ("array", 16), ("scalar", 1040, "i32"),
        ("scalar", 3.0, "fp32"),
    ]  # fmt: skip
    kernel = launch.kernel
    assert kernel["name"] == "affine" and kernel["num_warps"] == 4 and kernel["capability"] == 90
    # readable by the assemblers of CUDA 12.8 and newer
    assert ".version 8.7" in kernel["text"] and ".target sm_90a" in kernel["text"]


def test_rocm_lowering_hands_over_a_code_object(launcher) -> None:
    x = numbers(1, 20)
    target = rocm_target("gfx942")
    lowered(lambda x: call(Affine(1, 20), x=x, y=x)["out"], x, target=target)
    path = launcher.launches[0].kernel["text"]
    with open(path, "rb") as file:
        assert file.read(4) == b"\x7fELF"


def test_operands_follow_the_parameters(launcher) -> None:
    """The launcher assigns buffers in order: reversed and repeated operands are put in place."""
    x, y = numbers(1, 20), numbers(1, 20)
    text = lowered(lambda x, y: call(Affine(1, 20), y=y, x=x)["out"], x, y)
    assert custom_calls(text)[0][1] == ["%arg0", "%arg1"]
    twice = Affine(1, 20, changes=(("y", In(0)),))
    assert custom_calls(lowered(lambda x: call(twice, x=x)["out"], x))[0][1] == ["%arg0", "%arg0"]
    unread = Affine(1, 20, changes=(("x", In(1)),))
    text = lowered(lambda x, y: call(unread, x=x, y=y)["out"], x, y)
    assert custom_calls(text)[0][1] == ["%arg1", "%arg1"]


def all_options(q, k, v, bias, sinks, ids, mask, seed):
    o = flash_attention(
        q, k, v, bias, softmax_aux=sinks, attention_mask=mask, causal=True, dropout_prob=0.1,
        dropout_seed=seed, mask_info=MaskInfo(q_segment_ids=ids, kv_segment_ids=ids),
    )  # fmt: skip
    return (o.astype(jnp.float32) ** 2).sum()


@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=lambda t: t.name)
def test_every_array_of_flash_attention_is_where_its_parameter_is(
    launcher, monkeypatch, target
) -> None:
    """Forward and gradients with all operands at once, and head dims read in two parts."""
    described = []

    def spy(launch, avals, outs):
        described.append((launch, avals, outs))
        return specialize(launch, avals, outs)

    def no_code(source, target):
        kinds = leaves(tuple(kind for _, kind in source.signature))
        maps = [kind for kind in kinds if kind.startswith("tensordesc")]
        params = {"elem_type": 10, "swizzle": 3, "block_size": [64, 64]}
        return Code(source.kernel.__name__, "", 8, 0, 0, 1, (params,) * len(maps))

    monkeypatch.setattr(bridge, "specialize", spy)
    monkeypatch.setattr(bridge, "compile_kernel", no_code)
    shape = jax.ShapeDtypeStruct
    b, n, h, hk, d, dv = 2, 72, 4, 2, 96, 192
    arrays = (
        shape((b, n, h, d), jnp.bfloat16), shape((b, n, hk, d), jnp.bfloat16),
        shape((b, n, hk, dv), jnp.bfloat16), shape((1, h, n, n), jnp.float32),
        shape((h, 3), jnp.float32), shape((b, n), jnp.int32), shape((b, 1, n, n), jnp.bool_),
        shape((), jnp.int32),
    )  # fmt: skip
    text = lowered(jax.grad(all_options, (0, 1, 2, 3, 4)), *arrays, target=target)
    calls = [c for c in custom_calls(text) if c[0] == launcher.name]
    letters = {"bfloat16": "bf16", "float32": "f32", "int32": "i32", "int16": "i16", "int8": "i8"}
    letters["uint32"] = "ui32"
    kernels = {"flash_fwd", "flash_bwd_dq", "flash_bwd_dkv"}
    expected = []
    for (launch, avals, outs), made in zip(described, launcher.launches, strict=True):
        values = leaves(tuple(map(launch.arguments.get, launch.kernel.arg_names)))
        read = [avals[v.index] for v in values if isinstance(v, (In, TensorMap))]
        expected.append(
            [f"tensor<{''.join(f'{n}x' for n in a.shape)}{letters[a.dtype.name]}>" for a in read]
        )
        buffers = [p for p in made.parameters if p[0] in ("array", "map")]
        assert len(buffers) == len(read) + len(outs)
        if launch.kernel.__name__ in kernels:
            assert any(p[0] == "map" for p in buffers) == (launcher.modern and target is HOPPER)
    # lists of tiles are one function of the program, called for each of its kernels
    assert kernels < {launch.kernel.__name__ for launch, *_ in described}
    assert {tuple(types) for _, _, types in calls} == set(map(tuple, expected))


def test_scratch_memory_needs_the_newer_launcher(launcher, monkeypatch) -> None:
    code = Code("affine", "", 4, 0, 128, 16, ())
    monkeypatch.setattr(bridge, "compile_kernel", lambda source, target: code)
    x = numbers(1, 20)
    if launcher.modern:
        lowered(lambda x: call(Affine(1, 20), x=x, y=x)["out"], x)
    else:
        with pytest.raises(compat.IncompatibleVersions, match=r"scratch memory.*jax-triton>=0\.4"):
            lowered(lambda x: call(Affine(1, 20), x=x, y=x)["out"], x)


def test_lowering_with_the_installed_jax_triton(tmp_path, monkeypatch) -> None:
    """The real serialiser; gradients of one small attention as three calls."""
    try:
        tools = compat.toolchain()
    except compat.IncompatibleVersions as error:
        pytest.skip(f"no GPU plugin: {str(error)[:80]}")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    q = jax.ShapeDtypeStruct((1, 64, 2, 96), jnp.bfloat16)
    grad = jax.grad(
        lambda q, k, v: flash_attention(q, k, v, causal=True).astype(jnp.float32).sum(), (0, 1, 2)
    )
    calls = custom_calls(lowered(grad, q, q, q))
    assert [name for name, _, _ in calls] == [tools.call_target] * 3


# -- limits, targets, transformations ------------------------------------------------------------


def test_needs_a_gpu_or_interpretation() -> None:
    x = numbers(1, 20)
    with interpret_mode(False), pytest.raises(NotImplementedError, match="EJKERNEL_INTERPRET=1"):
        call(Affine(1, 20), x=x, y=x)


def test_lowering_for_another_platform_than_the_target(launcher) -> None:
    x = numbers(1, 20)
    with compile_for(AMPERE), pytest.raises(compat.IncompatibleVersions, match="target is sm_80"):
        jax.jit(lambda x: call(Affine(1, 20), x=x, y=x)).trace(x).lower(
            lowering_platforms=("rocm",)
        )


@pytest.mark.parametrize("in_axes", [(0, 0), (1, None), (None, 2)], ids=str)
def test_vmap_lays_the_axis_into_the_grid(in_axes) -> None:
    x, y = (
        numbers(2, 20, seed=i) if axis is None else jnp.moveaxis(numbers(3, 2, 20, seed=i), 0, axis)
        for i, axis in enumerate(in_axes)
    )

    def one(x, y):
        return call(Affine(2, 20), x=x, y=y)["out"]

    with interpret_mode():
        for f in (jax.vmap(one, in_axes), jax.jit(jax.vmap(one, in_axes))):
            want = jax.vmap(lambda x, y: 2 * x + y, in_axes)(x, y)
            np.testing.assert_allclose(f(x, y), want, rtol=1e-6)
        nested = jax.vmap(jax.vmap(one))(numbers(2, 3, 2, 20), numbers(2, 3, 2, 20, seed=1))
    want = 2 * numbers(2, 3, 2, 20) + numbers(2, 3, 2, 20, seed=1)
    np.testing.assert_allclose(nested, want, rtol=1e-6)


class Sequential(Affine):
    batching: ClassVar = {"x": BATCHED, "y": SEQUENTIAL}


def test_a_mapped_sequential_operand_makes_calls_run_one_after_the_other() -> None:
    x, y = numbers(3, 2, 20), numbers(3, 2, 20, seed=1)

    def one(x, y):
        return call(Sequential(2, 20), x=x, y=y)["out"]

    with interpret_mode():
        np.testing.assert_allclose(jax.vmap(one)(x, y), 2 * x + y, rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(one, (0, None))(x, y[0]), 2 * x + y[0], rtol=1e-6)
    loops = {
        axes: "scan[" in str(jax.make_jaxpr(jax.vmap(one, axes))(x, y if axes[1] == 0 else y[0]))
        for axes in ((0, 0), (0, None))
    }
    assert loops == {(0, 0): True, (0, None): False}


@dataclass(frozen=True)
class Shared(Affine):
    """The types of operands alone are looked at."""

    batching: ClassVar = {"x": SHARED, "y": SHARED, "z": SHARED}
    shared_together = (frozenset({"x", "y"}),)

    @property
    def batch(self):
        return self.rows


def test_a_shared_operand_stays_one_row_until_it_or_its_partner_is_mapped() -> None:
    def shapes(*axes):
        arrays = [jnp.zeros((3, 1, 20)[axis is None :]) for axis in axes]
        launch = jax.make_jaxpr(
            jax.vmap(lambda x, y, z: call(Shared(2, 20), x=x, y=y, z=z)["out"], axes)
        )(*arrays)
        (equation,) = (e for e in launch.eqns if e.primitive.name == "ejkernel_triton")
        return [v.aval.shape[0] for v in equation.invars], equation.params["launch"].rows

    assert shapes(None, None, 0) == ([1, 1, 6], 6)
    assert shapes(0, None, None) == ([6, 6, 1], 6)


def test_an_operand_that_the_launch_does_not_declare() -> None:
    x = numbers(1, 20)
    with pytest.raises(TypeError, match=r"Affine: no operand is named \['z'\]"):
        call(Affine(1, 20), x=x, y=x, z=x)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_rows_of_runs_are_where_they_should_be(itemsize):
    """The copy engine adds bytes modulo 2^64, and takes strides of whole 16 bytes below 2^40."""
    columns, end, length = 7168, 60000, 300
    steps = [s * itemsize for s in runs_map(0, columns, (64, 128)).strides]
    assert all(s % 16 == 0 and s < 2**40 for s in steps[:3])
    assert all(n < 2**31 for n in runs_map(0, columns, (64, 128)).shape)
    for row in (0, 1, length - 1, length):
        at = (MAP_ROWS, end, MAP_ROWS - length + row, 5)
        address = sum(i * s for i, s in zip(at, steps, strict=True)) % 2**64
        assert address == ((end - length + row) * columns + 5) * itemsize
        assert (at[2] < MAP_ROWS) == (row < length)

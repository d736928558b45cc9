"""From a plan to a launch: specialisation, the launcher's parameters and buffers, vmap, errors."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from ejkernel.kernels.triton import bridge, compat, flash_attention
from ejkernel.kernels.triton.bridge import call, describe
from ejkernel.kernels.triton.compiled import (
    Code,
    OutOfSharedMemory,
    cache_key,
    clear_memory_cache,
    compile_kernel,
    stages,
)
from ejkernel.kernels.triton.launch import RUNS, In, Launch, Out, TensorMap, leaves, runs_map
from ejkernel.kernels.triton.targets import compile_for, cuda_target, current_target, rocm_target
from ejkernel.ops import interpret_mode
from ejkernel.types import MaskInfo
from ejktest.launcher import custom_calls, lowered, numbers

HOPPER, AMPERE = cuda_target(90), cuda_target(80)


@triton.jit
def affine(x, y, out, n, a, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seen = i < n
    tl.store(out + i, a * tl.load(x + i, mask=seen) + tl.load(y + i, mask=seen), mask=seen)


@dataclass(frozen=True)
class Affine:
    """a * x + y over ``[rows, n]``; y may be ``[1, n]``. ``order``: operands given as (y, x)."""

    rows: int
    n: int
    a: float = 2.0
    reversed: bool = False
    changes: tuple[tuple[str, Any], ...] = ()

    def outputs(self):
        return (jax.ShapeDtypeStruct((self.rows, self.n), jnp.float32),)

    def launch(self, target):
        total = self.rows * self.n
        x, y = (1, 0) if self.reversed else (0, 1)
        arguments = {"x": In(x), "y": In(y), "out": Out(0), "n": total, "a": self.a}
        arguments |= dict(self.changes)
        return Launch(affine, arguments, {"BLOCK": 512}, (-(-total // 512),))

    def fold(self, size, arrays, batched):
        folded = [
            bridge.merge_leading(size, a, m, self.rows)
            for a, m in zip(arrays, batched, strict=True)
        ]
        return replace(self, rows=self.rows * size), folded


def source_of(plan, *shapes):
    avals = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes or [(plan.rows, plan.n)] * 2]
    return describe(plan.launch(HOPPER), avals, plan.outputs())


# -- specialisation -----------------------------------------------------------------------------


def test_types_and_alignment() -> None:
    plan = Affine(2, 24, changes=(("y", None),))
    made = dict(source_of(plan).signature)
    assert made == {
        "x": "*fp32", "y": "constexpr", "out": "*fp32", "n": "i32", "a": "fp32",
        "BLOCK": "constexpr",
    }  # fmt: skip
    assert dict(source_of(plan).constants) == {"y": None, "BLOCK": 512}
    assert source_of(plan).aligned == ("x", "out", "n")
    assert source_of(Affine(1, 33)).aligned == ("x", "y", "out")
    wide = source_of(Affine(1, 33, changes=(("n", 2**31),)))
    assert dict(wide.signature)["n"] == "i64"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": True}, "parameter n given True"),
        ({"out": None}, "its 1 results must be the last array parameters"),
        ({"x": Out(0), "out": In(0)}, "its 1 results must be the last array parameters"),
        ({"z": 3}, "differ from the kernel's parameters in ['z']"),
    ],
    ids=str,
)
def test_refused_launches(changes, message) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        source_of(Affine(1, 32, changes=tuple(changes.items())))


class Pair(NamedTuple):
    x: Any
    y: Any
    more: Any = None


class Scaled(NamedTuple):
    pairs: tuple[Pair, ...]
    n: int
    factors: Any
    BLOCK: int


@triton.jit
def grouped(given, out, UNIT: tl.constexpr):
    i = tl.program_id(0) * given.BLOCK + tl.arange(0, given.BLOCK)
    seen = i < given.n
    total = tl.zeros([given.BLOCK], tl.float32)
    for n in tl.static_range(len(given.pairs)):
        total += given.factors[n] * tl.load(given.pairs[n].x + i, mask=seen)
        if given.pairs[n].more is not None:
            total += tl.load(given.pairs[n].y + i, mask=seen)
    tl.store(out.array + i, total * UNIT.SIZE, mask=seen)


class Result(NamedTuple):
    array: Any


class Unit(NamedTuple):
    SIZE: float


class Grouped(Affine):
    """(2 * x + 3 * x + y) * 0.5 by a kernel that takes groups."""

    def launch(self, target):
        pairs = (Pair(In(0), In(1)), Pair(In(0), In(1), more=5))
        given = Scaled(pairs, self.rows * self.n, (2.0, 3.0), BLOCK=64)
        arguments = {"given": given, "out": Result(Out(0)), **dict(self.changes)}
        return Launch(grouped, arguments, {"UNIT": Unit(0.5)}, (-(-self.rows * self.n // 64),))


def test_groups_are_types_and_places_of_their_fields(launcher) -> None:
    source = source_of(Grouped(1, 33))
    pair = ("*fp32", "*fp32")
    given = (((*pair, "constexpr"), (*pair, "i32")), "i32", ("fp32", "fp32"), "constexpr")
    assert source.signature == (
        ("given", given), ("out", ("*fp32",)), ("UNIT", ("constexpr",)),
    )  # fmt: skip
    constants = {("given", 0, 0, 2): None, ("given", 3): 64, ("UNIT", 0): 0.5}
    assert dict(source.constants) == constants
    pointers = [("given", 0, n, m) for n in (0, 1) for m in (0, 1)]
    assert source.aligned == (*pointers, ("out", 0))
    assert source_of(Grouped(1, 32)).aligned == (*pointers, ("given", 1), ("out", 0))
    with pytest.raises(TypeError, match="parameter given given True"):
        source_of(Grouped(1, 32, changes=(("given", Pair(In(0), True)),)))

    lowered(lambda x, y: call(Grouped(1, 33), x, y)[0], numbers(1, 33), numbers(1, 33))
    array = ("array", 16)
    scalars = [("scalar", *x) for x in ((5, "i32"), (33, "i32"), (2.0, "fp32"), (3.0, "fp32"))]
    assert launcher.launches[0].parameters == [*[array] * 4, *scalars, array]
    # the code takes them in the same order
    text = stages(source, HOPPER, "ttir")[0]["ttir"]
    kinds = re.search(r"tt.func public @\w+\((.*)\) attributes", text)[1]
    types = re.findall(r"%[\w.]+: (!tt.ptr<f32>|\w+)", kinds)
    assert types == ["!tt.ptr<f32>"] * 4 + ["i32", "i32", "f32", "f32", "!tt.ptr<f32>"]


def test_groups_in_the_interpreter() -> None:
    x, y = numbers(1, 70), numbers(1, 70)
    with interpret_mode():
        (made,) = call(Grouped(1, 70), x, y)
    np.testing.assert_allclose(made, (5 * np.asarray(x) + y) * 0.5, rtol=1e-6)


def test_code_is_kept_per_divisibility(tmp_path, monkeypatch) -> None:
    """A length that is a multiple of 16 and one that is not have their own code everywhere."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    clear_memory_cache()
    even, odd, odder = (source_of(Affine(1, n)) for n in (32, 33, 35))

    def attributes(source):
        """The ``n`` of the kernel as the compiler is told of it."""
        text = stages(source, HOPPER, "ttir")[0]["ttir"]
        return re.search(r"%n: i32( \{[^}]*\})?", text)[1] or ""

    assert "tt.divisibility = 16" in attributes(even)
    assert attributes(odd) == ""
    assert cache_key(odd, HOPPER) == cache_key(odder, HOPPER) != cache_key(even, HOPPER)
    first = {source: compile_kernel(source, HOPPER) for source in (odd, even)}
    assert len(list(tmp_path.rglob("*.json"))) == 2
    for _ in ("memory", "disk"):
        for source, code in first.items():
            assert compile_kernel(source, HOPPER) == code
        clear_memory_cache()
    assert "ld.global.v4" in first[even].text and "ld.global.v4" not in first[odd].text


def test_key_holds_everything_that_decides_the_code() -> None:
    source = source_of(Affine(1, 32))
    others = [
        (replace(source, options=(("num_stages", 2), ("num_warps", 8))), HOPPER),
        (replace(source, constants=(("BLOCK", 64),)), HOPPER),
        (replace(source, aligned=()), HOPPER),
        (
            replace(source, signature=tuple({**dict(source.signature), "x": "*bf16"}.items())),
            HOPPER,
        ),
        (source, AMPERE),
        (source, rocm_target("gfx942")),
    ]
    keys = {cache_key(source, HOPPER), *(cache_key(s, t) for s, t in others)}
    assert len(keys) == 1 + len(others)


# -- the launcher -------------------------------------------------------------------------------


def test_lowering(launcher) -> None:
    x = numbers(2, 520)
    text = lowered(lambda x, y: call(Affine(2, 520, a=3.0), x, y)[0], x, x)
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
    lowered(lambda x: call(Affine(1, 20), x, x)[0], x, target=target)
    path = launcher.launches[0].kernel["text"]
    with open(path, "rb") as file:
        assert file.read(4) == b"\x7fELF"


def test_operands_follow_the_parameters(launcher) -> None:
    """The launcher deals out buffers in order: reversed and repeated operands are put in place."""
    x, y = numbers(1, 20), numbers(1, 20)
    text = lowered(lambda x, y: call(Affine(1, 20, reversed=True), y, x)[0], x, y)
    assert custom_calls(text)[0][1] == ["%arg0", "%arg1"]
    twice = Affine(1, 20, changes=(("y", In(0)),))
    assert custom_calls(lowered(lambda x: call(twice, x)[0], x))[0][1] == ["%arg0", "%arg0"]
    unread = Affine(1, 20, changes=(("x", In(1)),))
    text = lowered(lambda x, y: call(unread, x, y)[0], x, y)
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
        return describe(launch, avals, outs)

    def no_code(source, target):
        kinds = leaves(tuple(kind for _, kind in source.signature))
        maps = [kind for kind in kinds if kind.startswith("tensordesc")]
        facts = {"elem_type": 10, "swizzle": 3, "block_size": [64, 64]}
        return Code(source.kernel.__name__, "", 8, 0, 0, 1, (facts,) * len(maps))

    monkeypatch.setattr(bridge, "describe", spy)
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
        values = list(leaves(tuple(map(launch.arguments.get, launch.kernel.arg_names))))
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
        lowered(lambda x: call(Affine(1, 20), x, x)[0], x)
    else:
        with pytest.raises(compat.IncompatibleVersions, match=r"scratch memory.*jax-triton>=0\.4"):
            lowered(lambda x: call(Affine(1, 20), x, x)[0], x)


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


def test_shared_memory_limit(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("EJKERNEL_TRITON_SMEM_LIMIT", "100")
    with compile_for(HOPPER):
        limited = current_target()
    assert limited == replace(HOPPER, shared_limit=100)
    monkeypatch.setattr(
        "ejkernel.kernels.triton.compiled._compile",
        lambda source, target: Code("affine", "", 4, 101, 0, 1, ()),
    )
    clear_memory_cache()
    with pytest.raises(OutOfSharedMemory, match=r"needs 101 bytes of shared memory.*sm_90 has 100"):
        compile_kernel(source_of(Affine(1, 32)), limited)
    clear_memory_cache()
    for wrong in ("0", "48k", "-1"):
        monkeypatch.setenv("EJKERNEL_TRITON_SMEM_LIMIT", wrong)
        with pytest.raises(ValueError, match=f"EJKERNEL_TRITON_SMEM_LIMIT='{wrong}'"):
            current_target()


def test_targets() -> None:
    assert (HOPPER.hopper, AMPERE.hopper) == (True, False)
    assert rocm_target("gfx942").warp_size == 64 and rocm_target("gfx1100").warp_size == 32
    assert (AMPERE.shared_limit, HOPPER.shared_limit) == (166912, 232448)
    with compile_for(AMPERE):
        assert current_target() == AMPERE
        with compile_for(HOPPER):
            assert current_target() == HOPPER
        assert current_target() == AMPERE


def test_needs_a_gpu_or_interpretation() -> None:
    x = numbers(1, 20)
    with interpret_mode(False), pytest.raises(NotImplementedError, match="EJKERNEL_INTERPRET=1"):
        call(Affine(1, 20), x, x)


def test_lowering_for_another_platform_than_the_target(launcher) -> None:
    x = numbers(1, 20)
    with compile_for(AMPERE), pytest.raises(compat.IncompatibleVersions, match="target is sm_80"):
        jax.jit(lambda x: call(Affine(1, 20), x, x)).trace(x).lower(lowering_platforms=("rocm",))


@pytest.mark.parametrize("in_axes", [(0, 0), (1, None), (None, 2)], ids=str)
def test_vmap_lays_the_axis_into_the_grid(in_axes) -> None:
    x, y = (
        numbers(2, 20, seed=i) if axis is None else jnp.moveaxis(numbers(3, 2, 20, seed=i), 0, axis)
        for i, axis in enumerate(in_axes)
    )

    def one(x, y):
        return call(Affine(2, 20), x, y)[0]

    with interpret_mode():
        for f in (jax.vmap(one, in_axes), jax.jit(jax.vmap(one, in_axes))):
            want = jax.vmap(lambda x, y: 2 * x + y, in_axes)(x, y)
            np.testing.assert_allclose(f(x, y), want, rtol=1e-6)
        nested = jax.vmap(jax.vmap(one))(numbers(2, 3, 2, 20), numbers(2, 3, 2, 20, seed=1))
    want = 2 * numbers(2, 3, 2, 20) + numbers(2, 3, 2, 20, seed=1)
    np.testing.assert_allclose(nested, want, rtol=1e-6)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_rows_of_runs_are_where_they_should_be(itemsize):
    """The copy engine adds bytes modulo 2^64, and takes strides of whole 16 bytes below 2^40."""
    columns, end, length = 7168, 60000, 300
    steps = [s * itemsize for s in runs_map(0, columns, (64, 128)).strides]
    assert all(s % 16 == 0 and s < 2**40 for s in steps[:3])
    assert all(n < 2**31 for n in runs_map(0, columns, (64, 128)).shape)
    for row in (0, 1, length - 1, length):
        at = (RUNS, end, RUNS - length + row, 5)
        address = sum(i * s for i, s in zip(at, steps, strict=True)) % 2**64
        assert address == ((end - length + row) * columns + 5) * itemsize
        assert (at[2] < RUNS) == (row < length)

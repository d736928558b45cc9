"""What a kernel is compiled for: types, alignment, groups of arguments, keys, a target's limits."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from ejkernel.kernels.triton.bound_launch import In, Out
from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.compiled import (
    Code,
    OutOfSharedMemory,
    cache_key,
    clear_memory_cache,
    compile_kernel,
    compile_stages,
)
from ejkernel.kernels.triton.launch import struct
from ejkernel.kernels.triton.targets import compile_for, cuda_target, current_target, rocm_target
from ejkernel.ops import interpret_mode
from ejktest.drawn import normal as numbers
from ejktest.launcher import Affine, lowered, source_of

HOPPER, AMPERE = cuda_target(90), cuda_target(80)


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

    kernel = grouped

    def outputs(self):
        return {"sum": struct("float32", self.rows, self.n)}

    def grid(self, target):
        return (-(-self.rows * self.n // 64),)

    def arguments(self, target):
        x, y = self.operand("x"), self.operand("y")
        given = Scaled((Pair(x, y), Pair(x, y, more=5)), self.rows * self.n, (2.0, 3.0), BLOCK=64)
        out = Result(self.result("sum"))
        return {"given": given, "out": out, "UNIT": Unit(0.5), **dict(self.changes)}


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

    lowered(lambda x, y: call(Grouped(1, 33), x=x, y=y)["sum"], numbers(1, 33), numbers(1, 33))
    array = ("array", 16)
    scalars = [("scalar", *x) for x in ((5, "i32"), (33, "i32"), (2.0, "fp32"), (3.0, "fp32"))]
    assert launcher.launches[0].parameters == [*[array] * 4, *scalars, array]
    # the code takes them in the same order
    text = compile_stages(source, HOPPER, "ttir")[0]["ttir"]
    kinds = re.search(r"tt.func public @\w+\((.*)\) attributes", text)[1]
    types = re.findall(r"%[\w.]+: (!tt.ptr<f32>|\w+)", kinds)
    assert types == ["!tt.ptr<f32>"] * 4 + ["i32", "i32", "f32", "f32", "!tt.ptr<f32>"]


def test_groups_in_the_interpreter() -> None:
    x, y = numbers(1, 70), numbers(1, 70)
    with interpret_mode():
        made = call(Grouped(1, 70), x=x, y=y)["sum"]
    np.testing.assert_allclose(made, (5 * np.asarray(x) + y) * 0.5, rtol=1e-6)


def test_code_is_kept_per_divisibility(tmp_path, monkeypatch) -> None:
    """A length that is a multiple of 16 and one that is not have their own code everywhere."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    clear_memory_cache()
    even, odd, odder = (source_of(Affine(1, n)) for n in (32, 33, 35))

    def attributes(source):
        """The ``n`` of the kernel as the compiler is told of it."""
        text = compile_stages(source, HOPPER, "ttir")[0]["ttir"]
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


def test_targets_have_the_limits_of_their_chips() -> None:
    assert (HOPPER.hopper, AMPERE.hopper) == (True, False)
    assert rocm_target("gfx942").warp_size == 64 and rocm_target("gfx1100").warp_size == 32
    assert (AMPERE.shared_limit, HOPPER.shared_limit) == (166912, 232448)
    with compile_for(AMPERE):
        assert current_target() == AMPERE
        with compile_for(HOPPER):
            assert current_target() == HOPPER
        assert current_target() == AMPERE

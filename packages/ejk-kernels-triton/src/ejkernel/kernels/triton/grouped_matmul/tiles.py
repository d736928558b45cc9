"""How grouped products are launched: arithmetic with a reason beside each line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel.kernels.triton.bound_launch import BoundLaunch, In, TensorMap
from ejkernel.kernels.triton.common.products import precision_name, refused_precision
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.plan import bound, filled
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.params import config_field
from ejkernel.types.arrays import is_eight_bit, result_dtype
from ejkernel.types.problems.grouped_matmul import GroupedProblem

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
FIELDS = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
MAX_LANES = 4096  # a program holds two numbers a lane in registers, 16 of 256 threads each


@dataclass(frozen=True)
class Problem(GroupedProblem):
    """A grouped matmul with what programs index: lanes, one for each group and the rows after them.

    ``precision`` is Triton's name.
    """

    @property
    def each(self) -> int:
        """Lanes of one call: its groups, and the rows behind them."""
        return self.groups + 1

    @property
    def given(self) -> int:
        """Sizes in memory: with several calls the rows behind the groups have theirs too."""
        return self.groups if self.batch == 1 else self.batch * self.each

    @property
    def lanes(self) -> int:
        return max(16, power_of_two(self.batch * self.each))

    @property
    def wide(self) -> bool:
        """Returns whether sums of sizes, each at most the rows, need 64 bits."""
        return (self.given + 1) * self.batch * self.rows >= 2**31


class Sizes(NamedTuple):
    """What kernels know of a call, see ``groups``; fields in capitals are constants of them."""

    rows: int
    inner: int
    columns: int
    given: int
    batches: int
    each: int
    held: int
    offset_step: int
    held_step: int | None
    TRANSPOSED: bool
    TMA: bool
    EVEN_K: bool
    LANES: int
    WIDE: bool
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    BAND: int
    PARTS: int
    FLATTEN: bool
    PRECISION: str


@dataclass(frozen=True)
class Tiles:
    """A launch. ``block_m`` by ``block_n`` of the result, ``block_k`` of the sum at a time.

    Attributes:
        per_core: programs meant to run together on one multiprocessor.
        parts: in which a tile is stored, 1 or 2.
        band: row tiles of a band.
        late: of two parts, the second leaves while the next tile is computed (gradient of rhs).
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    per_core: int = 1
    parts: int = 1
    band: int = 16
    late: bool = False

    @property
    def fields(self) -> dict[str, int]:
        """As fields of the config."""
        return {name: getattr(self, name) for name in FIELDS}


@dataclass(frozen=True)
class Passes:
    """The launches of the product and of the gradients of lhs and rhs.

    ``whole``: what computes the gradient of rhs in place of its launch: ``whole(problem, lhs, dout,
    sizes, offset)``, a hashable callable of another backend that returns what that returns.
    """

    fwd: Tiles
    dlhs: Tiles
    drhs: Tiles
    whole: Callable[..., Any] | None = None

    @property
    def fields(self) -> dict[str, int]:
        """As fields of the config: those of the product."""
        return self.fwd.fields

    def apply_config(self, cfg: Any, problem: Problem, target: Target) -> Passes:
        """These launches with what the config says of the product and of the gradient of lhs."""
        given = {n: int(config_field(cfg, n)) for n in FIELDS if config_field(cfg, n) is not None}
        if {"block_m", "block_n"} & given.keys():
            given["per_core"] = 1
        return replace(self, fwd=replace(self.fwd, **given), dlhs=replace(self.dlhs, **given))


def uses_maps(p: Problem, target: Target) -> bool:
    """Whether tiles are read through TMA descriptors, whose unit is a row of whole 16 bytes."""
    # a row of the matrices, of lhs and of the result
    whole = all(n * (1 if p.stored else p.itemsize) % 16 == 0 for n in (p.inner, p.columns))
    return target.hopper and target.tensor_maps and whole


def tensor_map(
    index: int, shape: tuple[int, int], block: tuple[int, int], maps: bool
) -> In | TensorMap:
    return TensorMap(index, shape, block) if maps else In(index)


def compiler_options(t: Tiles, target: Target) -> dict[str, int]:
    """Registers of a thread: left alone the assembler spills to fit programs that never run."""
    most = min(255, 2048 // (t.num_warps * t.per_core) // 8 * 8)
    return {"maxnreg": most} if target.platform == "cuda" else {}


def launched(
    kernel: Any, p: Problem, t: Tiles, target: Target, arguments: Mapping[str, Any], *,
    offsets: int, maps: bool, interpreted: Mapping[str, Any] | None = None, **others: Any,
) -> BoundLaunch:  # fmt: skip
    """The launch of a kernel that takes work tiles in turn; ``others``: sizes of its own."""
    known = {
        "rows": p.batch * p.rows,
        "inner": p.inner,
        "columns": p.columns,
        "given": p.given,
        "batches": p.batch,
        "each": p.each,
        "held": p.held,
        "offset_step": int(offsets > 1),
        "held_step": 0 if p.shared else p.held,
        "TRANSPOSED": p.transposed,
        "TMA": maps,
        "EVEN_K": p.inner % t.block_k == 0,
        "LANES": p.lanes,
        "WIDE": p.wide,
        "BLOCK_M": t.block_m,
        "BLOCK_N": t.block_n,
        "BLOCK_K": t.block_k,
        "BAND": t.band,
        "PARTS": t.parts,
        "FLATTEN": maps,
        "PRECISION": p.precision if target.platform == "cuda" else "ieee",
    }
    return bound(
        kernel,
        {**arguments, "of": filled(Sizes, known | others)},
        (target.cores * t.per_core,),
        t.num_warps,
        t.num_stages,
        compiler_options(t, target),
        interpreted=interpreted or {},
    )


def held_bytes(p: Problem, t: Tiles) -> int:
    """Shared memory of a program: the steps in flight, and the part of a tile being stored."""
    width = 1 if p.stored else p.itemsize
    steps = t.num_stages * (t.block_m * p.itemsize + t.block_n * width) * t.block_k
    # half a tile of all warps is a whole one of those that hold it
    parts = t.parts if t.block_m >= 16 * t.num_warps else 1
    width = 4 if p.added else BYTES[p.out]
    return steps + t.block_m * t.block_n // parts * width + 64


def deepest(p: Problem, t: Tiles, target: Target, most: int) -> Tiles:
    """``t`` with as many stages, up to ``most``, as ``per_core`` programs have room for."""
    for stages in range(most, 1, -1):
        deeper = replace(t, num_stages=stages)
        if (held_bytes(p, deeper) + 1024) * t.per_core <= target.shared_limit + 1024:
            return deeper
    return replace(t, num_stages=2)


def choose(p: Problem, target: Target) -> Tiles:
    """The heuristic launch of rows times matrices."""
    if p.stored:
        return _stored(p, target)
    across = max(16, min(256, power_of_two(p.columns)))
    # rows past the end of a group are computed for nothing: no taller than the mean run
    down = max(16, min(128, power_of_two(p.mean_rows)))
    if p.itemsize == 4:
        return _float32(p, target, down, across)
    if not uses_maps(p, target) or p.inner % 64:
        return _pointers(p, Tiles(max(32, down), min(across, 128), 32, 8, 3), target)
    if p.lanes > 512:
        return _crowded(p, down, across, target)
    down = max(64, down)
    # 128 by 256 reads three quarters of what 128 by 128 does from L2 for the same arithmetic; a
    # group of four warps for every 128 by 128 or 64 by 256, whose sums fill half its registers
    warps = max(4, min(8, down * across // 4096))
    t = Tiles(down, across, 64, warps, 4, 1 if across > 128 else 2, 2 if across > 64 else 1)
    return deepest(p, t, target, 5)


def _stored(p: Problem, target: Target) -> Tiles:
    """Columns are the rows of the matrix instruction: groups may be as small as 16."""
    down = max(16, min(128 if p.itemsize < 4 else 32, power_of_two(p.mean_rows)))
    across = max(32, min(128, power_of_two(p.columns)))
    depth = 128 if p.inner % 128 == 0 and down < 128 and p.itemsize < 4 else 64
    t = Tiles(down, across, depth, 4, 4, per_core=2)
    if not uses_maps(p, target) or p.inner % depth:
        t = replace(t, block_k=32, num_stages=3)
    return deepest(p, t, target, t.num_stages)


def choose_weights(p: Problem, target: Target) -> Tiles:
    """The heuristic launch of the gradient of the matrices."""
    sizes = (p.columns, p.inner) if p.transposed else (p.inner, p.columns)
    down, across = (
        max(16, min(n, power_of_two(s))) for n, s in zip((128, 256), sizes, strict=True)
    )
    if p.itemsize == 4:
        return _float32(p, target, down, across)
    if not uses_maps(p, target):
        return _pointers(p, Tiles(down, min(across, 128), 32, 8, 3), target)
    if p.lanes > 512:
        return _crowded(p, down, across, target)
    t = Tiles(max(64, down), across, 64, 8 if across > 128 else 4, 4, parts=2 if across > 64 else 1)
    # a tile of one step has no second product to hide half of the last one behind
    return deepest(p, replace(t, late=t.parts == 2 and p.mean_rows > t.block_k), target, 4)


def _crowded(p: Problem, down: int, across: int, target: Target) -> Tiles:
    """What a program knows of the groups takes the registers that sums would need."""
    t = Tiles(max(64, down), min(128, across), 64, 8, 4, parts=2 if across > 64 else 1)
    return deepest(p, t, target, 5)


def _float32(p: Problem, target: Target, down: int, across: int) -> Tiles:
    if p.precision == "ieee" or target.platform == "rocm":
        # no matrix unit (AMD: a slow one): registers hold the operands of many multiply-adds
        return Tiles(min(64, down), min(32, across), 16, 4, 2, per_core=2)
    most = 64 if p.precision == "tf32x3" else 128  # of which every operand is kept in two halves
    across = min(across, most)
    warps = 4 if p.precision == "tf32x3" and int(target.arch) < 100 else 8
    t = Tiles(min(max(64, down), most), across, 32, warps, 3, parts=2 if across > 64 else 1)
    return deepest(p, t, target, 3)


def _pointers(p: Problem, t: Tiles, target: Target) -> Tiles:
    """Addresses take the registers that larger tiles would need."""
    if any(n * p.itemsize % 16 for n in (p.inner, p.columns)):
        t = replace(t, block_n=min(t.block_n, 64))  # no vectors: an address for every element
    if target.platform == "rocm":
        # no asynchronous copies to shared memory: two programs hide each other's loads
        return replace(t, num_stages=2, per_core=2)
    return deepest(p, t, target, 4)


def choose_all(p: Problem, target: Target) -> Passes:
    """The heuristic launches of all passes."""
    return Passes(choose(p, target), choose(p.flipped(), target), choose_weights(p, target))


def problem_of(a: Mapping[str, Any]) -> Problem:
    """The static properties of a call whose arguments are canonical."""
    dtype = result_dtype(a["lhs"].dtype, a["rhs"].dtype).name
    return Problem.from_call(a, precision_name(a.get("precision"), dtype))


def refusal(a: Mapping[str, Any]) -> str | None:
    """Why dtypes, sizes or precision are not supported, None when they are."""
    for name in ("lhs", "rhs", "preferred_element_type", "existing_out"):
        x = a.get(name)
        if name == "rhs" and is_eight_bit(x):
            if x.shape[2] % 2:
                return f"rhs: 8-bit numbers are read in pairs, its last axis {x.shape[2]} is odd"
        elif x is not None:
            dtype = jnp.dtype(x if name == "preferred_element_type" else x.dtype).name
            if dtype not in BYTES:
                return f"{name}: {dtype} is not supported, only {', '.join(BYTES)}"
    if a["group_sizes"].shape[0] >= MAX_LANES:
        return f"group_sizes: at most {MAX_LANES - 1} groups, got {a['group_sizes'].shape[0]}"
    dtype = result_dtype(a["lhs"].dtype, a["rhs"].dtype).name
    return refused_precision(precision_name(a.get("precision"), dtype))


def neighbours(p: Problem, target: Target) -> list[Tiles]:
    """Launches worth timing: half and double the rows and columns, that fit."""
    t = choose(p, target)
    found = [t]
    for m in (t.block_m // 2, t.block_m, t.block_m * 2):
        for n in (t.block_n // 2, t.block_n):
            warps = 8 if m * n > 128 * 128 else 4
            for most in (3, 4, 6):
                near_t = replace(t, block_m=m, block_n=n, num_warps=warps, per_core=1)
                near_t = deepest(p, near_t, target, most)
                fits = held_bytes(p, near_t) <= target.shared_limit
                if 16 <= m <= 256 and n >= 16 and m * n <= 128 * 256 and fits:
                    found.append(near_t)
    return list(dict.fromkeys(found))

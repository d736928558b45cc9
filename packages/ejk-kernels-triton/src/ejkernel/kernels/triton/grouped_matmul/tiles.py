"""Tiles of grouped matmul: arithmetic, with a reason next to each line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.triton.common.precision import precision_name, refused_precision
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.params import config_field
from ejkernel.types.arrays import is_eight_bit, result_dtype
from ejkernel.types.problems.grouped_matmul import GroupedProblem
from ejkernel.types.problems.grouped_passes import MAX_LANES

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
FIELDS = ("block_m", "block_n", "block_k", "num_warps", "num_stages")


@dataclass(frozen=True)
class Problem(GroupedProblem):
    """A grouped matmul with what programs index: lanes, one for each group and the rows after them.

    ``precision`` is Triton's name.
    """

    @property
    def lanes_per_call(self) -> int:
        """Lanes of one call: its groups, and the rows after them."""
        return self.groups + 1

    @property
    def size_count(self) -> int:
        """Sizes in memory: with several calls, the rows after the groups have one too."""
        return self.groups if self.batch == 1 else self.batch * self.lanes_per_call

    @property
    def lanes(self) -> int:
        """Lanes of a program, a power of two."""
        return max(16, power_of_two(self.batch * self.lanes_per_call))

    @property
    def wide(self) -> bool:
        """True where prefix sums of sizes, each at most the rows, need 64 bits."""
        return (self.size_count + 1) * self.batch * self.rows >= 2**31


@dataclass(frozen=True)
class Tiles:
    """A tile: ``block_m`` by ``block_n`` of the result, ``block_k`` of the contracted axis.

    Attributes:
        per_core: programs meant to run together on one multiprocessor.
        parts: parts in which a tile is stored, 1 or 2.
        band: row tiles of a band.
        late: whether the second part leaves while the next tile is computed (gradient of rhs).
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
        """Values by the names of the config's fields."""
        return {name: getattr(self, name) for name in FIELDS}


@dataclass(frozen=True)
class Passes:
    """The tiles of the matmul and of the gradients of lhs and rhs."""

    fwd: Tiles
    dlhs: Tiles
    drhs: Tiles

    @property
    def fields(self) -> dict[str, int]:
        """Values by the names of the config's fields, of the forward pass."""
        return self.fwd.fields

    def apply_config(self, cfg: Any, problem: Problem, target: Target) -> Passes:
        """Returns these tiles with a config's values for forward and the gradient of lhs."""
        values = {n: int(config_field(cfg, n)) for n in FIELDS if config_field(cfg, n) is not None}
        if {"block_m", "block_n"} & values.keys():
            values["per_core"] = 1
        return replace(self, fwd=replace(self.fwd, **values), dlhs=replace(self.dlhs, **values))


def uses_maps(p: Problem, target: Target) -> bool:
    """Returns whether tiles are loaded by TMA, which takes rows of a multiple of 16 bytes."""
    # a row of the matrices, of lhs and of the result
    aligned = all(n * (1 if p.stored else p.itemsize) % 16 == 0 for n in (p.inner, p.columns))
    return target.hopper and target.tensor_maps and aligned


def shared_bytes(p: Problem, t: Tiles) -> int:
    """Returns the shared memory of a program: steps in flight and the stored part of a tile."""
    width = 1 if p.stored else p.itemsize
    steps = t.num_stages * (t.block_m * p.itemsize + t.block_n * width) * t.block_k
    # half a tile of all warps is a full one of the warps that hold it
    parts = t.parts if t.block_m >= 16 * t.num_warps else 1
    width = 4 if p.added else BYTES[p.out]
    return steps + t.block_m * t.block_n // parts * width + 64


def deepest(p: Problem, t: Tiles, target: Target, most: int) -> Tiles:
    """Returns ``t`` with as many stages, up to ``most``, as fit ``per_core`` programs."""
    for stages in range(most, 1, -1):
        deeper = replace(t, num_stages=stages)
        if (shared_bytes(p, deeper) + 1024) * t.per_core <= target.shared_limit + 1024:
            return deeper
    return replace(t, num_stages=2)


def choose(p: Problem, target: Target) -> Tiles:
    """Returns the heuristic tile of the forward pass."""
    if p.stored:
        return _stored(p, target)
    across = max(16, min(256, power_of_two(p.columns)))
    # rows past the end of a group are computed for nothing: no taller than the mean group
    down = max(16, min(128, power_of_two(p.mean_rows)))
    if p.itemsize == 4:
        return _float32(p, target, down, across)
    if not uses_maps(p, target) or p.inner % 64:
        return _pointers(p, Tiles(max(32, down), min(across, 128), 32, 8, 3), target)
    if p.lanes > 512:
        return _crowded(p, down, across, target)
    down = max(64, down)
    # 128 by 256 reads three quarters of the bytes of 128 by 128 from L2 for the same arithmetic; a
    # group of four warps for every 128 by 128 or 64 by 256, whose accumulator takes half its
    # registers
    warps = max(4, min(8, down * across // 4096))
    t = Tiles(down, across, 64, warps, 4, 1 if across > 128 else 2, 2 if across > 64 else 1)
    return deepest(p, t, target, 5)


def _stored(p: Problem, target: Target) -> Tiles:
    """Returns the tile of 8-bit matrices, whose columns are the rows of the matrix instruction."""
    down = max(16, min(128 if p.itemsize < 4 else 32, power_of_two(p.mean_rows)))
    across = max(32, min(128, power_of_two(p.columns)))
    large = down == 128 and p.columns > 128 and p.lanes <= 512
    if large and uses_maps(p, target) and p.inner % 64 == 0:
        # two warpgroups of 128 columns share the rows. 16384 rows in 8 groups of 4096 x 14336 on an
        # H200: 3.51 ms, gradient of lhs 4.63; tiles of 128 by 128 took 4.14 and 6.27
        t = deepest(p, Tiles(128, 256, 64, 8, 4), target, 4)
        if t.num_stages == 4:  # not with results of 32 bits
            return t
    depth = 128 if p.inner % 128 == 0 and down < 128 and p.itemsize < 4 else 64
    t = Tiles(down, across, depth, 4, 4, per_core=2)
    if not uses_maps(p, target) or p.inner % depth:
        t = replace(t, block_k=32, num_stages=3)
    return deepest(p, t, target, t.num_stages)


def choose_weights(p: Problem, target: Target) -> Tiles:
    """Returns the heuristic tile of the gradient of the matrices."""
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
    # a tile of one step has no second matmul to hide half of the last tile behind
    return deepest(p, replace(t, late=t.parts == 2 and p.mean_rows > t.block_k), target, 4)


def _crowded(p: Problem, down: int, across: int, target: Target) -> Tiles:
    """Returns the tile with many groups, which take the registers of a larger accumulator."""
    t = Tiles(max(64, down), min(128, across), 64, 8, 4, parts=2 if across > 64 else 1)
    return deepest(p, t, target, 5)


def _float32(p: Problem, target: Target, down: int, across: int) -> Tiles:
    if p.precision == "ieee" or target.platform == "rocm":
        # no matrix unit (AMD: a slow one): registers hold the operands of many multiply-adds
        return Tiles(min(64, down), min(32, across), 16, 4, 2, per_core=2)
    most = 64 if p.precision == "tf32x3" else 128  # each operand is split into two halves
    across = min(across, most)
    warps = 4 if p.precision == "tf32x3" and int(target.arch) < 100 else 8
    t = Tiles(min(max(64, down), most), across, 32, warps, 3, parts=2 if across > 64 else 1)
    return deepest(p, t, target, 3)


def _pointers(p: Problem, t: Tiles, target: Target) -> Tiles:
    """Returns a tile loaded by pointers, whose addresses take registers of larger tiles."""
    if any(n * p.itemsize % 16 for n in (p.inner, p.columns)):
        t = replace(t, block_n=min(t.block_n, 64))  # no vectors: an address for every element
    if target.platform == "rocm":
        # no asynchronous copies to shared memory: two programs hide each other's loads
        return replace(t, num_stages=2, per_core=2)
    return deepest(p, t, target, 4)


def choose_all(p: Problem, target: Target) -> Passes:
    """Returns the heuristic tiles of all passes."""
    return Passes(choose(p, target), choose(p.flipped(), target), choose_weights(p, target))


def problem_of(a: Mapping[str, Any]) -> Problem:
    """Returns the static properties of a call whose arguments are canonical."""
    dtype = result_dtype(a["lhs"].dtype, a["rhs"].dtype).name
    return Problem.from_call(a, precision_name(a.get("precision"), dtype))


def unsupported_reason(a: Mapping[str, Any]) -> str | None:
    """Returns why dtypes, sizes or precision are not supported, None when they are."""
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
    """Returns other tiles worth timing: half and double the rows and columns, if they fit."""
    t = choose(p, target)
    candidates = [t]
    for m in (t.block_m // 2, t.block_m, t.block_m * 2):
        for n in (t.block_n // 2, t.block_n):
            warps = 8 if m * n > 128 * 128 else 4
            for most in (3, 4, 6):
                near_t = replace(t, block_m=m, block_n=n, num_warps=warps, per_core=1)
                near_t = deepest(p, near_t, target, most)
                fits = shared_bytes(p, near_t) <= target.shared_limit
                if 16 <= m <= 256 and n >= 16 and m * n <= 128 * 256 and fits:
                    candidates.append(near_t)
    return list(dict.fromkeys(candidates))

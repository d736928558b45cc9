"""Sizes, options and mapped calls of all launches of grouped matmul."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax

from ejkernel.kernels.triton.bound_launch import In, TensorMap
from ejkernel.kernels.triton.grouped_matmul.tiles import Problem, Tiles
from ejkernel.kernels.triton.launch import BATCHED, SHARED, Launch
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.problems.grouped_passes import MAX_LANES, add_remaining_rows


class Params(NamedTuple):
    """Sizes and constants of a call, see ``groups``; fields in capitals are constants."""

    rows: int
    inner: int
    columns: int
    size_count: int
    batches: int
    lanes_per_call: int
    matrices: int
    offset_stride: int
    matrix_stride: int | None
    TRANSPOSED: bool
    TMA: bool
    IS_DIVISIBLE: bool  # the contracted axis is whole steps
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
class GroupedLaunch(Launch):
    """A kernel each of whose P programs takes every P-th work tile.

    Mapped calls are more groups of one launch. Their group sizes then include the rows after the
    last group.
    """

    batching: ClassVar = {"group_sizes": BATCHED, "offset": SHARED}

    problem: Problem
    tiles: Tiles

    def grid(self, target):
        return (target.cores * self.tiles.per_core,)

    def options(self, target):
        t = self.tiles
        options = {"num_warps": t.num_warps, "num_stages": t.num_stages}
        if target.platform != "cuda":
            return options
        # without a bound the assembler spills to fit programs that never run
        registers = min(255, 2048 // (t.num_warps * t.per_core) // 8 * 8)
        return options | {"maxnreg": registers}

    @property
    def shares_matrices(self) -> bool:
        """True where all calls have the same matrices."""
        shape = self.shape("rhs")
        return shape is not None and shape[0] == self.problem.held

    def params(self, target: Target, maps: bool, **others: Any) -> Params:
        """Returns the sizes and constants of a call; ``others`` take the place of these."""
        p, t = self.problem, self.tiles
        offsets = (self.shape("offset") or (0,))[0]
        sizes = {
            "rows": p.batch * p.rows,
            "inner": p.inner,
            "columns": p.columns,
            "size_count": p.size_count,
            "batches": p.batch,
            "lanes_per_call": p.lanes_per_call,
            "matrices": p.held,
            "offset_stride": int(offsets > 1),
            "matrix_stride": 0 if self.shares_matrices else p.held,
            "TRANSPOSED": p.transposed,
            "TMA": maps,
            "IS_DIVISIBLE": p.inner % t.block_k == 0,
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
        return Params(**(sizes | others))

    def rows_operand(self, name: str, columns: int, maps: bool) -> In | TensorMap | None:
        """Returns ``[batch * rows, columns]`` as tiles of rows are loaded from it."""
        p, t, operand = self.problem, self.tiles, self.operand(name)
        if operand is None or not maps:
            return operand
        return TensorMap(operand.index, (p.batch * p.rows, columns), (t.block_m, t.block_k))

    # -- mapped calls --------------------------------------------------------------------------

    def with_batch(self, size: int) -> Any:
        return replace(self, problem=replace(self.problem, batch=size * self.problem.batch))

    def rows_per_batch(self, name: str) -> int:
        return self.problem.held if name in ("rhs", "scale") else 1

    def is_sequential(self, size: int, mapped: Sequence[bool]) -> bool:
        """Returns whether the groups of all calls are more than a program can hold."""
        p = self.problem
        return size * p.batch * p.lanes_per_call > MAX_LANES

    def fold(
        self, size: int, arrays: Sequence[jax.Array], mapped: Sequence[bool]
    ) -> tuple[Launch, list[jax.Array]]:
        p, index, arrays = self.problem, self.names.index("group_sizes"), list(arrays)
        if arrays[index].shape[-1] == p.groups:
            arrays[index] = add_remaining_rows(arrays[index], p.rows)
        return super().fold(size, arrays, mapped)

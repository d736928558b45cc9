"""Tiles of grouped matmul on TPU: the fewest bytes moved, among tiles that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ejkernel.kernels.pallas.tpu.common.chip import LANES, Chip
from ejkernel.ops.params import config_field
from ejkernel.types.problems.grouped_matmul import GroupedProblem

# A grid step costs some 200 bundles besides its matmul; about that many bytes arrive in that time.
STEP_BYTES = 2**18
MAX_ROWS, MAX_COLUMNS = 512, 2048
# fields of a config by fields of tiles
CONFIG = {"rows": "block_m", "columns": "block_n", "inner": "block_k"}


@dataclass(frozen=True)
class Tiles:
    """Blocks of one kernel.

    Attributes:
        rows: rows of ``lhs`` in a grid step.
        columns: columns of the result in a grid step.
        inner: of the axis that forward contracts, in a grid step; the whole axis where it fits,
            because then consecutive blocks of rows use a matrix that is fetched once.
        chunk: part of ``inner`` in one matmul of straight code.
    """

    rows: int
    columns: int
    inner: int
    chunk: int = LANES

    def accumulates(self, p: GroupedProblem) -> bool:
        """Returns whether a block of the result is the sum of several matmuls of straight code."""
        return min(self.chunk, self.inner) < p.inner

    def vmem(self, p: GroupedProblem) -> int:
        """Bytes of vector memory of the forward kernel: two buffers of each block, the accumulator
        if there is one, and what one matmul of straight code leaves in memory."""
        out = self.rows * self.columns
        lhs = self.rows * _padded(self.inner, LANES) * p.itemsize
        rhs = _padded(self.inner, LANES) * self.columns * (1 if p.stored else p.itemsize)
        blocks = lhs + rhs + out * (result_itemsize(p) + (4 if p.added else 0))
        # 8-bit values become float32 on their way to the dtype of lhs
        widened = self.chunk * self.columns * (p.itemsize + 8) if p.stored else 0
        results = 2 if self.accumulates(p) else 1
        return 2 * blocks + results * 4 * out + widened

    def gradient_vmem(self, p: GroupedProblem) -> int:
        """Bytes of vector memory of the kernel for the gradient of ``rhs``."""
        out = self.inner * self.columns
        blocks = self.rows * (self.inner + self.columns) * p.itemsize + out * p.itemsize
        return 2 * blocks + 2 * 4 * out + 4 * self.rows * (self.inner + self.columns)


@dataclass(frozen=True)
class GroupedTiles:
    """Tiles of the three kernels: the result, the gradient of ``lhs``, that of ``rhs``."""

    fwd: Tiles
    dlhs: Tiles
    drhs: Tiles

    @property
    def fields(self) -> dict[str, int]:
        """Returns the forward tiles as fields of the config, which holds powers of two.

        Other sizes follow from the shapes again, like the chunk.
        """
        sizes = {field: getattr(self.fwd, name) for name, field in CONFIG.items()}
        return {name: n for name, n in sizes.items() if 16 <= n <= 1024 and n.bit_count() == 1}

    def apply_config(self, cfg: Any, problem: GroupedProblem, target: Chip) -> GroupedTiles:
        """Returns these tiles with a config's sizes in the forward kernel, in whole registers."""
        values = {name: config_field(cfg, field) for name, field in CONFIG.items()}
        sizes = {name: int(size) for name, size in values.items() if size is not None}
        return replace(self, fwd=legal(replace(self.fwd, **sizes), problem))


def result_itemsize(p: GroupedProblem) -> int:
    return 2 if p.out == "bfloat16" else 4


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def row_unit(p: GroupedProblem) -> int:
    """Rows of a register of ``lhs`` and of the result, whichever has more."""
    return 16 if 2 in (p.itemsize, result_itemsize(p)) else 8


def legal(t: Tiles, p: GroupedProblem) -> Tiles:
    """Returns tiles in whole registers, no larger than the arrays."""
    inner = p.inner if t.inner >= p.inner else _padded(t.inner, LANES)
    return replace(
        t,
        rows=min(_padded(t.rows, row_unit(p)), _padded(p.rows, row_unit(p))),
        columns=min(_padded(t.columns, LANES), _padded(p.columns, LANES)),
        inner=min(inner, p.inner),
    )


def block_rows(p: GroupedProblem) -> int:
    """Returns the rows of a block: a power of two near the mean of a group.

    What lies past the end of a group is computed for nothing. Below 64 rows that no longer costs:
    the matrix units load a matrix no faster than memory delivers it.
    """
    most = MAX_ROWS if p.itemsize == 2 else MAX_ROWS // 2
    block = 64
    while block < min(most, p.mean_rows):
        block *= 2
    return min(block, _padded(p.rows, row_unit(p)))


def even_blocks(length: int, unit: int, most: int) -> Iterator[int]:
    """Yields blocks of at most ``most`` that divide an axis evenly, up to rounding to ``unit``."""
    last = None
    for count in range(1, -(-length // unit) + 1):
        block = _padded(-(-length // count), unit)
        if block <= max(most, unit) and block != last:
            last = block
            yield block


def max_multiply_adds(p: GroupedProblem, chip: Chip) -> int:
    """Returns the most multiply-adds of one matmul of straight code.

    More take longer to compile; fewer wait more often for the first rows to come out of a matrix
    unit, which a wide one makes up for only with more of them. Float32 may be six passes.
    """
    work = 2**30 if chip.mxu > LANES else 2**29
    return work if p.itemsize == 2 else work // 4


def forward_tiles(p: GroupedProblem, chip: Chip) -> Tiles:
    """Returns tiles of the result.

    ``lhs`` is read once for each block of columns; a matrix once, or where ``inner`` is divided
    once for each block of rows.
    """
    rows = block_rows(p)
    visits = -(-p.rows // rows) + p.held

    def cost(t: Tiles) -> int:
        """Bytes that are moved, and the time of grid steps in bytes."""
        column_blocks, inner_blocks = -(-p.columns // t.columns), -(-p.inner // t.inner)
        lhs = p.rows * column_blocks * p.itemsize
        matrices_read = p.held if inner_blocks == 1 else visits
        rhs = matrices_read * p.columns * (1 if p.stored else p.itemsize)
        return p.inner * (lhs + rhs) + STEP_BYTES * visits * column_blocks * inner_blocks

    inner = [p.inner, *(k for k in even_blocks(p.inner, LANES, 4096) if p.inner % k == 0)]
    if len(inner) == 1:  # nothing divides it: its last block is masked
        inner += list(even_blocks(p.inner, LANES, 4096))
    columns = list(even_blocks(p.columns, chip.mxu, MAX_COLUMNS))

    def chunk(n: int) -> int:
        return max(LANES, min(max_multiply_adds(p, chip) // (rows * n) // LANES * LANES, 1024))

    candidates = [legal(Tiles(rows, n, k, chunk(n)), p) for k in inner for n in columns]
    fitting = [t for t in candidates if t.vmem(p) <= chip.tile_memory]
    return min(fitting, key=cost) if fitting else min(candidates, key=lambda t: t.vmem(p))


def gradient_tiles(p: GroupedProblem, chip: Chip) -> Tiles:
    """Returns tiles of the gradient of ``rhs``: ``lhs`` is read once for each block of columns, the
    cotangent once for each block of ``inner``."""
    rows = block_rows(p)
    visits = -(-p.rows // rows) + p.held

    def cost(t: Tiles) -> int:
        """Bytes that are moved, and the time of grid steps in bytes."""
        column_blocks, inner_blocks = -(-p.columns // t.columns), -(-p.inner // t.inner)
        moved = p.rows * (p.inner * column_blocks + p.columns * inner_blocks) * p.itemsize
        return moved + STEP_BYTES * visits * column_blocks * inner_blocks

    inner = list(even_blocks(p.inner, chip.mxu, 1024))
    columns = list(even_blocks(p.columns, chip.mxu, 1024))
    most = max(max_multiply_adds(p, chip), 512**2 * rows)
    candidates = [
        legal(Tiles(rows, n, k), p) for k in inner for n in columns if rows * n * k <= most
    ]
    fitting = [t for t in candidates if t.gradient_vmem(p) <= chip.tile_memory]
    return min(fitting, key=cost) if fitting else min(candidates, key=lambda t: t.gradient_vmem(p))


def choose(p: GroupedProblem, chip: Chip) -> GroupedTiles:
    """Returns the tiles of a call."""
    return GroupedTiles(
        forward_tiles(p, chip), forward_tiles(p.flipped(), chip), gradient_tiles(p, chip)
    )


def neighbours(t: Tiles, p: GroupedProblem) -> Iterator[Tiles]:
    """Yields tiles with half or twice the rows or columns."""
    for name in ("rows", "columns"):
        for size in (getattr(t, name) // 2, getattr(t, name) * 2):
            near = legal(replace(t, **{name: max(size, 16)}), p)
            if near != t:
                yield near

"""Grouped matmul: every group of rows times its own matrix.

Math, for the rows r of group i, whose matrix is w_i, accumulated in float32:

    out[r] = lhs[r] @ w_i (+ existing[r]);  0 (+ existing[r]) for rows that have no matrix

The gradient of lhs is the same matmul with the transposed matrices.

Work split: a tile is BLOCK_M rows of one group by BLOCK_N columns; tiles start where their group
does, so none has two groups, and rows past the group are computed and not stored. As many programs
as the GPU holds loop over the tiles, each taking every P-th. A group's tiles are ordered in bands
of BAND row tiles, rows first: programs that run together then form a rectangle that shares rows and
columns in the L2 cache. Groups without rows have no tiles. Rows without a matrix are stored last.

Bound, bfloat16 on an H200 (989 TFLOP/s at most, copies 4.3 TB/s): 16384 rows x 4096 x 14336 in 8
groups is 1.92 TFLOP = 1.95 ms, its 1.5 GB are 0.35 ms: arithmetic, with the rows rounded up to
tiles: half a tile a group. 8192 rows x 2048 x 768 in 128 groups is 0.026 TFLOP = 0.026 ms, its
0.45 GB, nearly all of them weights, are 0.105 ms: memory. Reached, with even groups and with
Zipf's: 81 and 78% (2.39, 2.49 ms), 94 and 83% (0.112, 0.127 ms); 256 groups of 65536 x 7168 x 2048,
as many FLOPs as the first, 71 and 55% (2.75, 3.52 ms). A dense matmul of as many reaches 82 to 85%.

Sources: Gale et al. 2022, "MegaBlocks" (arXiv 2211.15841), section 3: groups of any size without
padding the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.bound_launch import TensorMap
from ejkernel.kernels.triton.grouped_matmul.groups import (
    find_lane,
    find_matrix,
    find_row_tile,
    lane_rows,
)
from ejkernel.kernels.triton.grouped_matmul.launch import GroupedLaunch
from ejkernel.kernels.triton.grouped_matmul.tiles import uses_maps
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, SHARED, struct


@triton.jit
def _store_part(out, existing, tile, row, row_end, column, columns, BLOCK_M: tl.constexpr):
    """Stores rows ``row`` to ``row_end`` of a tile, plus ``existing``."""
    WIDTH: tl.constexpr = tile.shape[1]
    r = row + tl.arange(0, BLOCK_M)
    c = column + tl.arange(0, WIDTH)
    inside = (r < row_end)[:, None] & (c < columns)[None, :]
    at = r.to(tl.int64)[:, None] * columns + c[None, :]
    if existing is not None:
        tile = tile + tl.load(existing + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, tile.to(out.dtype.element_ty), mask=inside)


@triton.jit
def split_columns(tile):
    """Returns the left and the right half of a tile."""
    HALF: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, HALF)), (0, 2, 1)))


@triton.jit
def store_tile(
    out, existing, tile, row, row_end, column, columns, BLOCK_M: tl.constexpr, PARTS: tl.constexpr
):
    """Stores a tile in one part or two, which need less shared memory to become full rows."""
    if PARTS == 1:
        _store_part(out, existing, tile, row, row_end, column, columns, BLOCK_M)
    else:
        HALF: tl.constexpr = tile.shape[1] // 2
        left, right = split_columns(tile)
        _store_part(out, existing, left, row, row_end, column, columns, BLOCK_M)
        _store_part(out, existing, right, row, row_end, column + HALF, columns, BLOCK_M)


@triton.jit
def store_unmatched(
    program, programs, out, existing, matrices, row_tiles, ends, across, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Stores tiles of 0 (plus ``existing``) in the rows of lanes without a matrix."""
    until = tl.cumsum(tl.where(matrices >= 0, 0, row_tiles), 0)
    for t in tl.range(program, tl.max(until, 0) * across, programs):
        _, first_tile, first_row, row_end = find_lane(t // across, until, ends)
        row = first_row + (t // across - first_tile) * BLOCK_M
        zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        store_tile(
            out, existing, zero, row, row_end, t % across * BLOCK_N, columns, BLOCK_M, PARTS
        )  # fmt: skip


@triton.jit
def grouped_matmul_fwd(lhs, rhs, group_sizes, offset, existing, out, params):
    """Multiplies the rows of every group by the matrix of the group."""
    inner, columns = params.inner, params.columns
    program, programs = tl.program_id(0), tl.num_programs(0)
    starts, ends = lane_rows(group_sizes, params)
    matrices = find_matrix(tl.arange(0, params.LANES), offset, params)
    row_tiles = (ends - starts + params.BLOCK_M - 1) // params.BLOCK_M
    until = tl.cumsum(tl.where(matrices >= 0, row_tiles, 0), 0)
    across = (columns + params.BLOCK_N - 1) // params.BLOCK_N
    steps = (inner + params.BLOCK_K - 1) // params.BLOCK_K

    for t in tl.range(program, tl.max(until, 0) * across, programs, flatten=params.FLATTEN):
        lane, row, row_end, column = find_row_tile(t, until, ends, across, params)
        matrix = find_matrix(lane, offset, params)

        acc = tl.zeros([params.BLOCK_M, params.BLOCK_N], tl.float32)
        for step in tl.range(0, steps):
            k = step * params.BLOCK_K
            if params.TMA:
                a = lhs.load([row, k])
                if params.TRANSPOSED:
                    b = tl.trans(rhs.load([matrix * columns + column, k]))
                else:
                    b = rhs.load([matrix * inner + k, column])
            else:
                r = row + tl.arange(0, params.BLOCK_M)
                c = column + tl.arange(0, params.BLOCK_N)
                i = k + tl.arange(0, params.BLOCK_K)
                row_element = r.to(tl.int64)[:, None] * inner + i[None, :]
                base = rhs + matrix.to(tl.int64) * inner * columns
                if params.TRANSPOSED:
                    pointers = base + i[:, None] + c.to(tl.int64)[None, :] * inner
                else:
                    pointers = base + i.to(tl.int64)[:, None] * columns + c[None, :]
                inside = (r < row_end)[:, None]
                in_matrix = (c < columns)[None, :]
                if not params.IS_DIVISIBLE:
                    inside = inside & (i < inner)[None, :]
                    in_matrix = in_matrix & (i < inner)[:, None]
                a = tl.load(lhs + row_element, mask=inside, other=0.0)
                b = tl.load(pointers, mask=in_matrix, other=0.0)
            acc = tl.dot(a, b, acc, input_precision=params.PRECISION)
        store_tile(out, existing, acc, row, row_end, column, columns, params.BLOCK_M, params.PARTS)

    store_unmatched(
        program, programs, out, existing, matrices, row_tiles, ends, across, columns,
        params.BLOCK_M, params.BLOCK_N, params.PARTS,
    )  # fmt: skip


@dataclass(frozen=True)
class GroupedForward(GroupedLaunch):
    """Launch of ``grouped_matmul_fwd``."""

    kernel = grouped_matmul_fwd
    batching: ClassVar = {
        **GroupedLaunch.batching,
        "lhs": BATCHED,
        "rhs": SHARED,
        "existing": BATCHED,
    }

    def outputs(self):
        p = self.problem
        return {"out": struct(p.out, p.batch * p.rows, p.columns)}

    def arguments(self, target):
        p, t, rhs = self.problem, self.tiles, self.operand("rhs")
        # a tile that leaves its matrix reads the next one, times 0: infinity would become NaN
        maps = p.inner % t.block_k == 0 and uses_maps(p, target)
        if rhs is not None and maps:
            matrices = (1 if self.shares_matrices else p.batch) * p.held
            shape, block = (matrices * p.inner, p.columns), (t.block_k, t.block_n)
            if p.transposed:
                shape, block = (matrices * p.columns, p.inner), (t.block_n, t.block_k)
            rhs = TensorMap(rhs.index, shape, block)
        lhs = self.rows_operand("lhs", p.inner, maps)
        return {"lhs": lhs, "rhs": rhs, "params": self.params(target, maps)}

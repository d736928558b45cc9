"""Grouped matrix product: every run of rows times its own matrix.

Math, for the rows r of group i, whose matrix is w_i, accumulated in float32:

    out[r] = lhs[r] @ w_i (+ existing[r]);  0 (+ existing[r]) for rows that have no matrix

The gradient of lhs is the same product with the transposed matrices.

Work split: a tile is BLOCK_M rows of one group by BLOCK_N columns; tiles start where their group
does, so none holds two groups, and rows past the group are computed and not stored. As many
programs as the chip holds walk the tiles, each taking every P-th. A group's tiles are ordered in
bands of BAND row tiles, rows first: programs that run together then form a rectangle that shares
rows and columns in the L2 cache. Groups without rows have no tiles. Rows without a matrix are
walked after the products.

Bound, bfloat16 on an H200 (989 TFLOP/s at most, copies 4.3 TB/s): 16384 rows x 4096 x 14336 in 8
groups is 1.92 TFLOP = 1.95 ms, its 1.5 GB are 0.35 ms: arithmetic, of the rows there are, rounded
up to tiles: half a tile a group. 8192 rows x 2048 x 768 in 128 groups is 0.026 TFLOP = 0.026 ms,
its 0.45 GB, nearly all of them weights, are 0.105 ms: memory. Reached, of even and of Zipf's
groups: 81 and 78% (2.39, 2.49 ms), 94 and 83% (0.112, 0.127 ms); 256 groups of 65536 x 7168 x 2048,
as many operations as the first, 71 and 55% (2.75, 3.52 ms). A dense product of as many reaches 82
to 85%.

Sources: Gale et al. 2022, "MegaBlocks" (arXiv 2211.15841), section 3: groups of any size without
padding the input.
"""

from __future__ import annotations

from typing import Any

from ejkernel.kernels.triton.bound_launch import BoundLaunch, Out
from ejkernel.kernels.triton.grouped_matmul.groups import find_lane, lane_rows, matrix_of, row_tile
from ejkernel.kernels.triton.grouped_matmul.tiles import (
    Problem,
    Tiles,
    launched,
    tensor_map,
    uses_maps,
)
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.plan import inputs
from ejkernel.kernels.triton.targets import Target


@triton.jit
def _store(out, existing, tile, row, row_end, column, columns, BLOCK_M: tl.constexpr):
    """Rows ``row`` to ``row_end`` of a tile, with what is added to them."""
    WIDTH: tl.constexpr = tile.shape[1]
    r = row + tl.arange(0, BLOCK_M)
    c = column + tl.arange(0, WIDTH)
    inside = (r < row_end)[:, None] & (c < columns)[None, :]
    at = r.to(tl.int64)[:, None] * columns + c[None, :]
    if existing is not None:
        tile = tile + tl.load(existing + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, tile.to(out.dtype.element_ty), mask=inside)


@triton.jit
def in_halves(tile):
    """The left and the right columns of a tile."""
    HALF: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, HALF)), (0, 2, 1)))


@triton.jit
def store_tile(
    out, existing, tile, row, row_end, column, columns, BLOCK_M: tl.constexpr, PARTS: tl.constexpr
):
    """``_store`` in one part or two, which need less shared memory to become whole rows."""
    if PARTS == 1:
        _store(out, existing, tile, row, row_end, column, columns, BLOCK_M)
    else:
        HALF: tl.constexpr = tile.shape[1] // 2
        left, right = in_halves(tile)
        _store(out, existing, left, row, row_end, column, columns, BLOCK_M)
        _store(out, existing, right, row, row_end, column + HALF, columns, BLOCK_M)


@triton.jit
def store_rest(
    program, programs, out, existing, matrices, row_tiles, ends, across, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Tiles of 0 (plus ``existing``) in the rows of lanes without a matrix."""
    until = tl.cumsum(tl.where(matrices >= 0, 0, row_tiles), 0)
    for t in tl.range(program, tl.max(until, 0) * across, programs):
        _, first_tile, first_row, row_end = find_lane(t // across, until, ends)
        row = first_row + (t // across - first_tile) * BLOCK_M
        zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        store_tile(
            out, existing, zero, row, row_end, t % across * BLOCK_N, columns, BLOCK_M, PARTS
        )  # fmt: skip


@triton.jit
def grouped_rows(lhs, rhs, sizes, offset, existing, out, of):
    inner, columns = of.inner, of.columns
    program, programs = tl.program_id(0), tl.num_programs(0)
    starts, ends = lane_rows(sizes, of)
    matrices = matrix_of(tl.arange(0, of.LANES), offset, of)
    row_tiles = (ends - starts + of.BLOCK_M - 1) // of.BLOCK_M
    until = tl.cumsum(tl.where(matrices >= 0, row_tiles, 0), 0)
    across = (columns + of.BLOCK_N - 1) // of.BLOCK_N
    steps = (inner + of.BLOCK_K - 1) // of.BLOCK_K

    for t in tl.range(program, tl.max(until, 0) * across, programs, flatten=of.FLATTEN):
        lane, row, row_end, column = row_tile(t, until, ends, across, of)
        matrix = matrix_of(lane, offset, of)

        acc = tl.zeros([of.BLOCK_M, of.BLOCK_N], tl.float32)
        for step in tl.range(0, steps):
            k = step * of.BLOCK_K
            if of.TMA:
                a = lhs.load([row, k])
                if of.TRANSPOSED:
                    b = tl.trans(rhs.load([matrix * columns + column, k]))
                else:
                    b = rhs.load([matrix * inner + k, column])
            else:
                r = row + tl.arange(0, of.BLOCK_M)
                c = column + tl.arange(0, of.BLOCK_N)
                i = k + tl.arange(0, of.BLOCK_K)
                at = r.to(tl.int64)[:, None] * inner + i[None, :]
                base = rhs + matrix.to(tl.int64) * inner * columns
                if of.TRANSPOSED:
                    where = base + i[:, None] + c.to(tl.int64)[None, :] * inner
                else:
                    where = base + i.to(tl.int64)[:, None] * columns + c[None, :]
                inside = (r < row_end)[:, None]
                found = (c < columns)[None, :]
                if not of.EVEN_K:
                    inside = inside & (i < inner)[None, :]
                    found = found & (i < inner)[:, None]
                a = tl.load(lhs + at, mask=inside, other=0.0)
                b = tl.load(where, mask=found, other=0.0)
            acc = tl.dot(a, b, acc, input_precision=of.PRECISION)
        store_tile(out, existing, acc, row, row_end, column, columns, of.BLOCK_M, of.PARTS)

    store_rest(
        program, programs, out, existing, matrices, row_tiles, ends, across, columns, of.BLOCK_M,
        of.BLOCK_N, of.PARTS,
    )  # fmt: skip


def launch(p: Problem, t: Tiles, target: Target, offsets: int, existing: bool) -> BoundLaunch:
    """Of operands lhs, rhs, sizes, then the offset and what is added as far as they are given.

    ``offsets``: 0 without an offset, else 1 or one per batch element.
    """
    even = p.inner % t.block_k == 0
    # a tile that leaves its matrix reads the next one, times 0, which an infinite number survives
    maps = even and uses_maps(p, target)
    matrices = (1 if p.shared else p.batch) * p.held
    shape, block = (matrices * p.inner, p.columns), (t.block_k, t.block_n)
    if p.transposed:
        shape, block = (matrices * p.columns, p.inner), (t.block_n, t.block_k)
    arguments: dict[str, Any] = {
        "lhs": tensor_map(0, (p.batch * p.rows, p.inner), (t.block_m, t.block_k), maps),
        "rhs": tensor_map(1, shape, block, maps),
        **inputs({"sizes": True, "offset": offsets, "existing": existing}, first=2),
        "out": Out(0),
    }
    return launched(grouped_rows, p, t, target, arguments, offsets=offsets, maps=maps)

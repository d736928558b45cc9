"""Which group a work tile belongs to, found on the device from the sizes alone.

A *lane* is a run of rows: a group, or the rows behind the last group. Every program holds one
number per lane in its registers (its last row, its last tile); a tile's lane is then two reductions
away, with no table in memory and no kernel before this one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lane_rows(sizes, given, rows, LANES: tl.constexpr, WIDE: tl.constexpr):
    """(first row, row past the last) of every lane; clipped to ``rows``, never negative.

    Lane ``given`` takes the rows that the sizes leave. WIDE: sums of sizes need 64 bits.
    """
    lane = tl.arange(0, LANES)
    size = tl.load(sizes + lane, mask=lane < given, other=0)
    size = tl.minimum(tl.maximum(size, 0), rows)
    size = tl.where(lane == given, rows, size)
    if WIDE:
        size = size.to(tl.int64)
    ends = tl.cumsum(size, 0)
    starts = tl.minimum(ends - size, rows).to(tl.int32)
    return starts, tl.minimum(ends, rows).to(tl.int32)


@triton.jit
def matrix_of(lane, offset, batches, each, held, offset_step, held_step):
    """The matrix of a lane, -1 where it has none.

    A batch element has ``each`` lanes, of which the last is no group, and ``held`` matrices, of
    which the first is that of group ``offset[batch * offset_step]``.
    """
    batch = tl.minimum(lane // each, batches - 1)
    local = lane - batch * each
    inside = local < each - 1
    if offset is not None:
        local = local - tl.load(offset + batch * offset_step)
    inside = inside & (local >= 0) & (local < held)
    return tl.where(inside, batch * held_step + local, -1)


@triton.jit
def lane_of(matrix, offset, each, held, offset_step):
    """The lane of a matrix; -1 where no rows belong to it."""
    batch = matrix // held
    group = matrix - batch * held
    if offset is not None:
        group = group + tl.load(offset + batch * offset_step)
    return tl.where((group >= 0) & (group < each - 1), batch * each + group, -1)


@triton.jit
def find_lane(t, until, ends):
    """(lane, its first tile, first row, row past the last) of tile ``t``.

    ``until``: tiles up to and with each lane, ``ends``: rows; neither ever falls.
    """
    lane = tl.arange(0, until.shape[0])
    before = until <= t
    # both never fall, so the largest pair is that of the last lane before
    pair = (until.to(tl.int64) << 32) | ends.to(tl.int64)
    last = tl.max(tl.where(before, pair, 0), 0)
    # and the lane itself is the first of those that are not before
    pair = (ends.to(tl.int64) << 32) | lane.to(tl.int64)
    here = tl.min(tl.where(before, 0x7FFFFFFFFFFFFFFF, pair), 0)
    first_tile = (last >> 32).to(tl.int32)
    first_row = (last & 0xFFFFFFFF).to(tl.int32)
    return (here & 0xFFFFFFFF).to(tl.int32), first_tile, first_row, (here >> 32).to(tl.int32)


@triton.jit
def row_tile(
    t, until, ends, across, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr
):
    """(lane, first row, row past the lane's last, first column) of tile ``t``.

    A lane's tiles are ordered in bands of row tiles, rows first inside a band; ``across``: tiles of
    a row of tiles.
    """
    lane, first_tile, first_row, row_end = find_lane(t // across, until, ends)
    down = (row_end - first_row + BLOCK_M - 1) // BLOCK_M
    index = t - first_tile * across
    band = index // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    index = index - band * BAND * across
    row = first_row + (band * BAND + index % height) * BLOCK_M
    return lane, row, row_end, index // height * BLOCK_N


@triton.jit
def rows_of(lane, starts, ends):
    """(first row, row past the last) of a lane, (0, 0) of lane -1."""
    here = tl.arange(0, ends.shape[0]) == lane
    pair = (starts.to(tl.int64) << 32) | ends.to(tl.int64)
    pair = tl.max(tl.where(here, pair, 0), 0)
    return (pair >> 32).to(tl.int32), (pair & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def read_tile(source, row, row_end, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile by pointers, 0 outside."""
    r = row + tl.arange(0, ROWS)
    c = column + tl.arange(0, COLUMNS)
    inside = (r < row_end)[:, None] & (c < columns)[None, :]
    return tl.load(source + r.to(tl.int64)[:, None] * columns + c[None, :], inside, other=0)

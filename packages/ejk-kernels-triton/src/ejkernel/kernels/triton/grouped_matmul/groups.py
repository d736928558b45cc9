"""Which group a work tile belongs to, found on the device from the sizes alone.

A *lane* is a run of rows: a group, or the rows behind the last group. Every program holds one
number per lane in its registers (its last row, its last tile); a tile's lane is then two reductions
away, with no table in memory and no kernel before this one.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton


@triton.jit
def lane_rows(sizes, of):
    """(first row, row past the last) of every lane; clipped to ``rows``, never negative.

    Lane ``given`` takes the rows that the sizes leave. WIDE: sums of sizes need 64 bits.
    """
    lane = tl.arange(0, of.LANES)
    size = tl.load(sizes + lane, mask=lane < of.given, other=0)
    size = tl.minimum(tl.maximum(size, 0), of.rows)
    size = tl.where(lane == of.given, of.rows, size)
    if of.WIDE:
        size = size.to(tl.int64)
    ends = tl.cumsum(size, 0)
    starts = tl.minimum(ends - size, of.rows).to(tl.int32)
    return starts, tl.minimum(ends, of.rows).to(tl.int32)


@triton.jit
def matrix_of(lane, offset, of):
    """The matrix of a lane, -1 where it has none.

    A batch element has ``each`` lanes, of which the last is no group, and ``held`` matrices, of
    which the first is that of group ``offset[batch * offset_step]``.
    """
    batch = tl.minimum(lane // of.each, of.batches - 1)
    local = lane - batch * of.each
    inside = local < of.each - 1
    if offset is not None:
        local = local - tl.load(offset + batch * of.offset_step)
    inside = inside & (local >= 0) & (local < of.held)
    if of.held_step is None:
        first = batch * of.held
    else:
        first = batch * of.held_step
    return tl.where(inside, first + local, -1)


@triton.jit
def lane_of(matrix, offset, of):
    """The lane of a matrix; -1 where no rows belong to it."""
    batch = matrix // of.held
    group = matrix - batch * of.held
    if offset is not None:
        group = group + tl.load(offset + batch * of.offset_step)
    return tl.where((group >= 0) & (group < of.each - 1), batch * of.each + group, -1)


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
def row_tile(t, until, ends, across, of):
    """(lane, first row, row past the lane's last, first column) of tile ``t``.

    A lane's tiles are ordered in bands of row tiles, rows first inside a band; ``across``: tiles of
    a row of tiles.
    """
    lane, first_tile, first_row, row_end = find_lane(t // across, until, ends)
    down = (row_end - first_row + of.BLOCK_M - 1) // of.BLOCK_M
    index = t - first_tile * across
    band = index // (of.BAND * across)
    height = tl.minimum(down - band * of.BAND, of.BAND)
    index = index - band * of.BAND * across
    row = first_row + (band * of.BAND + index % height) * of.BLOCK_M
    return lane, row, row_end, index // height * of.BLOCK_N


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

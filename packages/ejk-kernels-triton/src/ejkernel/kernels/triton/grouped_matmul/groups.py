"""The group of a work tile, found on the device from the group sizes alone.

A *lane* is a range of rows: a group, or the rows after the last group. Every program holds one
value per lane in its registers (its last row, its last tile); finding a tile's lane takes two
reductions, with no table in memory and no kernel before this one.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton


@triton.jit
def lane_rows(group_sizes, params):
    """Returns the first row and the row past the last of every lane, clipped to ``rows``.

    Lane ``size_count`` has the remaining rows. WIDE: prefix sums of sizes need 64 bits.
    """
    lane = tl.arange(0, params.LANES)
    size = tl.load(group_sizes + lane, mask=lane < params.size_count, other=0)
    size = tl.minimum(tl.maximum(size, 0), params.rows)
    size = tl.where(lane == params.size_count, params.rows, size)
    if params.WIDE:
        size = size.to(tl.int64)
    ends = tl.cumsum(size, 0)
    starts = tl.minimum(ends - size, params.rows).to(tl.int32)
    return starts, tl.minimum(ends, params.rows).to(tl.int32)


@triton.jit
def find_matrix(lane, offset, params):
    """Returns the matrix of a lane, -1 where it has none.

    A call has ``lanes_per_call`` lanes, of which the last is no group, and ``matrices`` matrices,
    of which the first belongs to group ``offset[batch * offset_stride]``.
    """
    batch = tl.minimum(lane // params.lanes_per_call, params.batches - 1)
    local = lane - batch * params.lanes_per_call
    inside = local < params.lanes_per_call - 1
    if offset is not None:
        local = local - tl.load(offset + batch * params.offset_stride)
    inside = inside & (local >= 0) & (local < params.matrices)
    if params.matrix_stride is None:
        first = batch * params.matrices
    else:
        first = batch * params.matrix_stride
    return tl.where(inside, first + local, -1)


@triton.jit
def matrix_lane(matrix, offset, params):
    """Returns the lane of a matrix; -1 where no rows belong to it."""
    batch = matrix // params.matrices
    group = matrix - batch * params.matrices
    if offset is not None:
        group = group + tl.load(offset + batch * params.offset_stride)
    return tl.where(
        (group >= 0) & (group < params.lanes_per_call - 1),
        batch * params.lanes_per_call + group,
        -1,
    )


@triton.jit
def find_lane(t, until, ends):
    """Returns the lane of tile ``t``, its first tile, its first row and the row past its last.

    ``until``, ``ends``: tiles and rows up to the end of each lane; both are sorted.
    """
    lane = tl.arange(0, until.shape[0])
    before = until <= t
    # both are sorted, so the largest pair belongs to the last lane before
    pair = (until.to(tl.int64) << 32) | ends.to(tl.int64)
    last = tl.max(tl.where(before, pair, 0), 0)
    # and the lane itself is the first one that is not before
    pair = (ends.to(tl.int64) << 32) | lane.to(tl.int64)
    packed = tl.min(tl.where(before, 0x7FFFFFFFFFFFFFFF, pair), 0)
    first_tile = (last >> 32).to(tl.int32)
    first_row = (last & 0xFFFFFFFF).to(tl.int32)
    return (packed & 0xFFFFFFFF).to(tl.int32), first_tile, first_row, (packed >> 32).to(tl.int32)


@triton.jit
def find_row_tile(t, until, ends, across, params):
    """Returns tile ``t``'s lane, first row, the row past the lane's last, and first column.

    A lane's tiles are ordered in bands of row tiles, rows first inside a band; ``across``: tiles in
    a row of tiles.
    """
    lane, first_tile, first_row, row_end = find_lane(t // across, until, ends)
    down = (row_end - first_row + params.BLOCK_M - 1) // params.BLOCK_M
    index = t - first_tile * across
    band = index // (params.BAND * across)
    height = tl.minimum(down - band * params.BAND, params.BAND)
    index = index - band * params.BAND * across
    row = first_row + (band * params.BAND + index % height) * params.BLOCK_M
    return lane, row, row_end, index // height * params.BLOCK_N


@triton.jit
def lane_range(lane, starts, ends):
    """Returns the first row and the row past the last of a lane, 0 and 0 of lane -1."""
    is_lane = tl.arange(0, ends.shape[0]) == lane
    pair = (starts.to(tl.int64) << 32) | ends.to(tl.int64)
    pair = tl.max(tl.where(is_lane, pair, 0), 0)
    return (pair >> 32).to(tl.int32), (pair & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def load_tile(source, row, row_end, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads a tile by pointers, 0 outside."""
    r = row + tl.arange(0, ROWS)
    c = column + tl.arange(0, COLUMNS)
    inside = (r < row_end)[:, None] & (c < columns)[None, :]
    return tl.load(source + r.to(tl.int64)[:, None] * columns + c[None, :], inside, other=0)

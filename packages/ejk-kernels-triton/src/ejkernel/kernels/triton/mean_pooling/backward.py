"""The gradient of means of groups: every row gets its group's, divided by the group's number.

    dx[row] = dout[group of row] / rows of the group that count;  0 for rows that count nowhere

Work split: a program writes BLOCK rows of some channels. Where all of them belong to one group
(chunks of a multiple of BLOCK rows, or whole sequences) it reads one row; else a row each, which
come from the first-level cache but once.

Bound: dx is written once, dout is read once: memory, as in ``forward``.
"""

from __future__ import annotations

from ejkernel.kernels.triton.bound_launch import BoundLaunch, Out
from ejkernel.kernels.triton.common.pieces import lane_count, piece_count
from ejkernel.kernels.triton.common.sequences import find_piece
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.mean_pooling.tiles import BYTES, Problem, Tiles
from ejkernel.kernels.triton.plan import bound, inputs


@triton.jit
def spread(
    dout,
    count,
    kept,
    cu,
    dx,
    rows,
    channels,
    chunk,
    sequences,
    per_sequence,
    units,
    ONE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
    STREAMED: tl.constexpr,
):
    """STREAMED: dx is more than the cache holds. ONE: the rows of a program are of one group."""
    across = (channels + CHANNELS - 1) // CHANNELS
    program = tl.program_id(0)
    block = program % across
    unit = program // across
    batch = (unit // units).to(tl.int64)
    unit = unit % units
    sequence = 0
    start = 0
    end = rows
    tile = unit * BLOCK
    groups = per_sequence
    if cu is not None:
        cu += batch * (sequences + 1)
        sequence, start, end, tile = find_piece(cu, sequences, rows, unit, BLOCK, LANES)
        groups = sequences * per_sequence
    # rows behind the last sequence have no group
    used = end
    width = channels
    if cu is not None:
        used = tl.where(sequence < sequences, end, start)
        width = tl.where(sequence < sequences, channels, 0)

    row = tile + tl.arange(0, BLOCK)
    inside = (row >= start) & (row < end)
    counts = (row >= start) & (row < used)
    column = block * CHANNELS + tl.arange(0, CHANNELS)
    if ONE:
        within = (tl.maximum(tile, start) - start) // chunk
        number = tl.minimum(end - start - within * chunk, chunk).to(tl.float32)
        group = batch * groups + sequence * per_sequence + within
        if count is not None:
            number = tl.load(count + tl.where(used > start, group, 0))
        one = tl.load(dout + group * channels + column, mask=column < width, other=0.0)
        one = one.to(tl.float32) / tl.maximum(number, 1.0)
        value = tl.broadcast_to(one[None, :], (BLOCK, CHANNELS))
    else:
        within = (row - start) // chunk
        number = tl.minimum(end - start - within * chunk, chunk).to(tl.float32)
        group = batch * groups + sequence * per_sequence + within
        if count is not None:
            number = tl.load(count + group, mask=counts, other=1.0)
        seen = counts[:, None] & (column < channels)[None, :]
        value = tl.load(dout + group[:, None] * channels + column[None, :], mask=seen, other=0.0)
        value = value.to(tl.float32) / tl.maximum(number, 1.0)[:, None]
    if kept is not None:
        chosen = tl.load(kept + batch * rows + row, mask=inside, other=0) != 0
        value = tl.where(chosen[:, None], value, 0.0)
    pointers = dx + (batch * rows + row)[:, None] * channels + column[None, :]
    written = inside[:, None] & (column < channels)[None, :]
    through: tl.constexpr = ".cs" if STREAMED else ""
    tl.store(pointers, value.to(dx.dtype.element_ty), mask=written, cache_modifier=through)


def launch(p: Problem, t: Tiles) -> BoundLaunch:
    """Of operands dout, then count and what is kept together, and cu, as far as they are given."""
    block = max(16, min(64, t.rows))
    one = p.per_sequence == 1 or (not p.sequences and p.chunk % block == 0)
    block = block if one else 16  # a row of its own for every row takes registers
    # a warp writes 512 B of a row
    channels = min(max(t.channels, 512 // BYTES[p.dtype]), max(16, power_of_two(p.channels)))
    if p.sequences:
        units = piece_count(p.rows, p.sequences, block)
    else:
        units = -(-p.rows // block)
    given = {"dout": True, "count": p.masked, "kept": p.masked, "cu": p.sequences > 0}
    arguments = {
        **inputs(given),
        "dx": Out(0),
        "units": units,
        "ONE": one,
        "BLOCK": block,
        "CHANNELS": channels,
        "LANES": lane_count(p.sequences),
    }
    grid = (p.batch * units * -(-p.channels // channels),)
    return bound(spread, arguments, grid, t.num_warps, 1, known=p.kernel_params)

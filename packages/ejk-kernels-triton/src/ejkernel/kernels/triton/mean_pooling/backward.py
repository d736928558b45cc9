"""The gradient of the means of groups: every row gets its group's, divided by the row count.

    dx[row] = dout[group of row] / unmasked rows of the group;  0 for masked rows

Work split: a program writes BLOCK rows of some channels. Where all of them belong to one group
(chunks of a multiple of BLOCK rows, or full sequences) it reads one row; otherwise one row for each
row it writes, which hit the first-level cache after the first read.

Bound: dx is written once, dout is read once: memory, as in ``forward``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.common.sequences import find_piece, lane_count, piece_count
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, Launch, power_of_two, struct
from ejkernel.kernels.triton.mean_pooling.tiles import Tiles, exceeds_cache, sizes_of
from ejkernel.types.problems.mean_pooling import PoolingProblem


@triton.jit
def pool_backward(
    dout, count, row_mask, cu, dx, sizes, per_sequence, units,
    SINGLE_GROUP: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
    LANES: tl.constexpr, EVICT_FIRST: tl.constexpr,
):  # fmt: skip
    """Writes dx of BLOCK rows and CHANNELS channels.

    SINGLE_GROUP: all rows of a program belong to one group. EVICT_FIRST: dx is larger than the
    cache.
    """
    rows, channels, chunk, sequences = sizes.rows, sizes.channels, sizes.chunk, sizes.sequences
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
    # rows after the last sequence have no group
    used = end
    width = channels
    if cu is not None:
        used = tl.where(sequence < sequences, end, start)
        width = tl.where(sequence < sequences, channels, 0)

    row = tile + tl.arange(0, BLOCK)
    inside = (row >= start) & (row < end)
    counts = (row >= start) & (row < used)
    column = block * CHANNELS + tl.arange(0, CHANNELS)
    if SINGLE_GROUP:
        within = (tl.maximum(tile, start) - start) // chunk
        number = tl.minimum(end - start - within * chunk, chunk).to(tl.float32)
        group = batch * groups + sequence * per_sequence + within
        if count is not None:
            number = tl.load(count + tl.where(used > start, group, 0))
        dmean = tl.load(dout + group * channels + column, mask=column < width, other=0.0)
        dmean = dmean.to(tl.float32) / tl.maximum(number, 1.0)
        value = tl.broadcast_to(dmean[None, :], (BLOCK, CHANNELS))
    else:
        within = (row - start) // chunk
        number = tl.minimum(end - start - within * chunk, chunk).to(tl.float32)
        group = batch * groups + sequence * per_sequence + within
        if count is not None:
            number = tl.load(count + group, mask=counts, other=1.0)
        loaded = counts[:, None] & (column < channels)[None, :]
        value = tl.load(dout + group[:, None] * channels + column[None, :], mask=loaded, other=0.0)
        value = value.to(tl.float32) / tl.maximum(number, 1.0)[:, None]
    if row_mask is not None:
        unmasked = tl.load(row_mask + batch * rows + row, mask=inside, other=0) != 0
        value = tl.where(unmasked[:, None], value, 0.0)
    pointers = dx + (batch * rows + row)[:, None] * channels + column[None, :]
    written = inside[:, None] & (column < channels)[None, :]
    modifier: tl.constexpr = ".cs" if EVICT_FIRST else ""
    tl.store(pointers, value.to(dx.dtype.element_ty), mask=written, cache_modifier=modifier)


@dataclass(frozen=True)
class PoolBackward(Launch):
    """Launch of ``pool_backward``; ``count`` and ``row_mask`` are given together."""

    kernel = pool_backward
    batching: ClassVar = {"dout": BATCHED, "count": BATCHED, "row_mask": BATCHED, "cu": BATCHED}

    problem: PoolingProblem
    tiles: Tiles

    @property
    def block(self) -> tuple[int, int]:
        """Rows and channels of a program."""
        p, t = self.problem, self.tiles
        # a warp writes 512 B of a row
        channels = max(t.channels, 512 // p.itemsize)
        # rows of several groups have an address each, which takes registers
        rows = max(16, min(64, t.rows)) if self.single_group else 16
        return rows, min(channels, max(16, power_of_two(p.channels)))

    @property
    def single_group(self) -> bool:
        """True where all rows of a program belong to one group."""
        p = self.problem
        divides = not p.sequences and p.chunk % max(16, min(64, self.tiles.rows)) == 0
        return p.per_sequence == 1 or divides

    @property
    def units(self) -> int:
        """Programs of a call for each block of channels."""
        p, (rows, _) = self.problem, self.block
        return piece_count(p.rows, p.sequences, rows) if p.sequences else -(-p.rows // rows)

    def outputs(self):
        p = self.problem
        return {"dx": struct(p.dtype, p.batch, p.rows, p.channels)}

    def grid(self, target):
        p = self.problem
        return (p.batch * self.units * -(-p.channels // self.block[1]),)

    def arguments(self, target):
        p, (rows, channels) = self.problem, self.block
        return {
            "sizes": sizes_of(p),
            "per_sequence": p.per_sequence,
            "units": self.units,
            "SINGLE_GROUP": self.single_group,
            "BLOCK": rows,
            "CHANNELS": channels,
            "LANES": lane_count(p.sequences),
            "EVICT_FIRST": exceeds_cache(p),
        }

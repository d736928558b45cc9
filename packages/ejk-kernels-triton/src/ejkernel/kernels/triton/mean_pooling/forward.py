"""Means of groups of consecutive rows.

    out[group] = mean of x[row] over the group's unmasked rows, accumulated in float32

Work split: a program has some channels of one group, or of several small ones; a step reads 64 rows
of 256 bytes, or 32 of 512, which is enough in flight that four programs a multiprocessor keep the
memory busy.
Where that leaves multiprocessors idle (few groups, or packed sequences of any length), a program
accumulates a *split* of a group in float32, and a second launch adds the splits in order: two calls
give the same bits. Splits of packed sequences are the pieces of ``common.sequences``.

Bound: x is read once, the means are written once: memory. 8 x 8192 rows of 2048 channels in
bfloat16, chunks of 64: 268 MB + 4 MB = 0.063 ms on an H200 (copies 4.3 TB/s); measured
0.064 ms, the gradient 0.066 ms (0.067 and 0.069 ms without the hints that x and its gradient, if
larger than the cache, are not to be kept there). Splits write and read their float32 partial
results, 2 / split of the bytes of x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ejkernel.kernels.triton.common.sequences import (
    find_piece,
    lane_count,
    pieces_of,
    sequence_start,
)
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, Launch, struct
from ejkernel.kernels.triton.mean_pooling.tiles import Tiles, exceeds_cache, sizes_of
from ejkernel.types.problems.mean_pooling import PoolingProblem


class Tile(NamedTuple):
    """Tile that a program of ``pool_groups`` loads at once: ROWS rows of each of GROUPS groups.

    SPLIT: rows of a group that a program accumulates, 0 = all. SINGLE_STEP: no group has more than
    ROWS rows. IS_DIVISIBLE: tiles need no bounds and no mask. EVICT_FIRST: x is larger than the
    cache.
    """

    GROUPS: int
    ROWS: int
    CHANNELS: int
    SPLIT: int
    SINGLE_STEP: bool
    IS_DIVISIBLE: bool
    EVICT_FIRST: bool


@triton.jit
def load_groups(base, row_mask, at, length, groups_left, end, sizes, column, tile):
    """Loads ROWS rows of every group of a program, starting at row ``at`` of each group.

    Returns the rows ``[GROUPS, ROWS, CHANNELS]`` in float32 and 1.0 for each that counts.
    ``groups_left`` and ``end``: groups and rows of the sequence after the program's first.
    """
    group = tl.arange(0, tile.GROUPS)[:, None]
    offset = tl.arange(0, tile.ROWS)[None, :]
    n = tl.arange(0, tile.CHANNELS)[None, None, :]
    row = group * sizes.chunk + offset
    # only the first address has 64 bits
    base += tl.cast(at, tl.int64) * sizes.channels + column
    pointers = base + (row[:, :, None] * sizes.channels + n)
    eviction: tl.constexpr = "evict_first" if tile.EVICT_FIRST else ""
    if tile.IS_DIVISIBLE:
        inside = row >= 0
        loaded = tl.load(pointers, eviction_policy=eviction)
    else:
        inside = (at + offset < length) & (group < groups_left) & (row < end - at)
        if row_mask is not None:
            inside = inside & (tl.load(row_mask + at + row, mask=inside, other=0) != 0)
        in_tile = inside[:, :, None] & (n < sizes.channels - column)
        loaded = tl.load(pointers, mask=in_tile, other=0.0, eviction_policy=eviction)
    return loaded.to(tl.float32), inside.to(tl.float32)


@triton.jit
def pool_groups(
    x, row_mask, cu, out, count, sizes, per_sequence, units, splits, tile, LANES: tl.constexpr
):
    """Writes means of groups, or partial results of splits.

    ``units``: programs of a call for each block of channels; ``splits`` of each group.
    """
    GROUPS: tl.constexpr = tile.GROUPS
    ROWS: tl.constexpr = tile.ROWS
    CHANNELS: tl.constexpr = tile.CHANNELS
    SPLIT: tl.constexpr = tile.SPLIT
    rows, channels, chunk, sequences = sizes.rows, sizes.channels, sizes.chunk, sizes.sequences
    across = (channels + CHANNELS - 1) // CHANNELS
    program = tl.program_id(0)
    block = program % across
    unit = program // across
    batch = (unit // units).to(tl.int64)
    unit = unit % units
    if cu is not None:
        cu += batch * (sequences + 1)

    # rows [start + first * chunk, end) of the sequence; group i begins chunk * i rows later
    if SPLIT and cu is not None:
        sequence, start, end, top = find_piece(cu, sequences, rows, unit, SPLIT, LANES)
        end = tl.minimum(tl.where(sequence < sequences, end, start), top + SPLIT)
        start = tl.maximum(start, top)
        first = 0
        length = tl.maximum(end - start, 0)
        slot = unit
    elif SPLIT:
        first = 0
        start = unit // splits * chunk + unit % splits * SPLIT
        end = tl.minimum(tl.minimum(start + SPLIT, (unit // splits + 1) * chunk), rows)
        length = tl.maximum(end - start, 0)
        slot = unit
    else:
        blocks = (per_sequence + GROUPS - 1) // GROUPS
        sequence = unit // blocks
        first = unit % blocks * GROUPS
        start = 0
        end = rows
        if cu is not None:
            start = sequence_start(cu, sequence, sequences, rows)
            end = sequence_start(cu, sequence + 1, sequences, rows)
        length = tl.where(start + first * chunk < end, chunk, 0)
        slot = sequence * per_sequence + first

    group = tl.arange(0, GROUPS)
    column = block * CHANNELS + tl.arange(0, CHANNELS)
    top = start + first * chunk
    base = x + (batch * rows + top) * channels
    if row_mask is not None:
        row_mask += batch * rows + top
    groups_left = per_sequence - first
    if tile.SINGLE_STEP:
        total, number = load_groups(
            base, row_mask, 0, length, groups_left, end - top, sizes, block * CHANNELS, tile
        )
    else:
        total = tl.zeros([GROUPS, ROWS, CHANNELS], tl.float32)
        number = tl.zeros([GROUPS, ROWS], tl.float32)
        for at in range(0, length, ROWS):
            values, counts = load_groups(
                base, row_mask, at, length, groups_left, end - top, sizes, block * CHANNELS, tile
            )
            total += values
            number += counts
    total = tl.sum(total, 1)
    if row_mask is not None:
        number = tl.sum(number, 1)
    else:
        past = end - start - (first + group) * chunk
        number = tl.maximum(tl.minimum(past, length), 0).to(tl.float32)
    if not SPLIT:
        total = total / tl.maximum(number, 1.0)[:, None]

    slots = units
    written = group >= 0
    if not SPLIT:
        slots = units // ((per_sequence + GROUPS - 1) // GROUPS) * per_sequence
        written = first + group < per_sequence
    slot = batch * slots + slot + group
    pointers = out + slot[:, None] * channels + column[None, :]
    inside = written[:, None] & (column < channels)[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=inside)
    if count is not None:
        if block == 0:
            tl.store(count + slot, number, mask=written)


@dataclass(frozen=True)
class PoolGroups(Launch):
    """Launch of ``pool_groups``: means and their row counts, or partial results of splits."""

    kernel = pool_groups
    batching: ClassVar = {"x": BATCHED, "row_mask": BATCHED, "cu": BATCHED}

    problem: PoolingProblem
    tiles: Tiles

    def outputs(self):
        p, split = self.problem, self.tiles.split
        rows = p.batch * (self.tiles.programs(p)[0] if split else p.groups)
        return {
            "out": struct("float32" if split else p.dtype, rows, p.channels),
            "count": struct("float32", rows) if p.masked else None,
        }

    def grid(self, target):
        p, t = self.problem, self.tiles
        return (p.batch * t.programs(p)[0] * -(-p.channels // t.channels),)

    def arguments(self, target):
        p, t = self.problem, self.tiles
        (units, splits), (groups, rows) = t.programs(p), t.shape(p)
        unmasked = not (p.sequences or p.masked or t.split)
        divides = p.rows % p.chunk == p.chunk % rows == p.per_sequence % groups == 0
        return {
            "sizes": sizes_of(p),
            "per_sequence": p.per_sequence,
            "units": units,
            "splits": splits,
            "tile": Tile(
                groups, rows, t.channels, t.split,
                SINGLE_STEP=p.chunk <= rows and not t.split,
                IS_DIVISIBLE=unmasked and divides and p.channels % t.channels == 0,
                EVICT_FIRST=exceeds_cache(p),
            ),
            "LANES": lane_count(p.sequences),
        }  # fmt: skip


@triton.jit
def merge_splits(
    partial, partial_count, cu, out, count, sizes, groups, slots, splits,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Writes the mean of one group a program, whose splits are consecutive."""
    rows, channels, chunk, sequences = sizes.rows, sizes.channels, sizes.chunk, sizes.sequences
    across = (channels + CHANNELS - 1) // CHANNELS
    program = tl.program_id(0)
    block = program % across
    batch = (program // across // groups).to(tl.int64)
    group = program // across % groups
    if cu is not None:
        cu += batch * (sequences + 1)
        begin, end, length = pieces_of(cu, group, sequences, rows, SPLIT)
    else:
        begin = group * splits
        end = begin + splits
        length = tl.minimum(rows - group * chunk, chunk)

    column = block * CHANNELS + tl.arange(0, CHANNELS)
    offset = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    number = tl.zeros([ROWS], tl.float32)
    for at in range(begin, end, ROWS):
        inside = at + offset < end
        slot = batch * slots + at + offset
        loaded = inside[:, None] & (column < channels)[None, :]
        pointers = partial + slot[:, None] * channels + column[None, :]
        total += tl.load(pointers, mask=loaded, other=0.0)
        if partial_count is not None:
            number += tl.load(partial_count + slot, mask=inside, other=0.0)
    total = tl.sum(total, 0)
    row_count = length.to(tl.float32)
    if partial_count is not None:
        row_count = tl.sum(number, 0)
        if block == 0:
            tl.store(count + batch * groups + group, row_count)
    mean = total / tl.maximum(row_count, 1.0)
    at = (batch * groups + group) * channels + column
    tl.store(out + at, mean.to(out.dtype.element_ty), mask=column < channels)


@dataclass(frozen=True)
class MergeSplits(Launch):
    """Launch of ``merge_splits`` on the results of ``PoolGroups``."""

    kernel = merge_splits
    batching: ClassVar = {"partial": BATCHED, "partial_count": BATCHED, "cu": BATCHED}

    problem: PoolingProblem
    tiles: Tiles

    @property
    def channels(self) -> int:
        """Channels of a program: few, as there are few splits and so few programs."""
        return min(64, self.tiles.channels)

    def outputs(self):
        p = self.problem
        rows = p.batch * p.groups
        return {
            "out": struct(p.dtype, rows, p.channels),
            "count": struct("float32", rows) if p.masked else None,
        }

    def grid(self, target):
        p = self.problem
        return (p.batch * p.groups * -(-p.channels // self.channels),)

    def options(self, target):
        return {"num_warps": 4, "num_stages": 1}

    def arguments(self, target):
        slots, splits = self.tiles.programs(self.problem)
        return {
            "sizes": sizes_of(self.problem),
            "groups": self.problem.groups,
            "slots": slots,
            "splits": splits,
            "ROWS": 32,
            "CHANNELS": self.channels,
            "SPLIT": self.tiles.split,
        }

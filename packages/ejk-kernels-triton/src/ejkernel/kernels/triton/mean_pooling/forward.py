"""Means of groups of consecutive rows.

    out[group] = sum of x[row] over the group's rows that count / their number, summed in float32

Work split: a program has some channels of one group, or of several small ones; a step reads 64 rows
of 256 bytes, or 32 of 512, which is enough in flight that four programs a multiprocessor keep the
memory busy.
Where that leaves multiprocessors idle (few groups, or packed sequences of any length), a program
sums a *part* of a group into float32, and a second launch adds the parts in order: two runs give
the same bits. Parts of packed sequences are the pieces of ``common.sequences``.

Bound: x is read once, the means are written once: memory. 8 x 8192 rows of 2048 channels in
bfloat16, chunks of 64: 268 MB + 4 MB = 0.063 ms on an H200 (copies 4.3 TB/s); measured
0.064 ms, the gradient 0.066 ms (0.067 and 0.069 ms without the hints that x and its gradient, if
larger than the cache, are not to be kept there). Parts add their float32 sums twice, 2 / part of x.
"""

from __future__ import annotations

from ejkernel.kernels.triton.bound_launch import BoundLaunch
from ejkernel.kernels.triton.common.pieces import lane_count
from ejkernel.kernels.triton.common.sequences import find_piece, pieces_of, sequence_start
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.mean_pooling.tiles import Problem, Tiles
from ejkernel.kernels.triton.plan import bound, inputs, results


@triton.jit
def load_groups(
    base,
    kept,
    at,
    length,
    left,
    end,
    chunk,
    channels,
    column,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EVEN: tl.constexpr,
    STREAMED: tl.constexpr,
):
    """(rows ``at`` and on of every group [GROUPS, ROWS, CHANNELS] in float32, whether they count).
    ``left``, ``end``: groups of the sequence, and rows, from the first ones here on."""
    group = tl.arange(0, GROUPS)[:, None]
    each = tl.arange(0, ROWS)[None, :]
    n = tl.arange(0, CHANNELS)[None, None, :]
    row = group * chunk + each
    # only the first address has 64 bits
    base += tl.cast(at, tl.int64) * channels + column
    pointers = base + (row[:, :, None] * channels + n)
    first: tl.constexpr = "evict_first" if STREAMED else ""
    if EVEN:
        inside = row >= 0
        tile = tl.load(pointers, eviction_policy=first)
    else:
        inside = (at + each < length) & (group < left) & (row < end - at)
        if kept is not None:
            inside = inside & (tl.load(kept + at + row, mask=inside, other=0) != 0)
        seen = inside[:, :, None] & (n < channels - column)
        tile = tl.load(pointers, mask=seen, other=0.0, eviction_policy=first)
    return tile.to(tl.float32), inside.to(tl.float32)


@triton.jit
def sums_of_groups(
    x,
    kept,
    cu,
    out,
    count,
    rows,
    channels,
    chunk,
    sequences,
    per_sequence,
    units,
    parts,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PART: tl.constexpr,
    LANES: tl.constexpr,
    ONCE: tl.constexpr,
    EVEN: tl.constexpr,
    STREAMED: tl.constexpr,
):
    """Means, or with PART sums of parts; ``units``: programs of a call for each block of channels,
    ``parts`` of each group. ONCE: a group has no more than ROWS rows. EVEN: groups, rows and
    channels are whole, and all count. STREAMED: x is more than the cache holds."""
    across = (channels + CHANNELS - 1) // CHANNELS
    program = tl.program_id(0)
    block = program % across
    unit = program // across
    batch = (unit // units).to(tl.int64)
    unit = unit % units
    if cu is not None:
        cu += batch * (sequences + 1)

    # rows [start + first * chunk, end) of the sequence; group i of the program begins chunk * i on
    if PART and cu is not None:
        sequence, start, end, tile = find_piece(cu, sequences, rows, unit, PART, LANES)
        end = tl.minimum(tl.where(sequence < sequences, end, start), tile + PART)
        start = tl.maximum(start, tile)
        first = 0
        length = tl.maximum(end - start, 0)
        slot = unit
    elif PART:
        first = 0
        start = unit // parts * chunk + unit % parts * PART
        end = tl.minimum(tl.minimum(start + PART, (unit // parts + 1) * chunk), rows)
        length = tl.maximum(end - start, 0)
        slot = unit
    else:
        spans = (per_sequence + GROUPS - 1) // GROUPS
        sequence = unit // spans
        first = unit % spans * GROUPS
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
    if kept is not None:
        kept += batch * rows + top
    left = per_sequence - first
    if ONCE:
        total, number = load_groups(
            base, kept, 0, length, left, end - top, chunk, channels, block * CHANNELS, GROUPS,
            ROWS, CHANNELS, EVEN, STREAMED,
        )  # fmt: skip
    else:
        total = tl.zeros([GROUPS, ROWS, CHANNELS], tl.float32)
        number = tl.zeros([GROUPS, ROWS], tl.float32)
        for at in range(0, length, ROWS):
            values, counts = load_groups(
                base, kept, at, length, left, end - top, chunk, channels, block * CHANNELS,
                GROUPS, ROWS, CHANNELS, EVEN, STREAMED,
            )  # fmt: skip
            total += values
            number += counts
    total = tl.sum(total, 1)
    if kept is not None:
        number = tl.sum(number, 1)
    else:
        past = end - start - (first + group) * chunk
        number = tl.maximum(tl.minimum(past, length), 0).to(tl.float32)
    if not PART:
        total = total / tl.maximum(number, 1.0)[:, None]

    slots = units
    written = group >= 0
    if not PART:
        slots = units // ((per_sequence + GROUPS - 1) // GROUPS) * per_sequence
        written = first + group < per_sequence
    slot = batch * slots + slot + group
    pointers = out + slot[:, None] * channels + column[None, :]
    inside = written[:, None] & (column < channels)[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=inside)
    if count is not None:
        if block == 0:
            tl.store(count + slot, number, mask=written)


@triton.jit
def means_of_parts(
    sums,
    counts,
    cu,
    out,
    count,
    rows,
    channels,
    chunk,
    sequences,
    groups,
    slots,
    parts,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PART: tl.constexpr,
):
    """One group a program: its parts are consecutive."""
    across = (channels + CHANNELS - 1) // CHANNELS
    program = tl.program_id(0)
    block = program % across
    batch = (program // across // groups).to(tl.int64)
    group = program // across % groups
    if cu is not None:
        cu += batch * (sequences + 1)
        begin, end, length = pieces_of(cu, group, sequences, rows, PART)
    else:
        begin = group * parts
        end = begin + parts
        length = tl.minimum(rows - group * chunk, chunk)

    column = block * CHANNELS + tl.arange(0, CHANNELS)
    each = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    number = tl.zeros([ROWS], tl.float32)
    for at in range(begin, end, ROWS):
        inside = at + each < end
        slot = batch * slots + at + each
        seen = inside[:, None] & (column < channels)[None, :]
        total += tl.load(sums + slot[:, None] * channels + column[None, :], mask=seen, other=0.0)
        if counts is not None:
            number += tl.load(counts + slot, mask=inside, other=0.0)
    total = tl.sum(total, 0)
    share = length.to(tl.float32)
    if counts is not None:
        share = tl.sum(number, 0)
        if block == 0:
            tl.store(count + batch * groups + group, share)
    mean = total / tl.maximum(share, 1.0)
    at = (batch * groups + group) * channels + column
    tl.store(out + at, mean.to(out.dtype.element_ty), mask=column < channels)


def launch(p: Problem, t: Tiles) -> BoundLaunch:
    """Of operands x, then what is kept and cu as far as they are given."""
    units, parts = t.split(p)
    groups, each = t.shape(p)
    arguments = {
        **inputs({"x": True, "kept": p.masked, "cu": p.sequences > 0}),
        **results({"out": True, "count": p.masked}),
        "units": units,
        "parts": parts,
        "GROUPS": groups,
        "ROWS": each,
        "CHANNELS": t.channels,
        "PART": t.part,
        "LANES": lane_count(p.sequences),
        "ONCE": p.chunk <= each and not t.part,
        "EVEN": not (p.sequences or p.masked or t.part)
        and p.rows % p.chunk == p.chunk % each == p.per_sequence % groups == 0
        and p.channels % t.channels == 0,
    }
    grid = (p.batch * units * -(-p.channels // t.channels),)
    return bound(sums_of_groups, arguments, grid, t.num_warps, 1, known=p.kernel_params)


def merge_launch(p: Problem, t: Tiles) -> BoundLaunch:
    """Of operands sums, then counts and cu as far as they are given."""
    slots, parts = t.split(p)
    channels = min(64, t.channels)  # parts are few: more programs rather than whole lines
    arguments = {
        **inputs({"sums": True, "counts": p.masked, "cu": p.sequences > 0}),
        **results({"out": True, "count": p.masked}),
        "slots": slots,
        "parts": parts,
        "ROWS": 32,
        "CHANNELS": channels,
        "PART": t.part or 1,
    }
    grid = (p.batch * p.groups * -(-p.channels // channels),)
    return bound(means_of_parts, arguments, grid, 4, 1, known=p.kernel_params)

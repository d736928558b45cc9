"""The lists of blocks that a sparse walk visits.

For each block of one axis the blocks of the other that it meets: first those that need no element
mask, then the others, each in rising order.

Work split: one program per (row of patterns, block); it reads its row of states twice. Bound: the
bytes of the states and of the lists, a few for each pair of blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from ejkernel.kernels.triton.common.structure import band_blocks


@triton.jit
def block_lists(
    state,
    listed,
    counts,
    blocks,
    others,
    length,
    other_length,
    block_stride,
    other_stride,
    lo,
    hi,
    BLOCK: tl.constexpr,
    OTHER: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """``state``: 0 nobody sees the pair of blocks, 1 some may, 2 all do, the band apart.

    Writes rows of ``listed`` ``[rows, others + 3]``: how many blocks need no element mask, how many
    there are, then the blocks; what is left of a row is not written. ``counts`` ``[rows]`` has how
    many there are once more, side by side.
    """
    row = tl.program_id(0)
    block = row % blocks
    states = state + (row // blocks).to(tl.int64) * blocks * others + block * block_stride
    list_row = listed + row.to(tl.int64) * (others + 3)
    first = block * BLOCK
    last = tl.minimum(first + BLOCK, length) - 1
    start, full_start, full_stop, stop = band_blocks(first, last, other_length, lo, hi, OTHER)
    count = 0
    for phase in tl.static_range(0, 2):
        for n0 in range(0, others, CHUNK):
            n = n0 + tl.arange(0, CHUNK)
            known = tl.load(states + n * other_stride, mask=n < others, other=0)
            full = (known == 2) & (n >= full_start) & (n < full_stop)
            if phase == 0:
                chosen = full
            else:
                chosen = (known > 0) & (n >= start) & (n < stop) & ~full
            place = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(list_row + 2 + place, n, mask=chosen)
            count += tl.sum(chosen.to(tl.int32), 0)
        tl.store(list_row + phase, count)
    tl.store(counts + row, count)


@triton.jit
def long_rows_first(
    counts,
    order,
    blocks,
    heads,
    list_rows,
    head_step,
    LAST_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The programs of a batch row, those of more than twice the mean number of visits first.

    A program's number is head * blocks + block. Apart from the long ones heads follow each other,
    for the cache's sake, each with its blocks in rising order, or falling with LAST_FIRST.
    """
    row = tl.program_id(0)
    counts += row.to(tl.int64) * list_rows
    programs = heads * blocks
    total = 0
    for p0 in range(0, programs, CHUNK):
        number, steps, inside = _program_steps(
            counts, p0, programs, blocks, head_step, LAST_FIRST, GROUP, CHUNK
        )
        total += tl.sum(steps, 0)
    limit = 2 * (total // programs) + 1
    placed = 0
    for phase in tl.static_range(0, 2):
        for p0 in range(0, programs, CHUNK):
            number, steps, inside = _program_steps(
                counts, p0, programs, blocks, head_step, LAST_FIRST, GROUP, CHUNK
            )
            chosen = inside & ((steps > limit) == (phase == 0))
            place = placed + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(order + row.to(tl.int64) * programs + place, number, mask=chosen)
            placed += tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def _program_steps(
    counts,
    p0,
    programs,
    blocks,
    head_step,
    LAST_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Numbers of CHUNK programs, their visits (of all lists of a group), which of them exist."""
    p = p0 + tl.arange(0, CHUNK)
    inside = p < programs
    head = p // blocks
    block = p % blocks
    if LAST_FIRST:
        block = blocks - 1 - block
    steps = tl.zeros([CHUNK], tl.int32)
    for member in tl.static_range(0, GROUP):
        at = head * head_step + member * blocks + block
        steps += tl.load(counts + at, mask=inside, other=0)
    return head * blocks + block, steps, inside

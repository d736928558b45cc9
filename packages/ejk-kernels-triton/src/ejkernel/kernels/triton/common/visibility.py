"""Visibility of keys as arithmetic on block indices and on elements.

A *band* is the pair (lo, hi): row i sees key j only if lo <= j - i <= hi; None bounds nothing.
Causal masks and sliding windows, with any offsets and in any number, are one band. Blocks are
half-open ranges [start, stop); those in [full_start, full_stop) are visible to every row of the
query block and need no element mask.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton


@triton.jit
def band_blocks(first, last, length, lo, hi, BLOCK: tl.constexpr):
    """Returns the ranges of blocks (size BLOCK, axis of ``length``) that rows first..last see."""
    start = 0
    full_start = 0
    stop = tl.cdiv(length, BLOCK)
    full_stop = length // BLOCK
    if lo is not None:
        start = tl.maximum(first + lo, 0) // BLOCK
        full_start = tl.cdiv(tl.maximum(last + lo, 0), BLOCK)
    if hi is not None:
        stop = tl.minimum(stop, tl.cdiv(tl.maximum(last + hi + 1, 0), BLOCK))
        full_stop = tl.minimum(full_stop, tl.maximum(first + hi + 1, 0) // BLOCK)
    start = tl.minimum(start, stop)
    full_start = tl.minimum(tl.maximum(full_start, start), stop)
    full_stop = tl.minimum(tl.maximum(full_stop, full_start), stop)
    return start, full_start, full_stop, stop


@triton.jit
def load_block_ranges(ranges, index):
    """Loads the ranges of ``band_blocks`` from a row of an int32 array ``[rows, 4]``."""
    row = ranges + index * 4
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def load_list_start(listed, row, length, BLOCK: tl.constexpr):
    """Loads the header of a row of ``block_lists``.

    The result is (pointer to its blocks, first block, number of full blocks, number of blocks). A
    list has room for one more block, as each block is read one step ahead.
    """
    visit = listed + row.to(tl.int64) * (tl.cdiv(length, BLOCK) + 3) + 2
    full = tl.load(visit - 2).to(tl.int32)
    count = tl.load(visit - 1).to(tl.int32)
    return visit, tl.load(visit).to(tl.int32), full, count


@triton.jit
def load_program_index(order, pid, programs, lists_batch):
    """Loads a program's index from ``order`` int32 ``[#b, programs]``, permuted per batch row."""
    b = pid // programs
    shared = lists_batch == 0
    return b * programs + tl.load(order + tl.where(shared, 0, b) * programs + pid % programs)


@triton.jit
def phase_steps(start, full_start, full_stop, stop, PHASE: tl.constexpr, HAS_FULL: tl.constexpr):
    """Returns the number of blocks of a phase: 0 without element mask, 1 the others.

    Without HAS_FULL all blocks are in phase 1.
    """
    if PHASE == 0:
        steps = full_stop - full_start
    elif HAS_FULL:
        steps = (full_start - start) + (stop - full_stop)
    else:
        steps = stop - start
    return steps


@triton.jit
def phase_block(t, start, full_start, full_stop, PHASE: tl.constexpr, HAS_FULL: tl.constexpr):
    """Returns the t-th block of a phase; in phase 1 blocks before the full ones come first."""
    if PHASE == 0:
        block = full_start + t
    elif HAS_FULL:
        left = full_start - start
        block = tl.where(t < left, start + t, full_stop + t - left)
    else:
        block = start + t
    return block


@triton.jit
def _both(a, b):
    if a is None:
        both = b
    else:
        both = a & b
    return both


@triton.jit
def visible(i, j, kv_len, rules, q_id, kv_id, q_position, kv_position, KEYS_INSIDE: tl.constexpr):
    """Returns the element mask by ``Rules`` without their dense mask, None if all is visible.

    i and j are index tiles that broadcast against each other; ids and positions are values already
    loaded (shaped as i and j) or None. Keys past the last are unseen unless KEYS_INSIDE; rows past
    the last are arbitrary.
    """
    seen = None
    if not KEYS_INSIDE:
        seen = _both(seen, j < kv_len)
    if rules.lo is not None:
        seen = _both(seen, j - i >= rules.lo)
    if rules.hi is not None:
        seen = _both(seen, j - i <= rules.hi)
    if q_id is not None:
        seen = _both(seen, (q_id == kv_id) & (q_id >= 0))
    if q_position is not None:
        if rules.position_lo is not None:
            seen = _both(seen, kv_position - q_position >= rules.position_lo)
        if rules.position_hi is not None:
            seen = _both(seen, kv_position - q_position <= rules.position_hi)
        if rules.chunk is not None:
            seen = _both(seen, _same_chunk(q_position, kv_position, rules))
    elif rules.chunk is not None:
        seen = _both(seen, _same_chunk(i, j, rules))
    return seen


@triton.jit
def _same_chunk(i, j, rules):
    return _floor_div(i + rules.chunk_offset, rules.chunk) == _floor_div(j, rules.chunk)


@triton.jit
def _floor_div(a, b):
    return tl.where(a >= 0, a // b, -((b - 1 - a) // b))

"""One tile of logits and its mask, shared by the forward and backward kernels.

``i`` and ``j`` are query and key indices shaped to broadcast to the tile, in either orientation:
``[rows, 1]`` and ``[1, columns]``, or transposed.
"""

from __future__ import annotations

from ejkernel.kernels.triton.common.softmax import capped_weight
from ejkernel.kernels.triton.common.visibility import (
    band_blocks,
    load_block_ranges,
    load_list_start,
    load_program_index,
    visible,
)
from ejkernel.kernels.triton.language import tl, triton


@triton.jit
def program_of(schedule, heads):
    """Returns (block, batch row, head) of this program, see ``BlockSchedule``.

    Blocks of one head follow each other, so that its keys stay in the L2 cache; where rows or
    heads share a bias, the programs that read the same part of it are neighbours instead.
    """
    pid = tl.program_id(0)
    if schedule.order is not None:
        pid = load_program_index(schedule.order, pid, schedule.blocks * heads, schedule.batch_step)
    if schedule.NEIGHBOURS == 1:
        b = pid % schedule.batch
        block = (pid // schedule.batch) % schedule.blocks
        h = pid // (schedule.batch * schedule.blocks)
    elif schedule.NEIGHBOURS == 2:
        h = pid % heads
        block = (pid // heads) % schedule.blocks
        b = pid // (heads * schedule.blocks)
    else:
        block = pid % schedule.blocks
        bh = pid // schedule.blocks
        b = bh // heads
        h = bh % heads
    if schedule.LAST_FIRST:
        block = schedule.blocks - 1 - block
    return block, b, h


@triton.jit
def key_blocks(schedule, row, first, sizes, rules, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Returns the key blocks that rows starting at ``first`` visit, by list, ranges or band.

    The result is (start, full_start, full_stop, stop) of ``band_blocks``, then for a list the
    pointer to its blocks and the first block. ``row``: row of the list or the ranges.
    """
    if schedule.listed is not None:
        visit, block, full_stop, stop = load_list_start(
            schedule.listed, row, sizes.kv_len, BLOCK_KV
        )
        return 0, 0, full_stop, stop, visit, block
    elif schedule.ranges is not None:
        start, full_start, full_stop, stop = load_block_ranges(schedule.ranges, row)
        return start, full_start, full_stop, stop, None, None
    else:
        last = tl.minimum(first + BLOCK_Q, sizes.q_len) - 1
        start, full_start, full_stop, stop = band_blocks(
            first, last, sizes.kv_len, rules.lo, rules.hi, BLOCK_KV
        )
        return start, full_start, full_stop, stop, None, None


@triton.jit
def load_bias(
    bias,
    i,
    j,
    i0,
    j0,
    b,
    h,
    sizes,
    TRANSPOSED: tl.constexpr,
    ROWS_INSIDE: tl.constexpr,
    KEYS_INSIDE: tl.constexpr,
):
    """Loads a tile of the bias, None without one; i0 and j0 are the first of ``i`` and ``j``.

    KEYS_INSIDE: every j is a key; otherwise columns past the last key read as 0. Rows past the last
    read as 0 too unless ROWS_INSIDE, which kernels with independent rows may set as well: they do
    not store the rows of the next head, or the repeated last row, that they read instead.
    """
    if bias is None:
        bias_tile = None
    elif bias.TMA:
        bias_tile = bias.array.load([b * bias.batch + h * bias.head + i0, j0])
        if not ROWS_INSIDE:
            bias_tile = tl.where((i < sizes.q_len)[:, None], bias_tile, 0.0)
    else:
        # 64-bit arithmetic only once a row; column offsets fit 32 bits
        row = b * bias.batch + h * bias.head + tl.minimum(i, sizes.q_len - 1)
        at = bias.array + row.to(tl.int64)[:, None] * sizes.kv_len
        j = j[None, :]
        if KEYS_INSIDE:
            bias_tile = tl.load(at + j)
        else:
            bias_tile = tl.load(at + j, mask=j < sizes.kv_len, other=0.0)
    if TRANSPOSED and bias is not None:
        bias_tile = tl.trans(bias_tile)
    return bias_tile


@triton.jit
def tile_logits(s, bias_tile, logits, mods, i, j, b, h, sizes):
    """Returns s with logits x = slope * s + shift in base 2, given ``s`` = q k^T.

    ``slope`` and ``shift`` are scalars of the call. With a bias s is ``scale`` * s + ``bias_tile``,
    in the units of the bias, where a finite bias stays finite. Without one ``scale`` is a sign or
    None, so that the multiplication is exact. A score_mod gets natural logits, as with a bias. With
    a soft cap s becomes ``capped_weight(s * cap)``.
    """
    s = _scaled(s, bias_tile, logits)
    if mods is not None:
        if mods.SCORE is not None:
            # rows and keys past the last are taken for the last: a function sees pairs alone
            i = tl.minimum(i, sizes.q_len - 1)
            j = tl.minimum(j, sizes.kv_len - 1)
            s = mods.SCORE(s, b, h, i, j, mods.score_arrays, mods.batch)
    if logits.cap is not None:
        s = capped_weight(s * logits.cap)
    return s


@triton.jit
def tile_logits_and_slope(s, bias_tile, logits, mods, i, j, b, h, sizes):
    """Returns ``tile_logits`` and their derivative by the biased scores; None where that is 1.

    A soft cap contributes ``(1 - tanh^2) / -4``.
    """
    s = _scaled(s, bias_tile, logits)
    slope = None
    if mods is not None:
        if mods.SLOPE is not None:
            i = tl.minimum(i, sizes.q_len - 1)
            j = tl.minimum(j, sizes.kv_len - 1)
            s, slope = mods.SLOPE(s, b, h, i, j, mods.score_arrays, mods.batch)
    if logits.cap is not None:
        s = capped_weight(s * logits.cap)
        if slope is None:
            slope = tl.fma(s, s, s)
        else:
            slope = slope * tl.fma(s, s, s)
    if slope is None:
        return s, None
    else:
        return s, slope


@triton.jit
def times_slope(p, slope, mods):
    """Returns ``p * slope``, 0 where p is: there a function may have any slope, NaN too."""
    if mods is None:
        return p * slope
    else:
        return tl.where(p > 0.0, p * slope, 0.0)


@triton.jit
def _scaled(s, bias_tile, logits):
    if bias_tile is not None:
        # fma, not an addition: that would become the initial accumulator of the matmul, which would
        # then wait for the bias
        s = tl.fma(s, logits.scale, bias_tile.to(tl.float32))
    elif logits.scale is not None:
        s = s * logits.scale
    return s


@triton.jit
def mask_unseen(s, i, j, j0, b, h, sizes, rules, mods, KEYS_INSIDE: tl.constexpr):
    """Returns ``s`` with -inf where a row does not see a key, by every rule of the call.

    ``j0``: the first of ``j``.
    """
    q_id, kv_id = load_segment_pair(rules.segments, i, j, b, sizes, -1, -2)
    q_position, kv_position = load_segment_pair(rules.positions, i, j, b, sizes, 0, 0)
    seen = visible(i, j, sizes.kv_len, rules, q_id, kv_id, q_position, kv_position, KEYS_INSIDE)
    mask = rules.mask
    if mask is not None:
        corner = mask.array + b.to(tl.int64) * mask.batch + h.to(tl.int64) * mask.head
        row = (i // mask.ROWS).to(tl.int64)
        if rules.mask.WORD:  # ``mask.WORD`` would not be a constant
            # one word for each row of the tile instead of one load an element
            at = row * tl.cdiv(sizes.kv_len, mask.WORD) + j0 // mask.WORD
            word = tl.load(corner + at, mask=i < sizes.q_len, other=0)
            dense = (word & (1 << ((j - j0 + j0 % mask.KEYS) // mask.KEYS))) != 0
        else:
            inside = (i < sizes.q_len) & (j < sizes.kv_len)
            at = row * tl.cdiv(sizes.kv_len, mask.KEYS) + j // mask.KEYS
            dense = tl.load(corner + at, mask=inside, other=0) != 0
        if seen is None:
            seen = dense
        else:
            seen = seen & dense
    if mods is not None:
        if mods.MASK is not None:
            i = tl.minimum(i, sizes.q_len - 1)
            j = tl.minimum(j, sizes.kv_len - 1)
            chosen = mods.MASK(b, h, i, j, mods.mask_arrays, mods.batch)
            if seen is None:
                seen = chosen
            else:
                seen = seen & chosen
    if seen is not None:
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def load_segment_pair(pair, i, j, b, sizes, NO_ROW: tl.constexpr, NO_KEY: tl.constexpr):
    """Loads ids or positions of the queries ``i`` and the keys ``j``, None without ``pair``."""
    if pair is None:
        return None, None
    else:
        q_row = pair.q + b * pair.stride * sizes.q_len
        kv_row = pair.kv + b * pair.stride * sizes.kv_len
        q = tl.load(q_row + i, mask=i < sizes.q_len, other=NO_ROW)
        return q, tl.load(kv_row + j, mask=j < sizes.kv_len, other=NO_KEY)


@triton.jit
def probabilities(s, row_base, logits):
    """Returns exp2(logits - lse); the forward kernel stores lse in the units of s.

    The difference is scaled, not its terms, so that both kernels compute the same value for the
    largest logit, however large it is. FUSED: a soft cap bounds the logits, lse is in base 2 and
    one instruction does both.
    """
    if logits.FUSED:
        p = tl.exp2(s * logits.slope - row_base)
    else:
        p = tl.exp2((s - row_base) * logits.slope)
    return p


@triton.jit
def load_rows(values, i, length, EMPTY: tl.constexpr, EVEN: tl.constexpr):
    """Loads float32 values of the rows ``i``, EMPTY past the last; EVEN: no row is past it."""
    if EVEN:
        row = tl.load(values + i)
    else:
        row = tl.load(values + i, mask=i < length, other=EMPTY)
    return row

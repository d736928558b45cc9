"""Which blocks every token looks at.

Math, per token t, key head and block c complete by then, k_c the mean of the block's keys, over the
query heads h of the group:

    x_htc = scale * q_ht . k_c;  score_tc = sum_h exp(x_htc - lse_ht)

The own block comes first, then the blocks of the largest scores, ties to the lower number.

Products are those of float32: a query is brought to the range of float16 by a power of two, a mean
by one for all of its head, and each is one number of float16 (a query of 16 bits) or the sum of two
(22 bits and a sign between them: float32 but for its last bit, where a mean is not less than 2^-17
of the largest). Their products are exact, and sums are float32.

Order: blocks of equal means have equal terms, products and scores, so the lower number goes first.
Other scores are float32's, as XLA's are, and two that differ by less than their rounding may change
places. A mean below 2^-17 of the largest M of its head loses bits, 2^-39 M at most: its logits are
off by 2^-39 scale |q|_1 M, less than the rounding of exp while no logit of the head can pass 2^15.
Beyond, blocks far smaller than the largest may change places among themselves, by that much.

Work split: as many programs as run at once, each for every so many-th of the tiles of tokens, the
longest first. A tile's rows are the query heads of the group of its tokens, so that the sum over
heads is one over rows, and queries are read once. A tile is walked twice, for lse, then for the
scores, which go to a piece of memory of the program's own. From there a warp reads those of a token
back and takes the best, one after the other: every lane has the best of its own blocks, one
instruction finds the largest of a warp, and what replaces it is read again.

Bound: 8 * T * blocks * d FLOPs per head over the visible half (twice two products). At T 32k, 64
heads, D128, blocks of 64: 0.55 TFLOP, and 4 GB of means from L2: both 1.1 ms or less. Takes
1.75 ms on an H200.

Source: Yuan et al., "Native Sparse Attention" (2025), section 3.3.2.
"""

from __future__ import annotations

from ejkernel.kernels.triton.common.softmax import fused_softmax
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.native_sparse_attention.forward_kernel import (
    load_group,
)

EMPTY = tl.constexpr(-8388608)  # the bits of -inf; as an integer, below those of every score
EXPONENT = tl.constexpr(0x7F800000)  # the bits of a power of two
# of slopes: hidden products at -inf stay so, and logits that are no more than 0 are finite
SMALLEST = tl.constexpr(2.0**-90)
LARGEST = tl.constexpr(2.0**80)
LANES = tl.constexpr(32)  # of the warp that ranks a token's blocks


@triton.jit
def visible_means(firsts, completes, token, t, real, size, blocks):
    """Per token the range of complete blocks of its sequence, among those of all sequences."""
    if firsts is None:
        low = t * 0
        high = (t + 1) // size
    else:
        low = tl.load(firsts + token + t, mask=real, other=0)
        high = low + tl.load(completes + token + t, mask=real, other=0)
    return tl.where(real, low, blocks), tl.where(real, high, 0)


@triton.jit
def own_blocks(owns, token, t, real, size):
    """The number of every token's own block in its sequence; -1 for tokens of none."""
    own = t // size
    if owns is not None:
        own = tl.load(owns + token + t, mask=real, other=-1)
    return own


@triton.jit
def query_terms(q, sign, slope):
    """(high, low, slope, power): float16 rows whose sum is a power of two times q, and the slope of
    their products in base 2, with the power of two below it."""
    x = q.to(tl.float32)
    bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(bits >> 23, 15), 254)  # rows are brought to [2^14, 2^15)
    x *= ((268 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    if sign is not None:
        x *= sign
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    slope = slope * ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    slope = tl.minimum(tl.maximum(slope, SMALLEST), LARGEST)
    power = (slope.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
    return high, low, slope, power


@triton.jit
def through_memory(
    queries, high, low,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, QUERY_TERMS: tl.constexpr,
):  # fmt: skip
    """The same two tiles, out of a piece of memory of the program's own."""
    row = tl.program_id(0).to(tl.int64) * (QUERY_TERMS * ROWS) + tl.arange(0, ROWS)
    pointers = queries + row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(pointers, high)
    if QUERY_TERMS == 2:
        tl.store(pointers + ROWS * COLUMNS, low)
    tl.debug_barrier()
    high = tl.load(pointers)
    if QUERY_TERMS == 2:
        low = tl.load(pointers + ROWS * COLUMNS)
    tl.debug_barrier()
    return high, low


@triton.jit
def exact_products(
    q_high, q_low, terms, of_head, first, D: tl.constexpr, COLUMNS: tl.constexpr,
    KEYS: tl.constexpr, QUERY_TERMS: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Products of queries and the means of the blocks ``first`` .. ``first + KEYS`` of a head.

    ``of_head``: its first row of ``terms``.
    Both terms of a mean are rows of one product, neighbours, whose sums one thread holds. There are
    rows for KEYS blocks more than there are blocks.
    """
    if MAPPED:
        rows = terms.load([(of_head + 2 * first).to(tl.int32), 0])
    else:
        row = of_head + 2 * first + tl.arange(0, 2 * KEYS)
        column = tl.arange(0, COLUMNS)[None, :]
        pointers = terms + row[:, None] * D + column
        rows = tl.load(pointers) if COLUMNS == D else tl.load(pointers, mask=column < D, other=0.0)
    s = tl.zeros([q_high.shape[0], 2 * KEYS], tl.float32)
    if QUERY_TERMS == 2:  # what is small comes first
        s = tl.dot(q_low, tl.trans(rows), s)
    s = tl.dot(q_high, tl.trans(rows), s)
    high, low = tl.split(tl.reshape(s, [q_high.shape[0], KEYS, 2]))
    return high + low


@triton.jit
def load_scores(at, number, low, high, own):
    """Scores as integers, which order as they do; EMPTY of the own block and what is not seen."""
    seen = (number >= low) & (number < high) & (number != low + own)
    x = tl.load(at + number, mask=seen, other=float("-inf"))
    return tl.where(x == x, x, float("inf")).to(tl.int32, bitcast=True)


@triton.jit
def rank_blocks(
    scores, chosen, firsts, completes, owns, token, first_token, last_token, row, size, blocks,
    PER: tl.constexpr, SLABS: tl.constexpr, COUNT: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Lists of tokens from ``first_token`` on, one a warp, by their ``scores [PER, blocks]``."""
    t = first_token + tl.arange(0, PER)
    real = t < last_token
    low, high = visible_means(firsts, completes, token, t, real, size, blocks)
    own = own_blocks(owns, token, t, real, size)
    at = scores + tl.arange(0, PER).to(tl.int64)[:, None] * blocks
    lane = tl.arange(0, LANES)[None, :]
    slot = tl.arange(0, KEPT)[:, None, None] * LANES + lane[None, :, :]
    begin = tl.min(low, 0)
    end = tl.max(high, 0)
    low, high, own = low[:, None], high[:, None], own[:, None]
    # every lane's best of what is left of its blocks, every 32nd, and its number
    best = tl.full([PER, LANES], EMPTY, tl.int32)
    number = tl.full([PER, LANES], -1, tl.int32)
    for step in tl.range(0, end - begin, SLABS * LANES, num_stages=1):
        each = begin + step + tl.arange(0, SLABS)[:, None, None] * LANES + lane[None, :, :]
        x = load_scores(at, each, low, high, own)
        most = tl.max(x, 0)
        first = tl.min(tl.where(x == most[None, :, :], each, blocks), 0)
        number = tl.where(most > best, first, number)
        best = tl.maximum(most, best)
    top = tl.full([KEPT, PER, LANES], EMPTY, tl.int32)
    which = tl.full([KEPT, PER, LANES], -1, tl.int32)
    for i in tl.range(0, COUNT):
        most = tl.max(best, 1)[:, None]
        found = tl.min(tl.where(best == most, number, blocks), 1)[:, None]
        top = tl.where(slot == i, most[None, :, :], top)
        which = tl.where(slot == i, found[None, :, :], which)
        # of that lane, what is left comes behind it: all lanes look for its best
        owner = (found - begin) % LANES
        new_best = tl.full([PER, LANES], EMPTY, tl.int32)
        new_number = tl.full([PER, LANES], -1, tl.int32)
        for step in tl.range(0, end - begin, LANES * LANES, num_stages=1):
            each = begin + step + owner + lane * LANES
            x = load_scores(at, each, low, high, own)
            x = tl.where((x < most) | ((x == most) & (each > found)), x, EMPTY)
            new_number = tl.where(x > new_best, each, new_number)
            new_best = tl.maximum(x, new_best)
        most = tl.max(new_best, 1)[:, None]
        found = tl.min(tl.where(new_best == most, new_number, blocks), 1)[:, None]
        best = tl.where(lane == owner, most, best)
        number = tl.where(lane == owner, found, number)
    which = tl.where(top == EMPTY, -1, which - low[None, :, :])
    out = chosen + (token + t) * row
    tl.store(out[:, None], own, mask=real[:, None])
    stored = real[None, :, None] & (slot < COUNT)
    tl.store(out[None, :, None] + 1 + slot, which, mask=stored)


@triton.jit
def score_blocks(
    q,
    terms,
    factors,
    firsts,
    completes,
    owns,
    chosen,
    scores,
    queries,
    length,
    heads,
    kv_heads,
    blocks,
    size,
    slots,
    programs,
    slope,
    sign,
    MAPPED: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    QUERY_TERMS: tl.constexpr,
    PER: tl.constexpr,
    SLABS: tl.constexpr,
    COUNT: tl.constexpr,
    KEPT: tl.constexpr,
):
    """chosen ``[b, s, hk, slots]``: the own block and the COUNT best others, numbered in their
    sequence, best first; -1 behind them. With ``chosen`` None the scores themselves.

    ``scores [b, programs * TOKENS, blocks]`` is what a program writes its own to, or ``[b, s, hk,
    blocks]``; some of those that a token does not see are not written. ``terms [b, hk,
    blocks + KEYS, 2, D]`` times ``factors [b, hk]`` are the means; MAPPED: as a descriptor of rows.
    ``owns [b, s]``: -1 for tokens of no sequence. ``queries``: memory for a program's rows in
    float16.
    """
    b = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    token = b.to(tl.int64) * length
    tiles = (length + TOKENS - 1) // TOKENS
    each = tl.arange(0, TOKENS * MEMBERS)
    for number in tl.range(program, tiles * kv_heads, programs):
        tile = tiles - 1 - number // kv_heads  # the longest first
        hk = number % kv_heads
        t = tile * TOKENS + tl.arange(0, TOKENS)
        row_t = tile * TOKENS + each // MEMBERS
        low, high = visible_means(firsts, completes, token, t, t < length, size, blocks)
        row_low, row_high = visible_means(
            firsts, completes, token, row_t, row_t < length, size, blocks
        )
        begin = tl.min(low, 0)
        end = tl.max(high, 0)
        # blocks that every token sees
        inner = tl.max(tl.where(t < length, low, 0), 0)
        outer = tl.min(tl.where(t < length, high, blocks), 0)
        of_head = (b.to(tl.int64) * kv_heads + hk) * (blocks + KEYS) * 2
        factor = tl.load(factors + b * kv_heads + hk)
        if chosen is None:
            row = (token + t) * kv_heads + hk
        else:
            row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        for split in tl.range(0, SPLITS):
            member = split * MEMBERS + each % MEMBERS
            real = (member < GROUP) & (row_t < length)
            q_tile = load_group(
                q, (token + row_t) * heads, real, hk * GROUP + member, D, COLUMNS
            )  # fmt: skip
            q_high, q_low, row_slope, power = query_terms(q_tile, sign, slope * factor)
            # an operand that was in memory stays in shared memory, another would be brought to
            # registers again in every step
            q_high, q_low = through_memory(
                queries, q_high, q_low, TOKENS * MEMBERS, COLUMNS, QUERY_TERMS
            )
            large = 1073741824.0 / power  # as in fused_softmax
            m = tl.full([TOKENS * MEMBERS], float("-inf"), tl.float32)
            l = tl.zeros([TOKENS * MEMBERS], tl.float32)  # noqa: E741
            e = tl.zeros([TOKENS * MEMBERS], tl.float32)
            for at in tl.range(0, end - begin, KEYS):
                first = begin + at
                s = exact_products(
                    q_high, q_low, terms, of_head, first, D, COLUMNS, KEYS, QUERY_TERMS, MAPPED
                )
                if (first < inner) | (first + KEYS > outer):
                    c = first + tl.arange(0, KEYS)[None, :]
                    seen = c < row_high[:, None]
                    if firsts is not None:
                        seen = seen & (c >= row_low[:, None])
                    s = tl.where(seen, s, float("-inf"))
                _, m, l, e, _ = fused_softmax(  # noqa: E741
                    s, m, l, e, row_slope, power, large, True
                )
            # p is exp2 of the same multiply-add, over l: no rounding of a large m is left in it
            m = tl.where(l > 0.0, m, 0.0)
            row_slope = tl.where(tl.abs(m) >= large, power, row_slope)
            shift = m * row_slope
            share = tl.where(real & (l > 0.0), 1.0 / tl.where(l > 0.0, l, 1.0), 0.0)
            for at in tl.range(0, end - begin, KEYS):
                first = begin + at
                s = exact_products(
                    q_high, q_low, terms, of_head, first, D, COLUMNS, KEYS, QUERY_TERMS, MAPPED
                )
                p = tl.exp2(tl.fma(s, row_slope[:, None], -shift[:, None])) * share[:, None]
                score = tl.sum(tl.reshape(p, [TOKENS, MEMBERS, KEYS]), 1)
                c = first + tl.arange(0, KEYS)[None, :]
                pointers = scores + row[:, None] * blocks + c
                stored = (t < length)[:, None] & (c < blocks)
                if SPLITS > 1:
                    if split > 0:
                        score += tl.load(pointers, mask=stored, other=0.0)
                tl.store(pointers, score, mask=stored)
            if SPLITS > 1:
                tl.debug_barrier()
        if chosen is not None:
            tl.debug_barrier()  # what one warp has written, another reads
            for at in tl.range(0, TOKENS, PER):
                rank_blocks(
                    scores + (tl.program_id(0).to(tl.int64) * TOKENS + at) * blocks,
                    chosen + hk * slots, firsts, completes, owns, token,
                    tile * TOKENS + at, tl.minimum(length, tile * TOKENS + TOKENS),
                    kv_heads * slots, size, blocks, PER, SLABS, COUNT, KEPT,
                )  # fmt: skip
            tl.debug_barrier()

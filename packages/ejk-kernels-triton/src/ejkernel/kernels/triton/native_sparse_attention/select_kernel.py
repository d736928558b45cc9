"""Which blocks every token looks at.

Math, per token t, key head and block c complete by then, k_c the mean of the block's keys, over the
query heads h of the group:

    x_htc = scale * q_ht . k_c;  score_tc = sum_h exp(x_htc - lse_ht)

The own block comes first, then the blocks of the largest scores, ties to the lower number.

Products are those of float32: rows are brought to the range of float16 by powers of two, then a
mean, and a query in float32, is the sum of two numbers of float16 (22 bits and a sign between them,
so within one unit in the last place of float32). Their products are exact, and sums are float32.

Work split: as many programs as run at once, each for every so many-th of the tiles of tokens, the
longest first. A tile's rows are the query heads of the group of its tokens, so that the sum over
heads is one over rows, and queries are read once. A tile is walked twice, for lse, then for the
scores, which go to a piece of memory of the program's own. From there a warp reads those of a token
back and takes the best, one after the other: integers order as the floats of the same bits do, and
one instruction finds the largest of a warp.

Bound: 8 * T * blocks * d FLOPs per head over the visible half (twice two products). At T 32k, 64
heads, D128, blocks of 64: 0.55 TFLOP, and 4 GB of means from L2: both 1.1 ms or less. Takes
2.5 ms on an H200.

Source: Yuan et al., "Native Sparse Attention" (2025), section 3.3.2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from ejkernel.kernels.triton.common.softmax import online_softmax
from ejkernel.kernels.triton.native_sparse_attention.forward_kernel import (
    load_group,
    load_keys,
    row_terms,
    weights,
)

EMPTY = tl.constexpr(-8388608)  # the bits of -inf; as an integer, below those of every score
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
def query_terms(q):
    """(high, low, factor): float16 rows with q = factor * (high + low), factor a power of two."""
    x = q.to(tl.float32)
    bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(bits >> 23, 15), 254)  # rows are brought to [2^14, 2^15)
    x *= ((268 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    return high, low, ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exact_products(
    q_high, q_low, factor, terms, factors, base, row, first, blocks, stride,
    D: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr, QUERY_TERMS: tl.constexpr,
):  # fmt: skip
    """Float32 products of queries and the means of the blocks ``first`` .. ``first + KEYS``."""
    inside = first + tl.arange(0, KEYS) < blocks
    high = load_keys(terms, base, first, inside, stride, D, COLUMNS)
    low = load_keys(terms, base + D, first, inside, stride, D, COLUMNS)
    of_keys = tl.load(factors + row * blocks + first + tl.arange(0, KEYS), mask=inside, other=0.0)
    s = tl.zeros([q_high.shape[0], KEYS], tl.float32)
    if QUERY_TERMS == 2:  # what is small comes first
        s = tl.dot(q_low, tl.trans(low), s)
        s = tl.dot(q_low, tl.trans(high), s)
    s = tl.dot(q_high, tl.trans(low), s)
    s = tl.dot(q_high, tl.trans(high), s)
    return s * factor[:, None] * of_keys[None, :]


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
    at = scores + tl.arange(0, PER).to(tl.int64)[None, :, None] * blocks
    lane = tl.arange(0, LANES)[None, None, :]
    slab = tl.arange(0, SLABS)[:, None, None]
    slot = tl.arange(0, KEPT)[:, None, None] * LANES + lane
    top = tl.full([KEPT, PER, LANES], EMPTY, tl.int32)
    which = tl.full([KEPT, PER, LANES], -1, tl.int32)
    begin = tl.min(low, 0)
    end = tl.max(high, 0)
    for step in tl.range(0, end - begin, SLABS * LANES, num_stages=1):
        first = begin + step
        number = first + slab * LANES + lane
        seen = (number < end) & real[None, :, None]
        x = tl.load(at + number, mask=seen, other=float("-inf")).to(tl.int32, bitcast=True)
        new_top = tl.full([KEPT, PER, LANES], EMPTY, tl.int32)
        new_which = tl.full([KEPT, PER, LANES], -1, tl.int32)
        for i in tl.range(0, COUNT):
            best = tl.max(tl.maximum(tl.max(x, 0), tl.max(top, 0)), 1)[None, :, None]
            of_x = tl.min(tl.where(x == best, number, blocks), 0)
            of_top = tl.min(tl.where(top == best, which, blocks), 0)
            found = tl.min(tl.minimum(of_x, of_top), 1)[None, :, None]
            x = tl.where(number == found, EMPTY, x)
            top = tl.where(which == found, EMPTY, top)
            new_top = tl.where(slot == i, best, new_top)
            new_which = tl.where(slot == i, found, new_which)
        top = new_top
        which = new_which
    which = tl.where(top == EMPTY, -1, which - low[None, :, None])
    out = chosen + (token + t) * row
    tl.store(out, own, mask=real)
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
    length,
    heads,
    kv_heads,
    blocks,
    size,
    slots,
    programs,
    slope,
    sign,
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
    blocks]``; some of those that a token does not see are not written. ``terms [b, blocks, hk, 2 *
    D]`` times ``factors [b, hk, blocks]`` are the means. ``owns [b, s]``: -1 for tokens of no
    sequence.
    """
    b = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    token = b.to(tl.int64) * length
    tiles = (length + TOKENS - 1) // TOKENS
    each = tl.arange(0, TOKENS * MEMBERS)
    stride = kv_heads * (2 * D)
    for number in tl.range(program, tiles * kv_heads, programs):
        tile = tiles - 1 - number // kv_heads  # the longest first
        hk = number % kv_heads
        t = tile * TOKENS + tl.arange(0, TOKENS)
        row_t = tile * TOKENS + each // MEMBERS
        low, high = visible_means(firsts, completes, token, t, t < length, size, blocks)
        own = own_blocks(owns, token, t, t < length, size)
        row_low, row_high = visible_means(
            firsts, completes, token, row_t, row_t < length, size, blocks
        )
        begin = tl.min(low, 0)
        end = tl.max(high, 0)
        base = b.to(tl.int64) * blocks * stride + hk * (2 * D)
        of_head = b.to(tl.int64) * kv_heads + hk
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
            q_high, q_low, factor = query_terms(q_tile)
            if sign is not None:
                factor *= sign
            m = tl.full([TOKENS * MEMBERS], float("-inf"), tl.float32)
            l = tl.zeros([TOKENS * MEMBERS], tl.float32)  # noqa: E741
            for at in tl.range(0, end - begin, KEYS):
                first = begin + at
                s = exact_products(
                    q_high, q_low, factor, terms, factors, base, of_head, first, blocks, stride,
                    D, COLUMNS, KEYS, QUERY_TERMS,
                )  # fmt: skip
                c = first + tl.arange(0, KEYS)[None, :]
                seen = c < row_high[:, None]
                if firsts is not None:
                    seen = seen & (c >= row_low[:, None])
                s = tl.where(seen, s, float("-inf"))
                _, m, l, _ = online_softmax(s, m, l, slope, False, True)  # noqa: E741
            top, log = row_terms(m, l)
            log = tl.where(real, log, float("inf"))
            for at in tl.range(0, end - begin, KEYS):
                first = begin + at
                s = exact_products(
                    q_high, q_low, factor, terms, factors, base, of_head, first, blocks, stride,
                    D, COLUMNS, KEYS, QUERY_TERMS,
                )  # fmt: skip
                p = weights(s, top[:, None], log[:, None], slope)
                score = tl.sum(tl.reshape(p, [TOKENS, MEMBERS, KEYS]), 1)
                score = tl.where(score == score, score, float("inf"))
                c = first + tl.arange(0, KEYS)[None, :]
                seen = (c >= low[:, None]) & (c < high[:, None]) & (c != (low + own)[:, None])
                score = tl.where(seen, score, float("-inf"))
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

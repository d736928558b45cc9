"""Which blocks every token looks at.

Math, per token t, key head and block c complete by then, k_c the mean of the block's keys, over the
query heads h of the group:

    x_htc = scale * q_ht . k_c;  score_tc = sum_h exp(x_htc - lse_ht)

The own block comes first, then the blocks of the largest scores, ties to the lower number.

Products are those of float32: a mean is the sum of three numbers of bfloat16, a query in float16 of
two, so that each of their products is exact, and sums are float32.

Work split: first one program per (tile of tokens, head), for lse alone; then one per (tile of
tokens, key head), which walks over blocks, and for each tile of them over the heads of the group.
The best so far are kept sorted in registers: no score is written, unless more are ranked than
registers hold. Then XLA ranks the scores of some tokens at a time.

Bound: 6 * T * blocks * d FLOPs per head and kernel over the visible half (three products). At T
32k, 64 heads, D128, blocks of 64: 0.41 TFLOP each: arithmetic. They take 1.7 and 2.8 ms on an H200.

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
def load_means(
    means, base, first, blocks, stride,
    D: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """(high, middle, low) terms of the means of KEYS blocks; the same thing thrice if PIECES 1."""
    inside = first + tl.arange(0, KEYS) < blocks
    high = load_keys(means, base, first, inside, stride, D, COLUMNS)
    middle, low = high, high
    if PIECES == 3:
        middle = load_keys(means, base + D, first, inside, stride, D, COLUMNS)
        low = load_keys(means, base + 2 * D, first, inside, stride, D, COLUMNS)
    return high, middle, low


@triton.jit
def exact_products(q, high, middle, low, sign, PIECES: tl.constexpr):
    """Float32 products of queries and means."""
    if PIECES == 1:
        s = tl.dot(q, tl.trans(high), input_precision="ieee")
    else:  # what is small comes first
        large = q.to(tl.bfloat16)
        s = tl.zeros([q.shape[0], high.shape[0]], tl.float32)
        if q.dtype != tl.bfloat16:
            small = (q.to(tl.float32) - large.to(tl.float32)).to(tl.bfloat16)
            s = tl.dot(small, tl.trans(low), s)
            s = tl.dot(small, tl.trans(middle), s)
            s = tl.dot(small, tl.trans(high), s)
        s = tl.dot(large, tl.trans(low), s)
        s = tl.dot(large, tl.trans(middle), s)
        s = tl.dot(large, tl.trans(high), s)
    if sign is not None:
        s = s * sign
    return s


@triton.jit
def best_of(top, which, score, first, COUNT: tl.constexpr):
    """The COUNT best of ``top [rows, KEEP]``, sorted, and of ``score [rows, KEYS]``, sorted.

    ``which``: their numbers, lower in ``top`` than ``first``, that of the first score; -1 = none.
    """
    slot = tl.arange(0, top.shape[1])[None, :]
    column = tl.arange(0, score.shape[1])[None, :]
    new_top = tl.full(top.shape, float("-inf"), tl.float32)
    new_which = tl.full(top.shape, -1, tl.int32)
    for i in tl.range(0, COUNT):
        old = tl.max(top, 1)
        new = tl.max(score, 1)
        # the lowest of equals is the first of them: in ``top``, if there
        stays = old >= new
        at_old = tl.min(tl.where(top == old[:, None], slot, top.shape[1]), 1)
        at_new = tl.min(tl.where(score == new[:, None], column, score.shape[1]), 1)
        number = tl.sum(tl.where(slot == at_old[:, None], which, 0), 1)
        number = tl.where(stays, number, first + at_new)
        best = tl.maximum(old, new)
        number = tl.where(best == float("-inf"), -1, number)
        new_top = tl.where(slot == i, best[:, None], new_top)
        new_which = tl.where(slot == i, number[:, None], new_which)
        top = tl.where(stays[:, None] & (slot == at_old[:, None]), float("-inf"), top)
        gone = (old < new)[:, None] & (column == at_new[:, None])
        score = tl.where(gone, float("-inf"), score)
    return new_top, new_which


@triton.jit
def means_lse(
    q,
    means,
    firsts,
    completes,
    base,
    rest,
    length,
    heads,
    kv_heads,
    blocks,
    size,
    slope,
    sign,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """base and rest ``[b, s, h]``, as of ``row_terms``."""
    tiles = (length + ROWS - 1) // ROWS
    tile = tiles - 1 - tl.program_id(0) % tiles  # the longest first
    h = tl.program_id(0) // tiles % heads
    b = tl.program_id(0) // tiles // heads
    hk = h // GROUP
    t = tile * ROWS + tl.arange(0, ROWS)
    real = t < length
    token = b.to(tl.int64) * length
    low, high = visible_means(firsts, completes, token, t, real, size, blocks)
    q_tile = load_group(q, (token + t) * heads, real, h, D, COLUMNS)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    stride = kv_heads * (PIECES * D)
    means_base = b.to(tl.int64) * blocks * stride + hk * (PIECES * D)
    begin = tl.min(low, 0)
    for at in tl.range(0, tl.max(high, 0) - begin, KEYS):
        first = begin + at
        k_high, k_middle, k_low = load_means(
            means, means_base, first, blocks, stride, D, COLUMNS, KEYS, PIECES
        )
        s = exact_products(q_tile, k_high, k_middle, k_low, sign, PIECES)
        c = first + tl.arange(0, KEYS)[None, :]
        s = tl.where((c >= low[:, None]) & (c < high[:, None]), s, float("-inf"))
        _, m, l, _ = online_softmax(s, m, l, slope, False, True)  # noqa: E741
    top, log = row_terms(m, l)
    tl.store(base + (token + t) * heads + h, top, mask=real)
    tl.store(rest + (token + t) * heads + h, log, mask=real)


@triton.jit
def group_scores(
    q, means, base, rest, token, t, real, first, means_base,
    heads, kv_heads, hk, blocks, slope, sign,
    D: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    KEYS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Scores ``[rows, KEYS]`` of the tokens ``token + t`` for the blocks from ``first`` on."""
    k_high, k_middle, k_low = load_means(
        means, means_base, first, blocks, kv_heads * (PIECES * D), D, COLUMNS, KEYS, PIECES
    )
    score = tl.zeros([t.shape[0], KEYS], tl.float32)
    for member in tl.range(0, GROUP):
        head = (token + t) * heads + hk * GROUP + member
        q_tile = load_group(q, head, real, 0, D, COLUMNS)
        s = exact_products(q_tile, k_high, k_middle, k_low, sign, PIECES)
        row_base = tl.load(base + head, mask=real, other=0.0)
        row_rest = tl.load(rest + head, mask=real, other=float("inf"))
        score += weights(s, row_base[:, None], row_rest[:, None], slope)
    return tl.where(score == score, score, float("inf"))


@triton.jit
def select_best(
    q,
    means,
    base,
    rest,
    firsts,
    completes,
    owns,
    chosen,
    length,
    heads,
    kv_heads,
    blocks,
    size,
    slots,
    slope,
    sign,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COUNT: tl.constexpr,
    KEEP: tl.constexpr,
    PIECES: tl.constexpr,
):
    """chosen ``[b, s, hk, slots]``: the own block and the COUNT best others, numbered in their
    sequence, best first; -1 behind them. ``owns [b, s]``: -1 for tokens of no sequence."""
    tiles = (length + ROWS - 1) // ROWS
    tile = tiles - 1 - tl.program_id(0) % tiles  # the longest first
    hk = tl.program_id(0) // tiles % kv_heads
    b = tl.program_id(0) // tiles // kv_heads
    t = tile * ROWS + tl.arange(0, ROWS)
    real = t < length
    token = b.to(tl.int64) * length
    low, high = visible_means(firsts, completes, token, t, real, size, blocks)
    own = t // size
    if owns is not None:
        own = tl.load(owns + token + t, mask=real, other=-1)
    top = tl.full([ROWS, KEEP], float("-inf"), tl.float32)
    which = tl.full([ROWS, KEEP], -1, tl.int32)
    means_base = (b.to(tl.int64) * blocks * kv_heads + hk) * (PIECES * D)
    begin = tl.min(low, 0)
    for at in tl.range(0, tl.max(high, 0) - begin, KEYS, num_stages=1):
        first = begin + at
        score = group_scores(
            q, means, base, rest, token, t, real, first, means_base, heads, kv_heads, hk, blocks,
            slope, sign, D, COLUMNS, GROUP, KEYS, PIECES,
        )  # fmt: skip
        c = first + tl.arange(0, KEYS)[None, :]
        seen = (c >= low[:, None]) & (c < high[:, None]) & (c != (low + own)[:, None])
        score = tl.where(seen, score, float("-inf"))
        top, which = best_of(top, which, score, first, COUNT)

    row = ((token + t) * kv_heads + hk) * slots
    tl.store(chosen + row, own, mask=real)
    slot = tl.arange(0, KEEP)[None, :]
    which = tl.where(which < 0, -1, which - low[:, None])
    tl.store(chosen + row[:, None] + 1 + slot, which, mask=real[:, None] & (slot < COUNT))


@triton.jit
def mean_scores(
    q,
    means,
    base,
    rest,
    firsts,
    completes,
    scores,
    length,
    heads,
    kv_heads,
    blocks,
    size,
    slope,
    sign,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """scores ``[b, s, hk, blocks]``; some of those that a token does not see are not written."""
    tiles = (length + ROWS - 1) // ROWS
    tile = tiles - 1 - tl.program_id(0) % tiles  # the longest first
    hk = tl.program_id(0) // tiles % kv_heads
    b = tl.program_id(0) // tiles // kv_heads
    t = tile * ROWS + tl.arange(0, ROWS)
    real = t < length
    token = b.to(tl.int64) * length
    low, high = visible_means(firsts, completes, token, t, real, size, blocks)
    means_base = (b.to(tl.int64) * blocks * kv_heads + hk) * (PIECES * D)
    begin = tl.min(low, 0)
    for at in tl.range(0, tl.max(high, 0) - begin, KEYS, num_stages=1):
        first = begin + at
        score = group_scores(
            q, means, base, rest, token, t, real, first, means_base, heads, kv_heads, hk, blocks,
            slope, sign, D, COLUMNS, GROUP, KEYS, PIECES,
        )  # fmt: skip
        c = first + tl.arange(0, KEYS)[None, :]
        row = ((token + t) * kv_heads + hk) * blocks
        tl.store(scores + row[:, None] + c, score, mask=real[:, None] & (c < blocks))

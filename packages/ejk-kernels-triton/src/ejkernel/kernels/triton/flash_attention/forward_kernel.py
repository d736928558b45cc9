"""Flash attention, forward.

Math, per query head and row i over the visible keys j (base 2 inside):

    x_ij = scale * q_i . k_j (+ bias_ij), soft-capped;  lse_i = log(sum_j exp x_ij + exp sink)
    o_i  = sum_j drop(exp(x_ij - lse_i)) v_j

Work split: one program per (query block, batch row, query head). It walks the key blocks its
rows can see: first those that need no element mask, then the others. Programs are ordered by
head, and inside a causal head the longest rows come first, so that the last programs to start
are the shortest.

Bound: 4 * q * k * d FLOPs per head over the visible part, against reading q, k, v and writing o
once. At B4 S4096 H16 D128 full: 0.55 TFLOP, 0.27 GB: arithmetic, by an order of magnitude; at
D64 one exp2 per 256 FLOPs makes the special-function unit nearly as long as the products.

Sources: Dao, "FlashAttention-2" (2023), sections 3.1 and 3.2 (loop order, work split);
Shah et al., "FlashAttention-3" (2024), section 3.1 (TMA-fed products on Hopper).
"""

from __future__ import annotations

import triton
import triton.language as tl
from ejkernel.kernels.triton.common.dropout import kept, load_row_words, mixed_words, words_from
from ejkernel.kernels.triton.common.softmax import LN2, LOG2E, fused_softmax, online_softmax
from ejkernel.kernels.triton.common.structure import (
    band_blocks,
    first_visit,
    given_blocks,
    in_order,
    phase_block,
    phase_steps,
)
from ejkernel.kernels.triton.common.tiles import load_tile, store_tile
from ejkernel.kernels.triton.flash_attention.scores import (
    load_bias,
    mask_unseen,
    program_of,
    tile_logits,
)

LARGE = tl.constexpr(2.0**16)  # from here on what is rounded away moves probabilities by a percent


@triton.jit
def flash_fwd(
    q,
    k,
    k_rest,
    v,
    v_rest,
    sink,
    q_ids,
    kv_ids,
    q_positions,
    kv_positions,
    mask,
    bias,
    words,
    ranges,
    listed,
    order,
    o,
    lse,
    base,
    rest,
    q_len,
    kv_len,
    heads,
    kv_heads,
    q_blocks,
    batch,
    lo,
    hi,
    position_lo,
    position_hi,
    chunk,
    chunk_offset,
    scale,
    slope,
    power,
    large,
    unit,
    shift,
    peak,
    cap_in,
    keep_threshold,
    keep_scale,
    ids_stride,
    positions_stride,
    sink_batch,
    ranges_batch,
    ranges_head,
    mask_batch,
    mask_head,
    bias_batch,
    bias_head,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_REST: tl.constexpr,
    DV_MAIN: tl.constexpr,
    DV_REST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    TMA: tl.constexpr,
    BIAS_TMA: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    POSITION_LO: tl.constexpr,
    POSITION_HI: tl.constexpr,
    MASK_Q: tl.constexpr,
    MASK_KV: tl.constexpr,
    HAS_FULL: tl.constexpr,
    HAS_PARTIAL: tl.constexpr,
    EVEN_KV: tl.constexpr,
    CAPPED: tl.constexpr,
    FUSED: tl.constexpr,
    FIXED: tl.constexpr,
    MULTIPLY_ADD: tl.constexpr,
    DROPOUT: tl.constexpr,
    SCALED: tl.constexpr,
    LONGEST_FIRST: tl.constexpr,
    ORDER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    if order is not None:
        pid = in_order(order, pid, q_blocks * heads, ranges_batch)
    block, b, h = program_of(pid, q_blocks, batch, heads, ORDER)
    if LONGEST_FIRST:
        block = q_blocks - 1 - block
    hk = h // (heads // kv_heads)
    first = block * BLOCK_Q
    i = first + tl.arange(0, BLOCK_Q)
    q_token = b.to(tl.int64) * q_len
    kv_token = b.to(tl.int64) * kv_len

    row = b * ranges_batch + h * ranges_head + block
    if listed is not None:
        visit, following, full_stop, stop = first_visit(listed, row, kv_len, BLOCK_KV)
        start, full_start = 0, 0
    elif ranges is not None:
        start, full_start, full_stop, stop = given_blocks(ranges, row)
    else:
        last = tl.minimum(first + BLOCK_Q, q_len) - 1
        start, full_start, full_stop, stop = band_blocks(
            first, last, kv_len, lo, hi, HAS_LO, HAS_HI, BLOCK_KV
        )

    CHECK_D: tl.constexpr = D_MAIN + D_REST != D
    CHECK_DV: tl.constexpr = DV_MAIN + DV_REST != DV
    q_main = load_tile(
        q, q_token, first, q_len, h * D, heads * D, D, BLOCK_Q, D_MAIN, False, True,
        D_MAIN > D,
    )  # fmt: skip
    if D_REST > 0:
        q_more = load_tile(
            q, q_token, first, q_len, h * D + D_MAIN, heads * D, D - D_MAIN, BLOCK_Q, D_REST,
            False, True, CHECK_D,
        )  # fmt: skip

    rows = (b * heads + h).to(tl.int64) * q_len
    if DROPOUT:
        row_r, row_s = load_row_words(words, rows, i, q_len)
        column = tl.arange(0, BLOCK_KV)
        # a zero the compiler does not know: a select of constants moves behind the conversion
        # of p, element by element instead of by pairs
        zero = keep_scale * 0.0

    m = tl.full([BLOCK_Q], 0.0 if FIXED else float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)  # noqa: E741
    e = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, DV_MAIN], tl.float32)
    if DV_REST > 0:
        acc_more = tl.zeros([BLOCK_Q, DV_REST], tl.float32)

    for phase in tl.static_range(0 if HAS_FULL else 1, 2 if HAS_PARTIAL else 1):
        # phase 0: blocks every row sees; phase 1: blocks that need an element mask
        steps = phase_steps(start, full_start, full_stop, stop, phase, HAS_FULL)
        for t in tl.range(0, steps):
            if listed is not None:
                kv_block = following
                visit += 1
                following = tl.load(visit).to(tl.int32)
            else:
                kv_block = phase_block(t, start, full_start, full_stop, phase, HAS_FULL)
            j0 = kv_block * BLOCK_KV
            j = j0 + tl.arange(0, BLOCK_KV)

            k_main = load_tile(
                k, kv_token, j0, kv_len, hk * D, kv_heads * D, D, BLOCK_KV, D_MAIN, TMA,
                (phase == 1) and not EVEN_KV,
                D_MAIN > D,
            )  # fmt: skip
            more = load_bias(
                bias, i, j, first, j0, b, h, q_len, kv_len, bias_batch, bias_head,
                BIAS_TMA, False, True, (phase == 0) or EVEN_KV,
            )  # fmt: skip
            if DROPOUT:
                # while products run
                row_from = words_from(row_r, j0, keep_threshold)
                mixed = mixed_words(row_from[:, None], row_s[:, None], column[None, :])
            s = tl.dot(q_main, tl.trans(k_main), input_precision=PRECISION)
            if D_REST > 0:
                k_more = load_tile(
                    k_rest, kv_token, j0, kv_len, hk * D + D_MAIN, kv_heads * D, D - D_MAIN,
                    BLOCK_KV, D_REST, TMA, (phase == 1) and not EVEN_KV, CHECK_D,
                )  # fmt: skip
                s = tl.dot(q_more, tl.trans(k_more), s, input_precision=PRECISION)

            v_main = load_tile(
                v, kv_token, j0, kv_len, hk * DV, kv_heads * DV, DV, BLOCK_KV, DV_MAIN, TMA,
                (phase == 1) and not EVEN_KV,
                DV_MAIN > DV,
            )  # fmt: skip
            if (phase == 1) and TMA and not EVEN_KV:
                # a descriptor reads on into the next sequence, and 0 * inf is not 0
                v_main = tl.where((j < kv_len)[:, None], v_main, 0.0)
            s = tile_logits(s, more, scale, cap_in, CAPPED, SCALED)
            if phase == 1:
                s = mask_unseen(
                    s, i[:, None], j[None, :], b, h, q_len, kv_len, lo, hi, chunk, chunk_offset,
                    q_ids, kv_ids, ids_stride, q_positions, kv_positions, positions_stride,
                    position_lo, position_hi, mask, mask_batch, mask_head, MASK_Q, MASK_KV,
                    HAS_LO, HAS_HI, POSITION_LO, POSITION_HI, EVEN_KV,
                )  # fmt: skip

            if FIXED:
                p = tl.exp2(s * slope - peak)
                l += tl.sum(p, 1)  # noqa: E741
            else:
                if MULTIPLY_ADD:
                    p, m, l, e, alpha = fused_softmax(  # noqa: E741
                        s, m, l, e, slope, power, large, (phase == 1) or bias is not None
                    )
                else:
                    p, m, l, alpha = online_softmax(  # noqa: E741
                        s, m, l, slope, False, (phase == 1) or bias is not None
                    )
                acc = acc * alpha[:, None]
                if DV_REST > 0:
                    acc_more = acc_more * alpha[:, None]
            if DROPOUT:
                keep = kept(mixed, keep_threshold)
                p = tl.where(keep, p, zero)

            p = p.to(v_main.dtype)
            acc = tl.dot(p, v_main, acc, input_precision=PRECISION)
            if DV_REST > 0:
                v_more = load_tile(
                    v_rest, kv_token, j0, kv_len, hk * DV + DV_MAIN, kv_heads * DV, DV - DV_MAIN,
                    BLOCK_KV, DV_REST, TMA,
                    (phase == 1) and not EVEN_KV, CHECK_DV,
                )  # fmt: skip
                if (phase == 1) and TMA and not EVEN_KV:
                    v_more = tl.where((j < kv_len)[:, None], v_more, 0.0)
                acc_more = tl.dot(p, v_more, acc_more, input_precision=PRECISION)

    alive = l > 0.0
    top = tl.where(alive, m, 0.0) * unit + shift  # the largest logit, as the caller counts them
    # what fused_softmax carried along
    shrink = tl.exp2(-e) if MULTIPLY_ADD and not FIXED else 1.0
    low = tl.where(alive, l, 1.0) * shrink
    if sink is not None:
        # one more logit per row, never in the output; a row without keys stays empty
        extra = tl.load(sink + b * sink_batch + h)
        whole = tl.maximum(top, extra)
        above = (whole - top) * LOG2E
        share = tl.exp2(-above)
        low = low * share + tl.exp2((extra - whole) * LOG2E)
        factor = share * shrink / low
        top = whole
        low = tl.log2(low)
        less = low + above
    else:
        factor = shrink / low
        low = tl.log2(low)
        less = low
    if DROPOUT:
        factor = factor * keep_scale
    factor = tl.where(alive, factor, 0.0)
    tl.store(lse + rows + i, tl.where(alive, top + low * LN2, float("-inf")), mask=i < q_len)
    # lse for the backward kernels: as m, in whose units the largest logit is exact. Beside a large
    # one log l is rounded away, so with a bias, where rows of one large number are common, it is
    # stored by itself
    if rest is not None:
        apart = alive & (tl.abs(m) >= LARGE)
        tl.store(rest + rows + i, tl.where(apart, less, 0.0), mask=i < q_len)
        less = tl.where(apart, 0.0, less)
    if FIXED:
        less += peak
    row_base = (m * slope + less) if FUSED else (m + less / slope)
    row_base = tl.where(alive, row_base, float("inf"))
    tl.store(base + rows + i, row_base, mask=i < q_len)
    store_tile(
        o, acc * factor[:, None], q_token, first, q_len, h * DV, heads * DV, DV, BLOCK_Q, DV_MAIN
    )
    if DV_REST > 0:
        store_tile(
            o, acc_more * factor[:, None], q_token, first, q_len, h * DV + DV_MAIN, heads * DV,
            DV - DV_MAIN, BLOCK_Q, DV_REST,
        )  # fmt: skip

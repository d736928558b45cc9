"""Flash attention, backward: the gradient of the queries.

With p recomputed from q, k and the saved lse, per query head and row i:

    dp_ij = drop'(do_i . v_j);  delta_i = do_i . o_i - dlse_i
    ds_ij = p_ij * (dp_ij - delta_i) * (1 - t_ij^2 with a soft cap)
    dq_i  = scale * sum_j ds_ij k_j

Work split: one program per (query block, batch row, query head) over the key blocks its rows
see, as in the forward pass; no other program writes these rows, so the sum has one order.

Bound: 6 * q * k * d FLOPs per head over the visible part (three products), memory as forward.
Together with the key gradients: 14 * q * k * d, of which 4 recompute s and dp a second time; this
is the price of sums without atomics, at most 10 / 14 of the product rate in nominal terms.

Sources: Dao, "FlashAttention-2" (2023), section 3.1.2 (recomputation from lse, delta).
"""

from __future__ import annotations

import triton
import triton.language as tl
from ejkernel.kernels.triton.common.dropout import kept, load_row_words, mixed_words, words_from
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
    cap_slope,
    load_bias,
    load_rows,
    mask_unseen,
    probabilities,
    program_of,
    tile_logits,
)


@triton.jit
def flash_bwd_dq(
    q,
    k,
    k_rest,
    v,
    v_rest,
    do,
    base,
    delta,
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
    dq,
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
    grad_scale,
    cap_in,
    keep_threshold,
    ids_stride,
    positions_stride,
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
    do_main = load_tile(
        do, q_token, first, q_len, h * DV, heads * DV, DV, BLOCK_Q, DV_MAIN, False, True,
        DV_MAIN > DV,
    )  # fmt: skip
    acc = tl.zeros([BLOCK_Q, D_MAIN], tl.float32)
    if D_REST > 0:
        q_more = load_tile(
            q, q_token, first, q_len, h * D + D_MAIN, heads * D, D - D_MAIN, BLOCK_Q, D_REST,
            False, True, CHECK_D,
        )  # fmt: skip
        acc_more = tl.zeros([BLOCK_Q, D_REST], tl.float32)
    if DV_REST > 0:
        do_more = load_tile(
            do, q_token, first, q_len, h * DV + DV_MAIN, heads * DV, DV - DV_MAIN, BLOCK_Q,
            DV_REST, False, True, CHECK_DV,
        )  # fmt: skip
    rows = (b * heads + h).to(tl.int64) * q_len
    row_base = load_rows(base + rows, i, q_len, float("inf"), False)[:, None]
    row_delta = load_rows(delta + rows, i, q_len, 0.0, False)[:, None]
    if DROPOUT:
        row_r, row_s = load_row_words(words, rows, i, q_len)
        column = tl.arange(0, BLOCK_KV)

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
                (phase == 1) and not EVEN_KV, D_MAIN > D,
            )  # fmt: skip
            if (phase == 1) and TMA and not EVEN_KV:
                # a descriptor reads on into the next sequence, and 0 * inf is not 0
                k_main = tl.where((j < kv_len)[:, None], k_main, 0.0)
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
                if (phase == 1) and TMA and not EVEN_KV:
                    k_more = tl.where((j < kv_len)[:, None], k_more, 0.0)
                s = tl.dot(q_more, tl.trans(k_more), s, input_precision=PRECISION)

            v_main = load_tile(
                v, kv_token, j0, kv_len, hk * DV, kv_heads * DV, DV, BLOCK_KV, DV_MAIN, TMA,
                (phase == 1) and not EVEN_KV, DV_MAIN > DV,
            )  # fmt: skip
            if (phase == 1) and TMA and not EVEN_KV:
                v_main = tl.where((j < kv_len)[:, None], v_main, 0.0)
            dp = tl.dot(do_main, tl.trans(v_main), input_precision=PRECISION)
            if DV_REST > 0:
                v_more = load_tile(
                    v_rest, kv_token, j0, kv_len, hk * DV + DV_MAIN, kv_heads * DV, DV - DV_MAIN,
                    BLOCK_KV, DV_REST, TMA, (phase == 1) and not EVEN_KV, CHECK_DV,
                )  # fmt: skip
                if (phase == 1) and TMA and not EVEN_KV:
                    v_more = tl.where((j < kv_len)[:, None], v_more, 0.0)
                dp = tl.dot(do_more, tl.trans(v_more), dp, input_precision=PRECISION)

            s = tile_logits(s, more, scale, cap_in, CAPPED, SCALED)
            if CAPPED:
                steep = cap_slope(s)
            if phase == 1:
                s = mask_unseen(
                    s, i[:, None], j[None, :], b, h, q_len, kv_len, lo, hi, chunk, chunk_offset,
                    q_ids, kv_ids, ids_stride, q_positions, kv_positions, positions_stride,
                    position_lo, position_hi, mask, mask_batch, mask_head, MASK_Q, MASK_KV,
                    HAS_LO, HAS_HI, POSITION_LO, POSITION_HI, EVEN_KV,
                )  # fmt: skip
            p = probabilities(s, row_base, slope, FUSED)
            if CAPPED:
                p = p * steep
            if DROPOUT:
                # less the factor keep_scale, which dq gets in the end
                keep = kept(mixed, keep_threshold)
                ds = tl.where(keep, p, 0.0) * dp - p * row_delta
            else:
                ds = p * (dp - row_delta)
            ds = ds.to(k_main.dtype)
            acc = tl.dot(ds, k_main, acc, input_precision=PRECISION)
            if D_REST > 0:
                acc_more = tl.dot(ds, k_more, acc_more, input_precision=PRECISION)

    store_tile(dq, acc * grad_scale, q_token, first, q_len, h * D, heads * D, D, BLOCK_Q, D_MAIN)
    if D_REST > 0:
        store_tile(
            dq, acc_more * grad_scale, q_token, first, q_len, h * D + D_MAIN, heads * D,
            D - D_MAIN, BLOCK_Q, D_REST,
        )  # fmt: skip

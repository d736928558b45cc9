"""Flash attention, backward: the gradient of the bias.

    dbias_ij = sum over the batch rows and heads that share the bias of
               p_ij * (dp_ij - delta_i) * (1 - t_ij^2 with a soft cap)

Work split: one program per (bias row, bias head, query block, key block). It recomputes its tile
for every batch row and head in turn and writes it once: no atomics, no array larger than the
bias. Tiles that no row sees are written as zeros.

Bound: 4 * q * k * d FLOPs per head (two products) against writing the bias once: a bias per head
and batch row is bound by that write from d of about 100 down, a shared one by the products.
"""

from __future__ import annotations

import triton
import triton.language as tl
from ejkernel.kernels.triton.common.dropout import kept, load_row_words, mixed_words
from ejkernel.kernels.triton.common.structure import band_blocks
from ejkernel.kernels.triton.common.tiles import load_tile
from ejkernel.kernels.triton.flash_attention.scores import (
    cap_slope,
    load_bias,
    load_rows,
    mask_unseen,
    probabilities,
    tile_logits,
)


@triton.jit
def flash_bwd_dbias(
    q,
    k,
    v,
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
    dbias,
    q_len,
    kv_len,
    heads,
    kv_heads,
    q_blocks,
    kv_blocks,
    sum_batch,
    sum_heads,
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
    BIAS_TMA: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    POSITION_LO: tl.constexpr,
    POSITION_HI: tl.constexpr,
    MASK_Q: tl.constexpr,
    MASK_KV: tl.constexpr,
    HAS_FULL: tl.constexpr,
    CAPPED: tl.constexpr,
    FUSED: tl.constexpr,
    DROPOUT: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    kv_block = pid % kv_blocks
    q_block = (pid // kv_blocks) % q_blocks
    out = pid // (kv_blocks * q_blocks)  # row of the bias: batch row slowest, then head
    bias_heads = heads // sum_heads
    b_out = out // bias_heads
    h_out = out % bias_heads
    i0 = q_block * BLOCK_Q
    j0 = kv_block * BLOCK_KV
    i = i0 + tl.arange(0, BLOCK_Q)
    j = j0 + tl.arange(0, BLOCK_KV)
    last = tl.minimum(i0 + BLOCK_Q, q_len) - 1
    start, _, _, stop = band_blocks(i0, last, kv_len, lo, hi, HAS_LO, HAS_HI, BLOCK_KV)
    members = sum_batch * sum_heads
    if (kv_block < start) | (kv_block >= stop):
        members = 0

    acc = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    for member in tl.range(0, members):
        b = b_out * sum_batch + member // sum_heads
        h = h_out * sum_heads + member % sum_heads
        hk = h // (heads // kv_heads)
        q_token = b.to(tl.int64) * q_len
        kv_token = b.to(tl.int64) * kv_len
        q_main = load_tile(
            q, q_token, i0, q_len, h * D, heads * D, D, BLOCK_Q, D_MAIN, False, True, True
        )
        k_main = load_tile(
            k, kv_token, j0, kv_len, hk * D, kv_heads * D, D, BLOCK_KV, D_MAIN, False, True, True
        )
        s = tl.dot(q_main, tl.trans(k_main), input_precision=PRECISION)
        if D_REST > 0:
            q_more = load_tile(
                q, q_token, i0, q_len, h * D + D_MAIN, heads * D, D - D_MAIN, BLOCK_Q, D_REST,
                False, True, True,
            )  # fmt: skip
            k_more = load_tile(
                k, kv_token, j0, kv_len, hk * D + D_MAIN, kv_heads * D, D - D_MAIN, BLOCK_KV,
                D_REST, False, True, True,
            )  # fmt: skip
            s = tl.dot(q_more, tl.trans(k_more), s, input_precision=PRECISION)
        do_main = load_tile(
            do, q_token, i0, q_len, h * DV, heads * DV, DV, BLOCK_Q, DV_MAIN, False, True, True
        )
        v_main = load_tile(
            v, kv_token, j0, kv_len, hk * DV, kv_heads * DV, DV, BLOCK_KV, DV_MAIN, False, True,
            True,
        )  # fmt: skip
        dp = tl.dot(do_main, tl.trans(v_main), input_precision=PRECISION)
        if DV_REST > 0:
            do_more = load_tile(
                do, q_token, i0, q_len, h * DV + DV_MAIN, heads * DV, DV - DV_MAIN, BLOCK_Q,
                DV_REST, False, True, True,
            )  # fmt: skip
            v_more = load_tile(
                v, kv_token, j0, kv_len, hk * DV + DV_MAIN, kv_heads * DV, DV - DV_MAIN, BLOCK_KV,
                DV_REST, False, True, True,
            )  # fmt: skip
            dp = tl.dot(do_more, tl.trans(v_more), dp, input_precision=PRECISION)
        rows = (b * heads + h).to(tl.int64) * q_len
        row_base = load_rows(base + rows, i, q_len, float("inf"), False)[:, None]
        row_delta = load_rows(delta + rows, i, q_len, 0.0, False)[:, None]
        more = load_bias(
            bias, i, j, i0, j0, b, h, q_len, kv_len, bias_batch, bias_head,
            BIAS_TMA, False, True, False,
        )  # fmt: skip
        s = tile_logits(s, more, scale, cap_in, CAPPED, SCALED)
        if CAPPED:
            steep = cap_slope(s)
        s = mask_unseen(
            s, i[:, None], j[None, :], b, h, q_len, kv_len, lo, hi, chunk, chunk_offset,
            q_ids, kv_ids, ids_stride, q_positions, kv_positions, positions_stride,
            position_lo, position_hi, mask, mask_batch, mask_head, MASK_Q, MASK_KV,
            HAS_LO, HAS_HI, POSITION_LO, POSITION_HI, True,
        )  # fmt: skip
        p = probabilities(s, row_base, slope, FUSED)
        if CAPPED:
            p = p * steep
        if DROPOUT:
            row_r, row_s = load_row_words(words, rows, i, q_len)
            mixed = mixed_words(row_r[:, None], row_s[:, None], j[None, :])
            keep = kept(mixed, keep_threshold)
            acc += tl.where(keep, p, 0.0) * dp - p * row_delta
        else:
            acc += p * (dp - row_delta)

    at = i.to(tl.int64)[:, None] * kv_len + j[None, :]
    tl.store(
        dbias + out.to(tl.int64) * q_len * kv_len + at,
        acc * grad_scale,
        mask=(i < q_len)[:, None] & (j < kv_len)[None, :],
    )

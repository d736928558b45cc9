"""Flash attention, backward: the gradients of keys and values.

With p and ds as in ``dq_kernel``, per key head and key j, summed over the query heads that share
it and the rows that see it:

    dv_j = sum_i drop'(p_ij) do_i;    dk_j = scale * sum_i ds_ij q_i

Work split: one program per (key block, batch row, key head). It walks the query blocks that see
its keys, for each query head of the group in turn, on transposed tiles [keys, rows], so that p
and ds are already laid out for the products that consume them. One program owns its keys: sums
over rows and over the group have one order, without atomics. A launch computes both gradients, or
one of them (the other given as None): wide heads do not have registers for both sums.

Bound: 8 * q * k * d FLOPs per query head over the visible part (four products); bytes as forward
plus q and do once per key block from L2. At B4 S4096 H16 D128: 1.1 TFLOP: arithmetic.

Sources: Dao, "FlashAttention-2" (2023), section 3.1.2 (loop over queries inside).
"""

from __future__ import annotations

import triton
import triton.language as tl
from ejkernel.kernels.triton.common.dropout import kept, load_row_words, mixed_words
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
def flash_bwd_dkv(
    q,
    q_rest,
    k,
    v,
    do,
    do_rest,
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
    dk,
    dv,
    q_len,
    kv_len,
    heads,
    kv_heads,
    kv_blocks,
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
    keep_scale,
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
    GROUP: tl.constexpr,
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
    EVEN_Q: tl.constexpr,
    EVEN_KV: tl.constexpr,
    CAPPED: tl.constexpr,
    FUSED: tl.constexpr,
    DROPOUT: tl.constexpr,
    DP_LATE: tl.constexpr,
    SCALED: tl.constexpr,
    LONGEST_FIRST: tl.constexpr,
    ORDER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    if order is not None:
        pid = in_order(order, pid, kv_blocks * kv_heads, ranges_batch)
    block, b, hk = program_of(pid, kv_blocks, batch, kv_heads, ORDER)
    if LONGEST_FIRST:
        block = kv_blocks - 1 - block
    first = block * BLOCK_KV
    j = first + tl.arange(0, BLOCK_KV)
    q_token = b.to(tl.int64) * q_len
    kv_token = b.to(tl.int64) * kv_len

    if listed is None and ranges is None:
        last = tl.minimum(first + BLOCK_KV, kv_len) - 1
        start, full_start, full_stop, stop = band_blocks(
            first, last, q_len, -hi, -lo, HAS_HI, HAS_LO, BLOCK_Q
        )

    WANT_DK: tl.constexpr = dk is not None
    WANT_DV: tl.constexpr = dv is not None
    CHECK_D: tl.constexpr = D_MAIN + D_REST != D
    CHECK_DV: tl.constexpr = DV_MAIN + DV_REST != DV
    k_main = load_tile(
        k, kv_token, first, kv_len, hk * D, kv_heads * D, D, BLOCK_KV, D_MAIN, False, True,
        D_MAIN > D,
    )  # fmt: skip
    if WANT_DK:
        v_main = load_tile(
            v, kv_token, first, kv_len, hk * DV, kv_heads * DV, DV, BLOCK_KV, DV_MAIN, False,
            True, DV_MAIN > DV,
        )  # fmt: skip
        dk_main = tl.zeros([BLOCK_KV, D_MAIN], tl.float32)
        if DV_REST > 0:
            v_more = load_tile(
                v, kv_token, first, kv_len, hk * DV + DV_MAIN, kv_heads * DV, DV - DV_MAIN,
                BLOCK_KV, DV_REST, False, True, CHECK_DV,
            )  # fmt: skip
        if D_REST > 0:
            dk_more = tl.zeros([BLOCK_KV, D_REST], tl.float32)
    if WANT_DV:
        dv_main = tl.zeros([BLOCK_KV, DV_MAIN], tl.float32)
        if DV_REST > 0:
            dv_more = tl.zeros([BLOCK_KV, DV_REST], tl.float32)
    if D_REST > 0:
        k_more = load_tile(
            k, kv_token, first, kv_len, hk * D + D_MAIN, kv_heads * D, D - D_MAIN, BLOCK_KV,
            D_REST, False, True, CHECK_D,
        )  # fmt: skip

    # a zero the compiler does not know, as in the forward kernel
    zero = keep_scale * 0.0
    # hoisting what is cheap to compute again out of three nested loops costs registers
    for member in tl.range(0, GROUP, disable_licm=True):
        h = hk * GROUP + member
        row = b * ranges_batch + h * ranges_head + block
        if listed is not None:
            visit, following, full_stop, stop = first_visit(listed, row, q_len, BLOCK_Q)
            start, full_start = 0, 0
        elif ranges is not None:
            start, full_start, full_stop, stop = given_blocks(ranges, row)
        rows = (b * heads + h).to(tl.int64) * q_len
        for phase in tl.static_range(0 if HAS_FULL else 1, 2 if HAS_PARTIAL else 1):
            # phase 0: blocks whose every row sees every key; phase 1: the others
            steps = phase_steps(start, full_start, full_stop, stop, phase, HAS_FULL)
            for t in tl.range(0, steps, disable_licm=GROUP > 1):
                if listed is not None:
                    q_block = following
                    visit += 1
                    following = tl.load(visit).to(tl.int32)
                else:
                    q_block = phase_block(t, start, full_start, full_stop, phase, HAS_FULL)
                i0 = q_block * BLOCK_Q
                i = i0 + tl.arange(0, BLOCK_Q)

                q_main = load_tile(
                    q, q_token, i0, q_len, h * D, heads * D, D, BLOCK_Q, D_MAIN, TMA,
                    (phase == 1) and not EVEN_Q, D_MAIN > D,
                )  # fmt: skip
                if (phase == 1) and TMA and not EVEN_Q:
                    # a descriptor reads on into the next sequence, and 0 * inf is not 0
                    q_main = tl.where((i < q_len)[:, None], q_main, 0.0)
                more = load_bias(
                    bias, i, j, i0, first, b, h, q_len, kv_len, bias_batch, bias_head,
                    BIAS_TMA, True, EVEN_Q, EVEN_KV,
                )  # fmt: skip
                s = tl.dot(k_main, tl.trans(q_main), input_precision=PRECISION)
                if D_REST > 0:
                    q_more = load_tile(
                        q_rest, q_token, i0, q_len, h * D + D_MAIN, heads * D, D - D_MAIN,
                        BLOCK_Q, D_REST, TMA, (phase == 1) and not EVEN_Q, CHECK_D,
                    )  # fmt: skip
                    if (phase == 1) and TMA and not EVEN_Q:
                        q_more = tl.where((i < q_len)[:, None], q_more, 0.0)
                    s = tl.dot(k_more, tl.trans(q_more), s, input_precision=PRECISION)

                do_main = load_tile(
                    do, q_token, i0, q_len, h * DV, heads * DV, DV, BLOCK_Q, DV_MAIN, TMA,
                    (phase == 1) and not EVEN_Q, DV_MAIN > DV,
                )  # fmt: skip
                if (phase == 1) and TMA and not EVEN_Q:
                    do_main = tl.where((i < q_len)[:, None], do_main, 0.0)
                if DV_REST > 0:
                    do_more = load_tile(
                        do_rest, q_token, i0, q_len, h * DV + DV_MAIN, heads * DV, DV - DV_MAIN,
                        BLOCK_Q, DV_REST, TMA, (phase == 1) and not EVEN_Q, CHECK_DV,
                    )  # fmt: skip
                    if (phase == 1) and TMA and not EVEN_Q:
                        do_more = tl.where((i < q_len)[:, None], do_more, 0.0)
                row_base = load_rows(base + rows, i, q_len, float("inf"), EVEN_Q)[None, :]
                if WANT_DK and not DP_LATE:
                    dp = tl.dot(v_main, tl.trans(do_main), input_precision=PRECISION)
                    if DV_REST > 0:
                        dp = tl.dot(v_more, tl.trans(do_more), dp, input_precision=PRECISION)

                if DROPOUT:
                    # while the product runs
                    row_r, row_s = load_row_words(words, rows, i, q_len)
                    mixed = mixed_words(row_r[None, :], row_s[None, :], j[:, None])
                s = tile_logits(s, more, scale, cap_in, CAPPED, SCALED)
                if CAPPED and WANT_DK:
                    steep = cap_slope(s)
                if phase == 1:
                    s = mask_unseen(
                        s, i[None, :], j[:, None], b, h, q_len, kv_len, lo, hi, chunk, chunk_offset,
                        q_ids, kv_ids, ids_stride, q_positions, kv_positions, positions_stride,
                        position_lo, position_hi, mask, mask_batch, mask_head, MASK_Q, MASK_KV,
                        HAS_LO, HAS_HI, POSITION_LO, POSITION_HI, True,
                    )  # fmt: skip
                p = probabilities(s, row_base, slope, FUSED)
                pd = p
                if DROPOUT:
                    keep = kept(mixed, keep_threshold)
                    pd = tl.where(keep, p, zero)
                if WANT_DV:
                    kept_p = pd.to(do_main.dtype)
                if CAPPED and WANT_DK:
                    p = p * steep
                    pd = pd * steep
                if WANT_DV:
                    dv_main = tl.dot(kept_p, do_main, dv_main, input_precision=PRECISION)
                    if DV_REST > 0:
                        dv_more = tl.dot(kept_p, do_more, dv_more, input_precision=PRECISION)
                if WANT_DK:
                    if DP_LATE:
                        dp = tl.dot(v_main, tl.trans(do_main), input_precision=PRECISION)
                        if DV_REST > 0:
                            dp = tl.dot(v_more, tl.trans(do_more), dp, input_precision=PRECISION)
                    row_delta = load_rows(delta + rows, i, q_len, 0.0, EVEN_Q)[None, :]
                    if DROPOUT:
                        # less the factor keep_scale, which dk gets in the end
                        ds = pd * dp - p * row_delta
                    else:
                        ds = p * (dp - row_delta)
                    ds = ds.to(q_main.dtype)
                    dk_main = tl.dot(ds, q_main, dk_main, input_precision=PRECISION)
                    if D_REST > 0:
                        dk_more = tl.dot(ds, q_more, dk_more, input_precision=PRECISION)

    if WANT_DK:
        store_tile(
            dk, dk_main * grad_scale, kv_token, first, kv_len, hk * D, kv_heads * D, D, BLOCK_KV,
            D_MAIN,
        )  # fmt: skip
        if D_REST > 0:
            store_tile(
                dk, dk_more * grad_scale, kv_token, first, kv_len, hk * D + D_MAIN, kv_heads * D,
                D - D_MAIN, BLOCK_KV, D_REST,
            )  # fmt: skip
    if WANT_DV:
        if DROPOUT:
            dv_main = dv_main * keep_scale
        store_tile(
            dv, dv_main, kv_token, first, kv_len, hk * DV, kv_heads * DV, DV, BLOCK_KV, DV_MAIN
        )
        if DV_REST > 0:
            if DROPOUT:
                dv_more = dv_more * keep_scale
            store_tile(
                dv, dv_more, kv_token, first, kv_len, hk * DV + DV_MAIN, kv_heads * DV,
                DV - DV_MAIN, BLOCK_KV, DV_REST,
            )  # fmt: skip

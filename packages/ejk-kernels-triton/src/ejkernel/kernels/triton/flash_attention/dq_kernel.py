"""Flash attention, backward: the gradient of the queries.

With p recomputed from q, k and the saved lse, per query head and row i:

    dp_ij = drop'(do_i . v_j);  delta_i = do_i . o_i - dlse_i
    ds_ij = p_ij * (dp_ij - delta_i) * (1 - t_ij^2 with a soft cap)
    dq_i  = scale * sum_j ds_ij k_j

Work split: one program per (query block, batch row, query head) over the key blocks its rows
see, as in the forward pass; no other program writes these rows, so the sum has one order.

Bound: 6 * q * k * d FLOPs per head over the visible part (three matmuls), memory as forward.
Together with the key gradients: 14 * q * k * d, of which 4 recompute s and dp a second time; this
is the price of avoiding atomics: at most 10 / 14 of the nominal MMA rate.

Sources: Dao, "FlashAttention-2" (2023), section 3.1.2 (recomputation from lse, delta).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.common.dropout import (
    keep_mask,
    load_row_words,
    mix_words,
    offset_row_words,
)
from ejkernel.kernels.triton.common.head_tiles import (
    TilePosition,
    add_matmul_parts,
    load_tile,
    load_tiles,
    matmul_parts,
    store_tiles,
    zero_tiles,
)
from ejkernel.kernels.triton.common.visibility import phase_block, phase_steps
from ejkernel.kernels.triton.flash_attention.launch import GRADIENT_OPERANDS, QueryBlockLaunch
from ejkernel.kernels.triton.flash_attention.scores import (
    key_blocks,
    load_bias,
    load_rows,
    mask_unseen,
    probabilities,
    program_of,
    tile_logits_and_slope,
    times_slope,
)
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import struct


@triton.jit
def flash_bwd_dq(
    q,
    k,
    v,
    do,
    base,
    delta,
    sizes,
    logits,
    schedule,
    rules,
    bias,
    dropout,
    mods,
    dq,
    EVEN_KV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    q_len, kv_len, heads, kv_heads = sizes.q_len, sizes.kv_len, sizes.heads, sizes.kv_heads
    BLOCK_Q: tl.constexpr = q.ROWS
    BLOCK_KV: tl.constexpr = k.ROWS
    block, b, h = program_of(schedule, heads)
    hk = h // (heads // kv_heads)
    first = block * BLOCK_Q
    i = first + tl.arange(0, BLOCK_Q)
    queries = TilePosition(b.to(tl.int64) * q_len, q_len, h, heads)
    keys = TilePosition(b.to(tl.int64) * kv_len, kv_len, hk, kv_heads)

    row = b * schedule.batch_step + h * schedule.head_step + block
    start, full_start, full_stop, stop, visit, following = key_blocks(
        schedule, row, first, sizes, rules, BLOCK_Q, BLOCK_KV
    )

    q_tiles = load_tiles(q, queries, first, True)
    do_tiles = load_tiles(do, queries, first, True)
    acc = zero_tiles(q, BLOCK_Q)
    rows = (b * heads + h).to(tl.int64) * q_len
    row_base = load_rows(base + rows, i, q_len, float("inf"), False)[:, None]
    row_delta = load_rows(delta + rows, i, q_len, 0.0, False)[:, None]
    if dropout is not None:
        row_r, row_s = load_row_words(dropout.words, rows, i, q_len)
        column = tl.arange(0, BLOCK_KV)

    for phase in tl.static_range(0 if schedule.FULL else 1, 2 if schedule.PARTIAL else 1):
        # phase 0: blocks every row sees; phase 1: blocks that need an element mask
        steps = phase_steps(start, full_start, full_stop, stop, phase, schedule.FULL)
        for t in tl.range(0, steps):
            if schedule.listed is not None:
                kv_block = following
                visit += 1
                following = tl.load(visit).to(tl.int32)
            else:
                kv_block = phase_block(t, start, full_start, full_stop, phase, schedule.FULL)
            j0 = kv_block * BLOCK_KV
            j = j0 + tl.arange(0, BLOCK_KV)

            k_tiles = (load_tile(k, 0, keys, j0, (phase == 1) and not EVEN_KV),)
            bias_tile = load_bias(
                bias, i, j, first, j0, b, h, sizes, False, True, (phase == 0) or EVEN_KV
            )
            if dropout is not None:
                # while the matmuls run
                row_from = offset_row_words(row_r, j0, dropout.threshold)
                mixed = mix_words(row_from[:, None], row_s[:, None], column[None, :])
            s, k_tiles = matmul_parts(
                q_tiles, k_tiles, k, keys, j0, (phase == 1) and not EVEN_KV, PRECISION
            )

            v_tiles = (load_tile(v, 0, keys, j0, (phase == 1) and not EVEN_KV),)
            dp, v_tiles = matmul_parts(
                do_tiles, v_tiles, v, keys, j0, (phase == 1) and not EVEN_KV, PRECISION
            )

            s, slope = tile_logits_and_slope(
                s, bias_tile, logits, mods, i[:, None], j[None, :], b, h, sizes
            )
            if phase == 1:
                s = mask_unseen(s, i[:, None], j[None, :], j0, b, h, sizes, rules, mods, EVEN_KV)
            p = probabilities(s, row_base, logits)
            if slope is not None:
                p = times_slope(p, slope, mods)
            if dropout is not None:
                # the dropout scale is applied to dq once, after the loop
                keep = keep_mask(mixed, dropout.threshold)
                ds = tl.where(keep, p, 0.0) * dp - p * row_delta
            else:
                ds = p * (dp - row_delta)
            ds = ds.to(k_tiles[0].dtype)
            acc = add_matmul_parts(acc, ds, k_tiles, k, keys, j0, False, PRECISION)

    acc = [part * logits.gradient for part in acc]
    store_tiles(dq, acc, q, queries, first)


@dataclass(frozen=True)
class DqLaunch(QueryBlockLaunch):
    """Launch of ``flash_bwd_dq``; the result is dq."""

    kernel = flash_bwd_dq
    batching: ClassVar = QueryBlockLaunch.batching | GRADIENT_OPERANDS

    def outputs(self):
        p = self.problem
        return {"dq": struct(p.dtype, p.batch, p.q_len, p.heads, p.dim)}

    def arguments(self, target):
        return super().arguments(target) | {"do": self.heads("do", self.tiles.block_q)}

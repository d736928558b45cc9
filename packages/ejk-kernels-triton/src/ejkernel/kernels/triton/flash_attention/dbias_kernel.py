"""Flash attention, backward: the gradient of the bias.

    dbias_ij = sum over the batch rows and heads that share the bias of
               p_ij * (dp_ij - delta_i) * (1 - t_ij^2 with a soft cap)

Work split: one program per (bias row, bias head, query block, key block). It recomputes its tile
for one batch row and head after another and writes it once: no atomics, no array larger than the
bias. Tiles that no row sees are written as zeros.

Bound: 4 * q * k * d FLOPs per head (two matmuls) against writing the bias once: a bias per head
and batch row is bound by that write if d is about 100 or less, a shared one by the matmuls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.common.dropout import keep_mask, load_row_words, mix_words
from ejkernel.kernels.triton.common.head_tiles import (
    TilePosition,
    load_tile,
    load_tiles,
    matmul_parts,
)
from ejkernel.kernels.triton.common.visibility import band_blocks
from ejkernel.kernels.triton.flash_attention.launch import GRADIENT_OPERANDS, AttentionLaunch
from ejkernel.kernels.triton.flash_attention.scores import (
    load_bias,
    load_rows,
    mask_unseen,
    probabilities,
    tile_logits_and_slope,
    times_slope,
)
from ejkernel.kernels.triton.flash_attention.terms import gradient_factor
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import struct


@triton.jit
def flash_bwd_dbias(
    q,
    k,
    v,
    do,
    base,
    delta,
    sizes,
    q_blocks,
    kv_blocks,
    sum_batch,
    sum_heads,
    rules,
    bias,
    dropout,
    mods,
    logits,
    dbias,
    PRECISION: tl.constexpr,
):
    q_len, kv_len, heads, kv_heads = sizes.q_len, sizes.kv_len, sizes.heads, sizes.kv_heads
    BLOCK_Q: tl.constexpr = q.ROWS
    BLOCK_KV: tl.constexpr = k.ROWS
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
    start, _, _, stop = band_blocks(i0, last, kv_len, rules.lo, rules.hi, BLOCK_KV)
    members = sum_batch * sum_heads
    if (kv_block < start) | (kv_block >= stop):
        members = 0

    acc = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    for member in tl.range(0, members):
        b = b_out * sum_batch + member // sum_heads
        h = h_out * sum_heads + member % sum_heads
        hk = h // (heads // kv_heads)
        queries = TilePosition(b.to(tl.int64) * q_len, q_len, h, heads)
        keys = TilePosition(b.to(tl.int64) * kv_len, kv_len, hk, kv_heads)
        q_tiles = load_tiles(q, queries, i0, True)
        k_tiles = (load_tile(k, 0, keys, j0, True),)
        s, k_tiles = matmul_parts(q_tiles, k_tiles, k, keys, j0, True, PRECISION)
        do_tiles = load_tiles(do, queries, i0, True)
        v_tiles = (load_tile(v, 0, keys, j0, True),)
        dp, v_tiles = matmul_parts(do_tiles, v_tiles, v, keys, j0, True, PRECISION)
        rows = (b * heads + h).to(tl.int64) * q_len
        row_base = load_rows(base + rows, i, q_len, float("inf"), False)[:, None]
        row_delta = load_rows(delta + rows, i, q_len, 0.0, False)[:, None]
        bias_tile = load_bias(bias, i, j, i0, j0, b, h, sizes, False, True, False)
        s, slope = tile_logits_and_slope(
            s, bias_tile, logits, mods, i[:, None], j[None, :], b, h, sizes
        )
        s = mask_unseen(s, i[:, None], j[None, :], j0, b, h, sizes, rules, mods, True)
        p = probabilities(s, row_base, logits)
        if slope is not None:
            p = times_slope(p, slope, mods)
        if dropout is not None:
            row_r, row_s = load_row_words(dropout.words, rows, i, q_len)
            mixed = mix_words(row_r[:, None], row_s[:, None], j[None, :])
            keep = keep_mask(mixed, dropout.threshold)
            acc += tl.where(keep, p, 0.0) * dp - p * row_delta
        else:
            acc += p * (dp - row_delta)

    at = i.to(tl.int64)[:, None] * kv_len + j[None, :]
    tl.store(
        dbias + out.to(tl.int64) * q_len * kv_len + at,
        acc * logits.gradient,
        mask=(i < q_len)[:, None] & (j < kv_len)[None, :],
    )


@dataclass(frozen=True)
class DbiasLaunch(AttentionLaunch):
    """Launch of ``flash_bwd_dbias``; the result is dbias in float32, shaped like the bias.

    ``sum_batch`` batch rows and ``sum_heads`` heads share one row of the bias.
    """

    kernel = flash_bwd_dbias
    batching: ClassVar = AttentionLaunch.batching | GRADIENT_OPERANDS
    iterates = False

    sum_batch: int = 1
    sum_heads: int = 1

    @property
    def gradient(self) -> float:
        return gradient_factor(self.problem)

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of queries and of keys."""
        p, t = self.problem, self.tiles
        return -(-p.q_len // t.block_q), -(-p.kv_len // t.block_kv)

    def outputs(self):
        p = self.problem
        rows, heads = p.batch // self.sum_batch, p.heads // self.sum_heads
        return {"dbias": struct("float32", rows, heads, p.q_len, p.kv_len)}

    def grid(self, target):
        rows = (self.problem.batch // self.sum_batch) * (self.problem.heads // self.sum_heads)
        return (math.prod(self.blocks) * rows,)

    def options(self, target):
        return {"num_warps": self.tiles.num_warps, "num_stages": 1}

    def arguments(self, target):
        t, (q_blocks, kv_blocks) = self.tiles, self.blocks
        return self.common(maps=False) | {
            **{name: self.heads(name, t.block_q) for name in ("q", "do")},
            **{name: self.heads(name, t.block_kv) for name in ("k", "v")},
            "q_blocks": q_blocks,
            "kv_blocks": kv_blocks,
            "sum_batch": self.sum_batch,
            "sum_heads": self.sum_heads,
        }

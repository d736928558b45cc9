"""Flash attention, forward.

Math, per query head and row i over the visible keys j (base 2 inside):

    x_ij = scale * q_i . k_j (+ bias_ij), soft-capped;  lse_i = log(sum_j exp x_ij + exp sink)
    o_i  = sum_j drop(exp(x_ij - lse_i)) v_j

Work split: one program per (query block, batch row, query head). It iterates over the key blocks
its rows can see: first those that need no element mask, then the others. Programs are ordered by
head, and inside a causal head the longest rows come first, so that the last programs to start
are the shortest.

Bound: 4 * q * k * d FLOPs per head over the visible part, against reading q, k, v and writing o
once. At B4 S4096 H16 D128 full: 0.55 TFLOP, 0.27 GB: arithmetic, by an order of magnitude; at
D64 one exp2 per 256 FLOPs makes the special-function unit nearly as long as the MMAs.

Sources: Dao, "FlashAttention-2" (2023), sections 3.1 and 3.2 (loop order, work split);
Shah et al., "FlashAttention-3" (2024), section 3.1 (TMA-fed MMAs on Hopper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

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
from ejkernel.kernels.triton.common.softmax import LN2, LOG2E, fused_softmax, online_softmax
from ejkernel.kernels.triton.common.visibility import phase_block, phase_steps
from ejkernel.kernels.triton.flash_attention import groups
from ejkernel.kernels.triton.flash_attention.eight_bit_operands import (
    load_scales,
    output_scale,
    scale_probabilities,
    scale_scores,
)
from ejkernel.kernels.triton.flash_attention.launch import FLOAT, TINY, QueryBlockLaunch
from ejkernel.kernels.triton.flash_attention.scores import (
    key_blocks,
    load_bias,
    mask_unseen,
    program_of,
    tile_logits,
)
from ejkernel.kernels.triton.flash_attention.terms import logit_shift, logit_unit, natural_logarithm
from ejkernel.kernels.triton.flash_attention.tiles import partial_stages
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import struct

MAX = float(jnp.finfo(FLOAT).max)
LARGE = tl.constexpr(2.0**16)  # rounding of larger logits moves probabilities by a percent


@triton.jit
def flash_fwd(
    q,
    k,
    v,
    sizes,
    softmax,
    logits,
    schedule,
    rules,
    bias,
    dropout,
    mods,
    scales,
    sinks,
    o,
    lse,
    base,
    base_tail,
    EVEN_KV: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTIAL_STAGES: tl.constexpr,
):
    q_len, kv_len, heads, kv_heads = sizes.q_len, sizes.kv_len, sizes.heads, sizes.kv_heads
    BLOCK_Q: tl.constexpr = q.ROWS
    BLOCK_KV: tl.constexpr = k.ROWS
    FIXED: tl.constexpr = softmax.FIXED
    MULTIPLY_ADD: tl.constexpr = softmax.MULTIPLY_ADD
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

    if scales is not None:
        row_scale, key_scales = load_scales(scales, i, b, h, hk, sizes)

    rows = (b * heads + h).to(tl.int64) * q_len
    if dropout is not None:
        row_r, row_s = load_row_words(dropout.words, rows, i, q_len)
        column = tl.arange(0, BLOCK_KV)
        # opaque to the compiler: it would move a select of constants after the conversion of p,
        # which then converts single elements instead of pairs
        zero = dropout.scale * 0.0

    m = tl.full([BLOCK_Q], 0.0 if FIXED else float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)  # noqa: E741
    e = tl.zeros([BLOCK_Q], tl.float32)
    acc = zero_tiles(v, BLOCK_Q)

    for phase in tl.static_range(0 if schedule.FULL else 1, 2 if schedule.PARTIAL else 1):
        # phase 0: blocks every row sees; phase 1: blocks that need an element mask
        steps = phase_steps(start, full_start, full_stop, stop, phase, schedule.FULL)
        for t in tl.range(0, steps, num_stages=None if phase == 0 else PARTIAL_STAGES):
            if schedule.listed is not None:
                kv_block = following
                visit += 1
                following = tl.load(visit).to(tl.int32)
            else:
                kv_block = phase_block(t, start, full_start, full_stop, phase, schedule.FULL)
            j0 = kv_block * BLOCK_KV
            j = j0 + tl.arange(0, BLOCK_KV)

            # keys past the last are masked, so a TMA load needs no check
            k_tiles = (load_tile(k, 0, keys, j0, (phase == 1) and not EVEN_KV and not k.TMA),)
            bias_tile = load_bias(
                bias, i, j, first, j0, b, h, sizes, False, True, (phase == 0) or EVEN_KV
            )
            if dropout is not None:
                # while the matmuls run
                row_from = offset_row_words(row_r, j0, dropout.threshold)
                mixed = mix_words(row_from[:, None], row_s[:, None], column[None, :])
            s, k_tiles = matmul_parts(
                q_tiles, k_tiles, k, keys, j0, (phase == 1) and not EVEN_KV and not k.TMA, PRECISION
            )

            if scales is not None:
                s = scale_scores(s, scales, row_scale, key_scales, j, sizes)
            v_tiles = (load_tile(v, 0, keys, j0, (phase == 1) and not EVEN_KV),)
            s = tile_logits(s, bias_tile, logits, mods, i[:, None], j[None, :], b, h, sizes)
            if phase == 1:
                s = mask_unseen(s, i[:, None], j[None, :], j0, b, h, sizes, rules, mods, EVEN_KV)

            if FIXED:
                p = tl.exp2(s * logits.slope - softmax.peak)
                l += tl.sum(p, 1)  # noqa: E741
            else:
                if MULTIPLY_ADD:
                    p, m, l, e, alpha = fused_softmax(  # noqa: E741
                        s, m, l, e, logits.slope, softmax.power, softmax.large,
                        (phase == 1) or bias is not None or mods is not None,
                    )  # fmt: skip
                else:
                    p, m, l, alpha = online_softmax(  # noqa: E741
                        s,
                        m,
                        l,
                        logits.slope,
                        False,
                        (phase == 1) or bias is not None or mods is not None,
                    )
                acc = [part * alpha[:, None] for part in acc]
            if dropout is not None:
                keep = keep_mask(mixed, dropout.threshold)
                p = tl.where(keep, p, zero)
            if scales is not None:
                p = scale_probabilities(p, scales)
            p = p.to(v_tiles[0].dtype)
            acc = add_matmul_parts(
                acc, p, v_tiles, v, keys, j0, (phase == 1) and not EVEN_KV, PRECISION
            )

    factor = finish_rows(
        m, l, e, softmax, logits, dropout, scales, sinks, lse, base, base_tail, rows, i, b, h, hk,
        sizes,
    )  # fmt: skip
    acc = [part * factor[:, None] for part in acc]
    store_tiles(o, acc, v, queries, first)


@triton.jit
def finish_rows(
    m, l, e, softmax, logits, dropout, scales, sinks, lse, base, base_tail, rows, i, b, h, hk,  # noqa: E741
    sizes,
):  # fmt: skip
    """Stores the log-sum-exps of the rows i, and returns the factor of their outputs.

    m, l, e: maximum, sum, and exponent of a common factor of both sums (``fused_softmax``).
    """
    alive = l != 0.0  # NaN is: a merge of parts drops those with an lse of -inf
    # the largest logit in natural units
    top = tl.where(alive, m, 0.0) * softmax.unit + softmax.shift
    # undo the common factor exp2(e) of fused_softmax
    shrink = tl.exp2(-e) if softmax.MULTIPLY_ADD and not softmax.FIXED else 1.0
    row_sum = tl.where(alive, l, 1.0) * shrink
    if sinks is not None:
        # one more logit per row, never in the output; a row without keys stays empty
        sink = tl.load(sinks.array + b * sinks.batch + h)
        new_top = tl.maximum(top, sink)
        above = (new_top - top) * LOG2E
        share = tl.exp2(-above)
        row_sum = row_sum * share + tl.exp2((sink - new_top) * LOG2E)
        factor = share * shrink / row_sum
        top = new_top
        log2_sum = tl.log2(row_sum)
        log2_tail = log2_sum + above
    else:
        factor = shrink / row_sum
        log2_sum = tl.log2(row_sum)
        log2_tail = log2_sum
    if dropout is not None:
        factor = factor * dropout.scale
    if scales is not None:
        factor = factor * output_scale(scales, b, hk, sizes)
    factor = tl.where(alive, factor, 0.0)
    inside = i < sizes.q_len
    tl.store(lse + rows + i, tl.where(alive, top + log2_sum * LN2, float("-inf")), mask=inside)
    # lse for the backward kernels is in the units of m, in which the largest logit is exact. Adding
    # log l to a large m rounds it away, so with a bias, where rows often have one large logit, it
    # is stored separately
    if base_tail is not None:
        separate = alive & (tl.abs(m) >= LARGE)
        tl.store(base_tail + rows + i, tl.where(separate, log2_tail, 0.0), mask=inside)
        log2_tail = tl.where(separate, 0.0, log2_tail)
    if softmax.FIXED:
        log2_tail += softmax.peak
    row_base = (m * logits.slope + log2_tail) if logits.FUSED else (m + log2_tail / logits.slope)
    row_base = tl.where(alive, row_base, float("inf"))
    tl.store(base + rows + i, row_base, mask=inside)
    return factor


@dataclass(frozen=True)
class ForwardLaunch(QueryBlockLaunch):
    """Launch of ``flash_fwd``.

    Results: o ``[b, q, h, dv]``, lse ``[b, h, q]`` in float32, and lse for the backward kernels:
    base ``[b, h, q]`` in the units of s (in base 2 with a soft cap), +inf for rows that see
    nothing. With a bias, the sum of base and ``base_tail``, in base 2, is exact.
    """

    kernel = flash_fwd
    gradient = None

    def outputs(self):
        p = self.problem
        rows = struct(FLOAT, p.batch, p.heads, p.q_len)
        return {
            "o": struct(p.output_dtype, p.batch, p.q_len, p.heads, p.value_dim),
            "lse": rows,
            "base": rows,
            "base_tail": rows if p.in_natural_units else None,
        }

    def arguments(self, target):
        p, sink = self.problem, self.shape("sink")
        span = 2 * logit_shift(p)  # of the logits in base 2
        peak = min(0.0, 104.0 - span)
        # A soft cap bounds the logits, so that a constant can replace the running maxima where
        # exp2 of any logit minus it lies between 2^-104 and 2^44. Not in float16, whose range
        # is smaller; 2^17 keys then still sum values up to 2^66.
        # Nor in 8 bits.
        wide = p.dtype in ("bfloat16", "float32")
        fixed = p.soft_cap is not None and wide and span <= 148
        softmax = groups.Softmax(
            power=None if fixed else 2.0 ** math.floor(math.log2(max(logit_unit(p), TINY))),
            large=None if fixed else min(2.0**30 / self.slope, MAX),
            unit=logit_unit(p),
            shift=natural_logarithm(logit_shift(p) + (peak if fixed else 0.0)),
            peak=peak if fixed else None,
            FIXED=fixed,
            # see ``fused_softmax``; elsewhere masked forms would spill
            MULTIPLY_ADD=target.hopper and p.dtype != "float16",
        )
        paired = any(self.has(f"kv_{name}") for name in ("ids", "positions"))
        return super().arguments(target) | {
            "softmax": softmax,
            "scales": self.scales(),
            "sinks": sink and groups.Sinks(self.operand("sink"), 0 if sink[0] == 1 else p.heads),
            "PARTIAL_STAGES": partial_stages(p, self.tiles, target) if paired else None,
        }

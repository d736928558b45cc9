"""Flash attention, backward: the gradients of keys and values.

With p and ds as in ``dq_kernel``, per key head and key j, summed over the query heads that share
it and the rows that see it:

    dv_j = sum_i drop'(p_ij) do_i;    dk_j = scale * sum_i ds_ij q_i

Work split: one program per (key block, batch row, key head). It iterates over the query blocks
that see its keys, for one query head of the group after another, on transposed tiles [keys, rows],
so that p and ds are already laid out for the matmuls that consume them. One program owns its keys:
it sums over rows and over the group in a fixed order, without atomics. A launch computes both
gradients, or one of them (the other is None): wide heads leave no registers for both accumulators.

Bound: 8 * q * k * d FLOPs per query head over the visible part (four matmuls); bytes as forward
plus q and do once per key block from L2. At B4 S4096 H16 D128: 1.1 TFLOP: arithmetic.

Sources: Dao, "FlashAttention-2" (2023), section 3.1.2 (loop over queries inside).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.common.dims import split_dim
from ejkernel.kernels.triton.common.dropout import keep_mask, load_row_words, mix_words
from ejkernel.kernels.triton.common.head_tiles import (
    TilePosition,
    add_matmul_parts,
    load_tile,
    load_tiles,
    matmul_parts,
    store_tiles,
    zero_tiles,
)
from ejkernel.kernels.triton.common.visibility import (
    band_blocks,
    load_block_ranges,
    load_list_start,
    phase_block,
    phase_steps,
)
from ejkernel.kernels.triton.flash_attention.launch import GRADIENT_OPERANDS, AttentionLaunch
from ejkernel.kernels.triton.flash_attention.scores import (
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
from ejkernel.kernels.triton.targets import Target


@triton.jit
def flash_bwd_dkv(
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
    dk,
    dv,
    GROUP: tl.constexpr,
    EVEN_Q: tl.constexpr,
    EVEN_KV: tl.constexpr,
    DP_LATE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    q_len, kv_len, heads, kv_heads = sizes.q_len, sizes.kv_len, sizes.heads, sizes.kv_heads
    BLOCK_Q: tl.constexpr = q.ROWS
    BLOCK_KV: tl.constexpr = k.ROWS
    block, b, hk = program_of(schedule, kv_heads)
    first = block * BLOCK_KV
    j = first + tl.arange(0, BLOCK_KV)
    q_token = b.to(tl.int64) * q_len
    keys = TilePosition(b.to(tl.int64) * kv_len, kv_len, hk, kv_heads)

    if schedule.listed is None and schedule.ranges is None:
        last = tl.minimum(first + BLOCK_KV, kv_len) - 1
        start, full_start, full_stop, stop = band_blocks(
            first, last, q_len, _minus(rules.hi), _minus(rules.lo), BLOCK_Q
        )

    WANT_DK: tl.constexpr = dk is not None
    WANT_DV: tl.constexpr = dv is not None
    k_tiles = load_tiles(k, keys, first, True)
    if WANT_DK:
        v_tiles = load_tiles(v, keys, first, True)
        dk_tiles = zero_tiles(k, BLOCK_KV)
    if WANT_DV:
        dv_tiles = zero_tiles(do, BLOCK_KV)

    if dropout is not None:
        zero = dropout.scale * 0.0  # opaque to the compiler, as in the forward kernel
    # hoisting values that are cheap to recompute out of three nested loops costs registers
    for member in tl.range(0, GROUP, disable_licm=True):
        h = hk * GROUP + member
        queries = TilePosition(q_token, q_len, h, heads)
        row = b * schedule.batch_step + h * schedule.head_step + block
        if schedule.listed is not None:
            visit, following, full_stop, stop = load_list_start(
                schedule.listed, row, q_len, BLOCK_Q
            )
            start, full_start = 0, 0
        elif schedule.ranges is not None:
            start, full_start, full_stop, stop = load_block_ranges(schedule.ranges, row)
        rows = (b * heads + h).to(tl.int64) * q_len
        for phase in tl.static_range(0 if schedule.FULL else 1, 2 if schedule.PARTIAL else 1):
            # phase 0: blocks whose every row sees every key; phase 1: the others
            steps = phase_steps(start, full_start, full_stop, stop, phase, schedule.FULL)
            for t in tl.range(0, steps, disable_licm=GROUP > 1):
                if schedule.listed is not None:
                    q_block = following
                    visit += 1
                    following = tl.load(visit).to(tl.int32)
                else:
                    q_block = phase_block(t, start, full_start, full_stop, phase, schedule.FULL)
                i0 = q_block * BLOCK_Q
                i = i0 + tl.arange(0, BLOCK_Q)

                q_tiles = (load_tile(q, 0, queries, i0, (phase == 1) and not EVEN_Q),)
                bias_tile = load_bias(bias, i, j, i0, first, b, h, sizes, True, EVEN_Q, EVEN_KV)
                s, q_tiles = matmul_parts(
                    k_tiles, q_tiles, q, queries, i0, (phase == 1) and not EVEN_Q, PRECISION
                )

                do_tiles = load_tiles(do, queries, i0, (phase == 1) and not EVEN_Q)
                row_base = load_rows(base + rows, i, q_len, float("inf"), EVEN_Q)[None, :]
                if WANT_DK and not DP_LATE:
                    dp, do_tiles = matmul_parts(
                        v_tiles, do_tiles, do, queries, i0, False, PRECISION
                    )

                if dropout is not None:
                    # while the matmul runs
                    row_r, row_s = load_row_words(dropout.words, rows, i, q_len)
                    mixed = mix_words(row_r[None, :], row_s[None, :], j[:, None])
                s, slope = tile_logits_and_slope(
                    s, bias_tile, logits, mods, i[None, :], j[:, None], b, h, sizes
                )
                if phase == 1:
                    s = mask_unseen(
                        s, i[None, :], j[:, None], first, b, h, sizes, rules, mods, True
                    )
                p = probabilities(s, row_base, logits)
                pd = p
                if dropout is not None:
                    keep = keep_mask(mixed, dropout.threshold)
                    pd = tl.where(keep, p, zero)
                if WANT_DV:
                    masked_p = pd.to(do_tiles[0].dtype)
                if slope is not None and WANT_DK:
                    p = times_slope(p, slope, mods)
                    pd = times_slope(pd, slope, mods)
                if WANT_DV:
                    dv_tiles = add_matmul_parts(
                        dv_tiles, masked_p, do_tiles, do, queries, i0, False, PRECISION
                    )
                if WANT_DK:
                    if DP_LATE:
                        dp, do_tiles = matmul_parts(
                            v_tiles, do_tiles, do, queries, i0, False, PRECISION
                        )
                    row_delta = load_rows(delta + rows, i, q_len, 0.0, EVEN_Q)[None, :]
                    if dropout is not None:
                        # the dropout scale is applied to dk once, after the loop
                        ds = pd * dp - p * row_delta
                    else:
                        ds = p * (dp - row_delta)
                    ds = ds.to(q_tiles[0].dtype)
                    dk_tiles = add_matmul_parts(
                        dk_tiles, ds, q_tiles, q, queries, i0, False, PRECISION
                    )

    if WANT_DK:
        dk_tiles = [part * logits.gradient for part in dk_tiles]
        store_tiles(dk, dk_tiles, k, keys, first)
    if WANT_DV:
        if dropout is not None:
            dv_tiles = [part * dropout.scale for part in dv_tiles]
        store_tiles(dv, dv_tiles, do, keys, first)


@triton.jit
def _minus(x):
    """-x; None stays None."""
    return None if x is None else -x


@dataclass(frozen=True)
class DkvLaunch(AttentionLaunch):
    """Launch of ``flash_bwd_dkv``; the results are dk and dv, or the one that ``parts`` names."""

    kernel = flash_bwd_dkv
    batching: ClassVar = AttentionLaunch.batching | GRADIENT_OPERANDS
    by_key = True

    parts: tuple[str, ...] = ("dk", "dv")

    def dp_late(self, target: Target) -> bool:
        """Returns whether dp = do v^T waits for the exponentials.

        Issued before them, Hopper's matmul runs while they are computed, which pays for the few
        bytes that a bias then spills: 467 TFLOP/s, 431 without spills. Issued after them, it holds
        fewer registers while the other features of a call need some.
        """
        p = self.problem
        late = p.dropout > 0.0
        if not target.hopper:
            late |= (
                p.in_natural_units
                or p.soft_cap is not None
                or p.group > 1
                or bool({"ranges", "listed"}.intersection(self.names))
            )
            late |= sum(split_dim(p.dim)) <= 64
        return late

    @property
    def blocks(self) -> int:
        """Blocks of keys in a head."""
        return -(-self.problem.kv_len // self.tiles.block_kv)

    def outputs(self):
        p = self.problem
        rows = p.batch, p.kv_len, p.kv_heads
        return {
            "dk": struct(p.dtype, *rows, p.dim) if "dk" in self.parts else None,
            "dv": struct(p.dtype, *rows, p.value_dim) if "dv" in self.parts else None,
        }

    def grid(self, target):
        return (self.blocks * self.problem.batch * self.problem.kv_heads,)

    def arguments(self, target):
        p, t = self.problem, self.tiles
        maps, even = self.uses_tensor_maps(target), p.q_len % t.block_q == 0
        return self.common(maps) | {
            "q": self.heads("q", t.block_q, maps),
            "k": self.heads("k", t.block_kv),
            "v": self.heads("v", t.block_kv) if "dk" in self.parts else None,
            "do": self.heads("do", t.block_q, maps),
            "delta": self.operand("delta") if "dk" in self.parts else None,
            "schedule": self.block_schedule(target, self.blocks, even),
            "GROUP": p.group,
            "EVEN_Q": even,
            "EVEN_KV": p.kv_len % t.block_kv == 0,
            "DP_LATE": self.dp_late(target),
        }

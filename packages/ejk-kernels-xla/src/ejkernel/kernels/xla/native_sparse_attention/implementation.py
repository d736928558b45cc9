"""native_sparse_attention: three branches, gated and added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._common.tiles import Steps
from ejkernel.kernels.xla.flash_attention.implementation import flash_attention
from ejkernel.kernels.xla.kernel import XlaKernel
from ejkernel.kernels.xla.native_sparse_attention.select import select_blocks
from ejkernel.kernels.xla.native_sparse_attention.selected import Rows, Spec, attend_selected
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.varying import vary_alike
from ejkernel.types import calls
from ejkernel.types.arrays import at_most, is_symbolic
from ejkernel.types.attention.softmax import name_lse
from ejkernel.types.calls import arguments
from ejkernel.types.masks.combine import mask_of
from ejkernel.types.masks.hidden import clear_unless
from ejkernel.types.masks.token_blocks import (
    TokenBlocks,
    block_means,
    find_blocks,
    means_mask,
)
from ejkernel.types.problems.selected_blocks import chosen_blocks, sorts_blocks

# gathered keys of one step, in elements per batch row: a megabyte or two
STEP_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class RowTile(Steps):
    """Tokens of a step of the selected branch; None follows from the bytes of a block."""

    q_tile: int | None = None


def _compressed(q, k, v, blocks: TokenBlocks, scale: float):
    """Output ``[b, s, h, dv]`` of the compressed branch."""
    k_cmp, v_cmp = block_means(k, blocks), block_means(v, blocks)
    mask = means_mask(blocks, q.shape[0])
    return flash_attention.run_canonical(
        query=q, key=k_cmp, value=v_cmp, mask_info=mask, softmax_scale=scale
    )


def _selected(q, k, v, chosen, blocks: TokenBlocks, scale: float, rows: int | None):
    """Output ``[b, s, h, dv]`` of the selected branch."""
    b, s, h, d = q.shape
    hk, dv = k.shape[2], v.shape[3]
    if chosen.shape[-1] == 0:
        return jnp.zeros((b, s, h, dv), accumulation_dtype(q, k, v))
    per_block = hk * blocks.size * (d + dv)
    rows = max(1, at_most(rows or min(64, STEP_ELEMENTS // max(per_block, 1)), s))
    count = chosen.shape[-1]
    slots = max(1, min(count, STEP_ELEMENTS // max(1, rows * per_block)))
    chosen = jnp.pad(chosen, [(0, 0)] * 3 + [(0, -count % slots)], constant_values=-1)
    spec = Spec(scale, blocks.size, rows, slots, accumulation_dtype(q, k, v))
    q, k, v, chosen, blocks = vary_alike((q, k, v, chosen, blocks))
    token = jnp.arange(s, dtype=jnp.int32)

    def attend_row(q, k, v, chosen):
        return attend_selected(
            spec, q, k, v, Rows(chosen, token - blocks.position, blocks.position)
        )

    grouped = q.reshape(b, s, hk, h // hk, d)
    if b == 1:
        o = attend_row(grouped[0], k[0], v[0], chosen[0])
    else:
        o = jax.vmap(attend_row)(grouped, k, v, chosen)
    return o.reshape(b, s, h, dv)


class NativeSparseAttention(XlaKernel):
    """Causal attention over compressed, selected and near keys.

    Without ``block_indices`` the blocks are chosen per key head: the own block first, then those
    whose probability in the compressed branch, summed over the group's query heads, is largest
    (float32, ties to the lower number); the choice carries no gradient. ``cfg``: ``q_tile``, the
    tokens of a step of the selected branch. Differentiable in query, key, value and the gates.
    """

    call = calls.NativeSparseAttention
    reads = arguments.NATIVE_SPARSE

    def choose(self, problem: Any, target: Any) -> RowTile:
        return RowTile()

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, cu = work.problem, arrays.get("cu_seqlens")
        q, k, v = (arrays[name] for name in ("query", "key", "value"))
        (b, s, h, _), dv = q.shape, v.shape[3]
        if q.size == 0 or dv == 0 or (cu is not None and cu.shape[0] < 2):
            return (jnp.zeros((b, s, h, dv), q.dtype),), ()
        scale, wide = p.softmax_scale, accumulation_dtype(q, k, v)
        blocks = find_blocks(s, p.block_size, cu)
        is_valid = (blocks.sequence >= 0)[None] if blocks.packed else None
        q, k, v = clear_unless(is_valid, q, k, v)
        gates = (arrays.get(name) for name in ("g_cmp", "g_slc", "g_swa"))
        g_cmp, g_slc, g_swa = (
            None if g is None else clear_unless(is_valid, g.astype(wide))[0][..., None]
            for g in gates
        )
        out = jnp.zeros((b, s, h, dv), wide)
        if blocks.count != 0 and g_cmp is not None:
            out = out + g_cmp * _compressed(q, k, v, blocks, scale).astype(wide)
        chosen = chosen_blocks(p, arrays, blocks, lambda: _select(p, q, k, blocks))
        chosen = name_lse(chosen)  # a loop of its own
        o_slc = _selected(q, k, v, chosen, blocks, scale, work.tiles.q_tile)
        out = out + (1.0 if g_slc is None else g_slc) * o_slc.astype(wide)
        if p.sliding_window is not None:
            options = {"causal": True, "sliding_window": p.sliding_window}
            mask = mask_of({"query": q, "key": k, "cum_seqlens_q": cu, **options})
            o_swa = flash_attention.run_canonical(
                query=q, key=k, value=v, mask_info=mask, softmax_scale=scale
            )
            out = out + (1.0 if g_swa is None else g_swa) * o_swa.astype(wide)
        return (clear_unless(is_valid, out)[0].astype(q.dtype),), ()


def _select(p: Any, q: Any, k: Any, blocks: TokenBlocks) -> jax.Array:
    """Returns the blocks of every token with the largest probability ``[b, s, hk, slots]``."""
    (b, s, h, d), hk = q.shape, p.key.shape[2]
    bound = p.max_block_count if sorts_blocks(p) else p.block_counts
    if bound is None and is_symbolic(s):
        raise ValueError("max_block_count: needed where the length of the sequence is symbolic")
    slots = max(1, blocks.longest if bound is None else at_most(bound, blocks.longest))
    slots = at_most(slots, blocks.count)
    grouped, k_cmp = q.reshape(b, s, hk, h // hk, d), block_means(k, blocks)
    return select_blocks(grouped, k_cmp, blocks, scale=p.softmax_scale, count=slots)


native_sparse_attention = NativeSparseAttention()

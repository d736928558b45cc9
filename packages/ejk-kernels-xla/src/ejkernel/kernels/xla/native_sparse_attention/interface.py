"""native_sparse_attention: three branches, gated and added."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla.flash_attention import flash_attention
from ejkernel.kernels.xla.native_sparse_attention.blocks import Blocks, block_means, find_blocks
from ejkernel.kernels.xla.native_sparse_attention.select import clean_indices, select_blocks
from ejkernel.kernels.xla.native_sparse_attention.selected import Rows, Spec, attend_selected
from ejkernel.ops.varying import vary_alike
from ejkernel.types import MaskInfo
from ejkernel.types import attention as arg
from ejkernel.types.hidden import cleared
from ejkernel.types.softmax import named_lse

# gathered keys of one step, in elements per batch row: a megabyte or two
STEP_ELEMENTS = 1 << 18


def _compressed(q, k, v, blocks: Blocks, scale: float):
    """Output ``[b, s, h, dv]``, lse ``[b, s, h]`` and the block means of the keys."""
    k_cmp, v_cmp = block_means(k, blocks), block_means(v, blocks)
    b = q.shape[0]

    def rows(x):
        return jnp.broadcast_to(x, (b, *x.shape))

    mask = MaskInfo(
        q_segment_ids=rows(blocks.sequence),
        kv_segment_ids=rows(blocks.block_sequence),
        # block c is complete, and may be seen, from position (c + 1) * size - 1 on
        q_positions=rows(blocks.position + 1),
        kv_positions=rows(blocks.seen_from),
        causal=True,
    )
    o, lse = flash_attention(q, k_cmp, v_cmp, mask_info=mask, softmax_scale=scale, return_lse=True)
    return o, lse, k_cmp


def _selected(q, k, v, chosen, blocks: Blocks, scale: float, cfg: Any):
    """Output ``[b, s, h, dv]`` of the selected branch."""
    b, s, h, d = q.shape
    hk, dv = k.shape[2], v.shape[3]
    if chosen.shape[-1] == 0:
        return jnp.zeros((b, s, h, dv), accumulation_dtype(q, k, v))
    per_block = hk * blocks.size * (d + dv)
    rows = int(arg.field(cfg, "q_tile", 0) or max(1, min(64, STEP_ELEMENTS // max(per_block, 1))))
    rows = max(1, min(rows, s))
    count = chosen.shape[-1]
    slots = max(1, min(count, STEP_ELEMENTS // max(1, rows * per_block)))
    chosen = jnp.pad(chosen, [(0, 0)] * 3 + [(0, -count % slots)], constant_values=-1)
    spec = Spec(scale, blocks.size, rows, slots, accumulation_dtype(q, k, v))
    q, k, v, chosen, blocks = vary_alike((q, k, v, chosen, blocks))
    token = jnp.arange(s, dtype=jnp.int32)

    def one(q, k, v, chosen):
        return attend_selected(
            spec, q, k, v, Rows(chosen, token - blocks.position, blocks.position)
        )

    grouped = q.reshape(b, s, hk, h // hk, d)
    o = one(grouped[0], k[0], v[0], chosen[0])[None] if b == 1 else None
    if o is None:
        o = jax.vmap(one)(grouped, k, v, chosen)
    return o.reshape(b, s, h, dv)


def _slots(block_counts: Any, max_block_count: int | None, blocks: Blocks) -> int:
    """Static number of blocks a token may select."""
    bound = block_counts if isinstance(block_counts, int) else max_block_count
    return max(1, blocks.longest if bound is None else min(int(bound), blocks.longest))


def native_sparse_attention(
    query,
    key,
    value,
    g_cmp=None,
    g_slc=None,
    block_indices=None,
    block_counts=16,
    cu_seqlens=None,
    *,
    g_swa=None,
    block_size=64,
    max_block_count=None,
    sliding_window=None,
    softmax_scale=None,
    cfg=None,
):
    """Causal attention over compressed blocks, selected blocks and a sliding window.

    With blocks of ``block_size`` tokens counted inside each sequence, for token t::

        compressed: keys and values averaged over complete blocks c, (c + 1) * block_size <= t + 1
        selected:   all tokens <= t of the chosen blocks
        sliding:    the causal window, if ``sliding_window`` is given
        out[t] = g_slc * o_slc[t] + g_cmp * o_cmp.astype(wide)[t] + g_swa * o_swa[t]

    Without ``block_indices`` the blocks are chosen per key head: the own block first, then those
    whose probability in the compressed branch, summed over the group's query heads, is largest
    (float32, ties to the lower number); the choice carries no gradient.

    Args:
        query ``[b, s, h, d]``, key ``[b, s, hk, d]``, value ``[b, s, hk, dv]``: float.
        g_cmp, g_slc, g_swa: float ``[b, s, h]``. g_cmp None leaves its branch out; the others
            default to 1.
        block_indices: int ``[b, s, hk, S]``, numbers inside the sequence; repeated ones count once,
            negative and future ones not at all.
        block_counts: int, or int ``[b, s, hk]`` bounded by ``max_block_count``: how many.
        cu_seqlens: int ``[n + 1]``, packed sequences of one batch row.
        sliding_window: int or (left, right). softmax_scale: default ``d ** -0.5``.

    Returns ``[b, s, h, dv]`` in the query's dtype; padding rows are 0. Differentiable in query,
    key, value and the gates. Source: Native Sparse Attention (arXiv 2502.11089), section 3.
    """
    q, k, v = arg.query_key_value(query, key, value)
    b, s, h, d = q.shape
    hk, dv = k.shape[2], v.shape[3]
    without_sequences = cu_seqlens is not None and cu_seqlens.shape[0] < 2
    if q.size == 0 or dv == 0 or without_sequences:
        return jnp.zeros((b, s, h, dv), q.dtype)
    scale = arg.scale_of(softmax_scale, d)
    blocks = find_blocks(s, block_size, cu_seqlens)
    wide = accumulation_dtype(q, k, v)
    if isinstance(block_counts, int) and max_block_count is not None:
        block_counts = min(block_counts, max_block_count)
    slots = _slots(block_counts, max_block_count, blocks)
    held = (blocks.sequence >= 0)[None] if blocks.packed else None
    q, k, v = cleared(held, q, k, v)
    g_cmp, g_slc, g_swa = (
        None if g is None else cleared(held, jnp.asarray(g, wide))[0] for g in (g_cmp, g_slc, g_swa)
    )
    out = jnp.zeros((b, s, h, dv), wide)
    if blocks.count and (g_cmp is not None or block_indices is None):
        o_cmp, lse, k_cmp = _compressed(q, k, v, blocks, scale)
        if g_cmp is not None:
            out = out + g_cmp[..., None] * o_cmp.astype(wide)
    if block_indices is None:
        slots = min(slots, blocks.count)
        grouped = q.reshape(b, s, hk, h // hk, d)
        chosen = select_blocks(grouped, k_cmp, lse.reshape(b, s, hk, h // hk), blocks, scale, slots)
        if not isinstance(block_counts, int):
            limit = jnp.asarray(block_counts, jnp.int32)[..., None]
            chosen = jnp.where(
                jnp.arange(slots, dtype=jnp.int32)[None, None, None] < limit, chosen, -1
            )
    else:
        counts = block_counts
        if not isinstance(counts, int) and max_block_count is not None:
            counts = jnp.minimum(jnp.asarray(counts, jnp.int32), max_block_count)
        chosen = clean_indices(block_indices, counts, blocks)
    chosen = named_lse(chosen)  # choosing again would run a loop of its own
    o_slc = _selected(q, k, v, chosen, blocks, scale, cfg)
    gate = 1.0 if g_slc is None else g_slc[..., None]
    out = out + gate * o_slc.astype(wide)
    if sliding_window is not None:
        o_swa = flash_attention(
            q, k, v, cum_seqlens_q=cu_seqlens, causal=True, sliding_window=sliding_window,
            softmax_scale=scale,
        )  # fmt: skip
        assert isinstance(o_swa, jax.Array)  # without return_lse
        gate = 1.0 if g_swa is None else g_swa[..., None]
        out = out + gate * o_swa.astype(wide)
    return cleared(held, out)[0].astype(q.dtype)


def heuristic(inv) -> dict:
    """The tile follows from the bytes of a gathered block; nothing else to choose."""
    return {}


def sample_inputs(inv, rng):
    """Random floats; sequences of equal length; the first blocks of each token."""
    a = dict(inv.arguments)
    s = a["query"].shape[1]
    if a["cu_seqlens"] is not None:
        n = a["cu_seqlens"].shape[0] - 1
        a["cu_seqlens"] = jnp.asarray([s * r // max(n, 1) for r in range(n + 1)], jnp.int32)
    if a["block_indices"] is not None:
        shape = a["block_indices"].shape
        own = jnp.arange(s, dtype=jnp.int32)[None, :, None, None] // a["block_size"]
        a["block_indices"] = jnp.broadcast_to(
            own - jnp.arange(shape[-1], dtype=jnp.int32)[None, None, None], shape
        ).astype(jnp.int32)
    if hasattr(a["block_counts"], "shape"):
        bound = a["max_block_count"] or -(-s // a["block_size"])
        a["block_counts"] = jnp.full(a["block_counts"].shape, bound, jnp.int32)
    for name in ("query", "key", "value", "g_cmp", "g_slc", "g_swa"):
        if a[name] is not None:
            a[name] = jnp.asarray(rng.standard_normal(a[name].shape), a[name].dtype)
    return (), a

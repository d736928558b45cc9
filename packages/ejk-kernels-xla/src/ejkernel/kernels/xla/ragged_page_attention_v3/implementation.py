"""ragged_page_attention_v3: write the new keys and values into the pages, then attend.

The write is a scatter of ``T`` rows, which XLA does in place when the cache is donated.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.xla._paged.kernel import GroupKernel
from ejkernel.kernels.xla._paged.ragged import Sequences, attend_ragged
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.arrays import result_dtype


def quantise(x, scale, dtype):
    """``cast(clip(round(x / scale)))``: to nearest even, clipped to what ``dtype`` holds.

    ``scale`` broadcasts against the heads axis of ``x [T, heads, d]``; None = 1.
    """
    wide = result_dtype(x, jnp.float32)
    y = x.astype(wide)
    if scale is not None:
        y = y / jnp.asarray(scale, wide).reshape(1, -1, 1)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return jnp.clip(jnp.round(y), info.min, info.max).astype(dtype)
    info = jnp.finfo(dtype)
    return jnp.clip(y, float(info.min), float(info.max)).astype(dtype)


def write_slots(kv_lens, block_tables, query_start_loc, count, tokens: int, page_size: int):
    """Page ``[T]`` and place ``[T]`` of every packed row; rows of no sequence get a page of -1."""
    n, columns = block_tables.shape
    starts = jnp.clip(jnp.asarray(query_start_loc, jnp.int32), 0, tokens)
    row = jnp.arange(tokens, dtype=jnp.int32)
    valid = jnp.arange(n, dtype=jnp.int32) < count
    ends = jnp.where(valid, starts[1:], tokens + 1)
    sequence = jnp.minimum(jnp.searchsorted(ends, row, side="right"), n - 1)
    first, last = starts[sequence], starts[sequence + 1]
    length = jnp.clip(jnp.asarray(kv_lens, jnp.int32), 0, columns * page_size)[sequence]
    position = length - (last - first) + row - first
    here = valid[sequence] & (row >= first) & (row < last) & (position >= 0)
    page = block_tables[sequence, jnp.clip(position // page_size, 0, max(columns - 1, 0))]
    return jnp.where(here, page, -1), position % page_size


def write(cache, keys, values, page, place):
    """The cache with ``keys``/``values [T, hk, d]`` at their slots; -1 and pages outside: none."""
    t, hk, d = keys.shape
    both = jnp.stack([keys, values], axis=2).reshape(t, 2 * hk, d)
    outside = (page < 0) | (page >= cache.shape[0])
    page = jnp.where(outside, cache.shape[0], page)
    head = jnp.arange(2 * hk, dtype=jnp.int32)
    if cache.ndim == 4:
        return cache.at[page, place].set(both, mode="drop")
    pack = cache.shape[3]
    at = cache.at[page[:, None], place[:, None], head // pack, head % pack, :d]
    return at.set(both, mode="drop")


class RaggedPageAttentionv3(GroupKernel):
    """Writes new tokens into the pages and attends over them; see the operation of this name.

    ``cfg``: ``num_kv_pages_per_block``, ``num_queries_per_block``. The cache that is given is not
    modified; a donated one is updated in place. Differentiable in queries, keys, values, caches of
    16 bits or more, softmax_aux and the scales.

    Source: Ragged Paged Attention (arXiv 2604.15464).
    """

    call = calls.RaggedPageAttentionv3

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        q, keys, values, cache = (arrays[n] for n in ("queries", "keys", "values", "kv_cache"))
        lens, tables, starts = (arrays[n] for n in ("kv_lens", "block_tables", "query_start_loc"))
        q_scale, k_scale, v_scale = (arrays.get(f"{x}_scale") for x in "qkv")
        n = lens.shape[0]
        if tables.ndim == 1:
            tables = tables.reshape(n, tables.size // max(n, 1))
        count = arrays["distribution"][2]
        if 0 not in (*tables.shape, q.shape[0], *cache.shape[:2]):
            slots = write_slots(lens, tables, starts, count, q.shape[0], cache.shape[1])
            keys, values = (
                x if x.dtype == cache.dtype else quantise(x, scale, cache.dtype)
                for x, scale in ((keys, k_scale), (values, v_scale))
            )
            cache = write(cache, keys, values, *slots)
        if q_scale is not None:
            # values of the cache's dtype, held in the query's own: products are exact either way
            q = quantise(q, q_scale, cache.dtype).astype(q.dtype)
        out = attend_ragged(
            work.problem,
            work.tiles,
            q,
            Sequences(cache, lens, tables, starts, count, keys.shape[1]),
            sinks=arrays.get("softmax_aux"),
            logit_scales=(work.problem.softmax_scale, q_scale, k_scale),
            v_scale=v_scale,
        )
        return (out, cache), ()


ragged_page_attention_v3 = RaggedPageAttentionv3()

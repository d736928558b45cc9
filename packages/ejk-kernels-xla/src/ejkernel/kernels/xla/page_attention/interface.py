"""page_attention: one new token per sequence against its pages.

Bound: memory. A step reads every visible key and value once; per key and query head it does
``2 * (d + dv)`` operations, far below what a page's bytes take to arrive.
"""

from __future__ import annotations

import jax.numpy as jnp

from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._paged.core import Spec, Tiles
from ejkernel.kernels.xla._paged.decode import (
    attend_rows,
    head_scale,
    head_sinks,
    left_of,
    split_count,
    step_tokens,
)  # fmt: skip
from ejkernel.kernels.xla._paged.layouts import SplitPages, Tables
from ejkernel.types.attention import field


def page_attention(
    query,
    key_cache,
    value_cache,
    context_lens,
    block_tables,
    *,
    softmax_scale=None,
    logits_soft_cap=None,
    sliding_window=None,
    softmax_aux=None,
    k_scale=None,
    v_scale=None,
    num_splits=None,
    cfg=None,
):
    """Attention of one token per sequence over its paged cache.

    Row ``r`` stands at position ``i = context_lens[r] - 1`` and sees the keys ``j <= i`` (and
    inside the window), key ``j`` lying at ``cache[block_tables[r, j // ps], j % ps]``::

        x[j] = softmax_scale * dot(query[r], key[j]) * k_scale;  x = cap * tanh(x / cap)
        out[r] = sum_j exp(x[j] - lse) * value[j] * v_scale

    query ``[b, 1, h, d]`` or ``[b, h, d]``; key_cache ``[P, ps, hk, d]``; value_cache
    ``[P, ps, hk, dv]``; context_lens ``[b]``; block_tables ``[b, max_blocks]``. Returns the rank
    of the query with last axis ``dv``. A context of 0 gives 0; lengths are clipped to
    ``max_blocks * ps``, table entries to the cache. Differentiable in query, caches of 16 bits or
    more, softmax_aux and the scales. Paging: Kwon et al. 2023 (arXiv 2309.06180), section 4.
    """
    query, key_cache, value_cache = map(jnp.asarray, (query, key_cache, value_cache))
    squeeze = query.ndim == 3
    q = query if squeeze else query[:, 0]
    b, h, d = q.shape
    num_pages, page_size, hk, _ = key_cache.shape
    table = Tables(page_size, num_pages, block_tables.shape[1])
    layout = SplitPages(table)
    dtype = accumulation_dtype(query, key_cache, value_cache)
    dv = value_cache.shape[-1]
    row_bytes = b * hk * (d + dv) * jnp.dtype(q.dtype).itemsize
    pages = field(cfg, "pages_per_block")
    tokens = step_tokens(table, table.capacity, row_bytes, pages)
    splits = split_count(table, num_splits, field(cfg, "num_splits"))
    lens = jnp.clip(jnp.asarray(context_lens, jnp.int32), 0, table.capacity)
    tiles = Tiles(jnp.arange(b, dtype=jnp.int32), lens[:, None] - 1, jnp.zeros_like(lens), lens)
    spec = Spec(tokens, max(b * splits, 1), logits_soft_cap, left_of(sliding_window), dtype)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    o, _ = attend_rows(
        spec,
        layout,
        q.reshape(b, 1, hk, h // max(hk, 1), d),
        (key_cache, value_cache, jnp.asarray(block_tables, jnp.int32)),
        head_scale(hk, dtype, scale, k_scale),
        head_sinks(softmax_aux, h, hk, dtype),
        tiles,
        splits,
    )
    o = o * head_scale(hk, dtype, v_scale)[None, None, :, None, None]
    o = o.reshape(b, h, dv).astype(query.dtype)
    return o if squeeze else o[:, None]


def heuristic(inv) -> dict:
    """One split: XLA walks the blocks of all rows together, so splits add only a merge."""
    return {"num_splits": 1}


def sample_inputs(inv, rng):
    """Random caches, full contexts and tables that visit every page."""
    a = dict(inv.arguments)
    pages = a["key_cache"].shape[0]
    rows, columns = a["block_tables"].shape
    capacity = columns * a["key_cache"].shape[1]
    a["context_lens"] = jnp.full((rows,), capacity, jnp.int32)
    table = rng.permutation(max(pages, rows * columns))[: rows * columns] % max(pages, 1)
    a["block_tables"] = jnp.asarray(table.reshape(rows, columns), jnp.int32)
    for name in ("query", "key_cache", "value_cache", "softmax_aux", "k_scale", "v_scale"):
        x = a[name]
        if hasattr(x, "shape"):
            a[name] = jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    return (), a

"""ragged_page_attention: packed queries of sequences of any mix of prefill and decoding.

The packed rows are cut into tiles of one sequence; tiles are walked in groups, and a group visits
only the cache blocks its tiles can see. Bound: memory while decoding, arithmetic in long prefills.
"""

from __future__ import annotations

import jax.numpy as jnp

from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._paged.core import Spec
from ejkernel.kernels.xla._paged.decode import (
    attend_rows,
    head_scale,
    head_sinks,
    left_of,
    step_tokens,
)  # fmt: skip
from ejkernel.kernels.xla._paged.layouts import CombinedPages, Tables
from ejkernel.kernels.xla._paged.ragged import choose_shape, tile_queries
from ejkernel.types.attention import field


def attend_ragged(
    queries, kv_pages, context_lens, block_tables, query_start_loc, num_seqs, softmax_aux, *,
    kv_heads, logit_scales, v_scale, logits_soft_cap, sliding_window, cfg,
):  # fmt: skip
    """Read-only attention over either form of combined pages; ``logit_scales`` are multiplied."""
    t, h, d = queries.shape
    table = Tables(kv_pages.shape[1], kv_pages.shape[0], block_tables.shape[1])
    dtype = accumulation_dtype(queries, kv_pages)
    shape = choose_shape(t, block_tables.shape[0], field(cfg, "num_queries_per_block"))
    row_bytes = shape.group * 2 * kv_heads * d * jnp.dtype(queries.dtype).itemsize
    tokens = step_tokens(table, table.capacity, row_bytes, field(cfg, "num_kv_pages_per_block"))
    if t == 0 or block_tables.shape[0] == 0:
        return jnp.zeros(queries.shape, queries.dtype)
    tiles, row = tile_queries(shape, query_start_loc, context_lens, num_seqs, table.capacity)
    q = queries.reshape(t, kv_heads, h // max(kv_heads, 1), d)
    q = jnp.take(q, row, axis=0, mode="fill", fill_value=0)
    o, _ = attend_rows(
        Spec(tokens, shape.group, logits_soft_cap, left_of(sliding_window), dtype),
        CombinedPages(table, kv_heads, d),
        q,
        (kv_pages, jnp.asarray(block_tables, jnp.int32)),
        head_scale(kv_heads, dtype, *logit_scales),
        head_sinks(softmax_aux, h, kv_heads, dtype),
        tiles,
    )
    o = o * head_scale(kv_heads, dtype, v_scale)[None, None, :, None, None]
    o = o.reshape(row.size, h, d).astype(queries.dtype)
    return jnp.zeros(queries.shape, queries.dtype).at[row.reshape(-1)].set(o, mode="drop")


def ragged_page_attention(
    queries,
    kv_pages,
    context_lens,
    block_tables,
    query_start_loc,
    num_seqs,
    softmax_aux=None,
    *,
    softmax_scale=None,
    logits_soft_cap=None,
    sliding_window=None,
    k_scale=None,
    v_scale=None,
    cfg=None,
):
    """Causal attention of packed query rows over their sequences' pages.

    Sequence ``r < num_seqs`` owns the rows ``query_start_loc[r] : query_start_loc[r + 1]``; its row
    m stands at ``i = context_lens[r] - q_len + m`` and sees the keys ``j <= i`` in the window::

        x[i, j] = softmax_scale * dot(q[i], k[j]) * k_scale;  x = cap * tanh(x / cap)
        out[i] = sum_j exp(x[i, j] - lse[i]) * v[j] * v_scale

    queries ``[T, h, d]``; kv_pages ``[P, ps, 2 * hk, d]`` with key m in combined head ``2 m`` and
    value m in ``2 m + 1``; context_lens ``[n]`` (they count the new tokens, already in the cache);
    block_tables ``[n, max_pages]``; query_start_loc ``[n + 1]``; num_seqs an int or one-element
    array. Returns ``[T, h, d]``; rows of no sequence are 0. Differentiable in queries, caches of 16
    bits or more, softmax_aux and the scales.
    """
    queries, kv_pages = jnp.asarray(queries), jnp.asarray(kv_pages)
    scale = queries.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return attend_ragged(
        queries, kv_pages, context_lens, block_tables, query_start_loc, num_seqs, softmax_aux,
        kv_heads=kv_pages.shape[2] // 2, logit_scales=(scale, k_scale), v_scale=v_scale,
        logits_soft_cap=logits_soft_cap, sliding_window=sliding_window, cfg=cfg,
    )  # fmt: skip


def heuristic(inv) -> dict:
    """Tile rows and step follow from the shapes when left open."""
    return {}


def sample_inputs(inv, rng):
    """Sequences of equal share of the rows, their contexts full."""
    a = dict(inv.arguments)
    pages, page_size = a["kv_pages"].shape[:2]
    n, columns = a["block_tables"].shape
    total = a["queries"].shape[0]
    a["query_start_loc"] = jnp.asarray([total * r // n for r in range(n + 1)], jnp.int32)
    a["context_lens"] = jnp.full((n,), columns * page_size, jnp.int32)
    table = rng.permutation(max(pages, n * columns))[: n * columns] % max(pages, 1)
    a["block_tables"] = jnp.asarray(table.reshape(n, columns), jnp.int32)
    a["num_seqs"] = jnp.asarray(n, jnp.int32)
    for name in ("queries", "kv_pages", "softmax_aux", "k_scale", "v_scale"):
        x = a[name]
        if hasattr(x, "shape"):
            a[name] = jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    return (), a

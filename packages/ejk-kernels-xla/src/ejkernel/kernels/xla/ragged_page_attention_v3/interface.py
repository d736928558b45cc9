"""ragged_page_attention_v3: write the new keys and values into the pages, then attend.

The write is a scatter of ``T`` rows, which XLA does in place when the cache is donated.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla.ragged_page_attention.interface import attend_ragged
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


def ragged_page_attention_v3(
    queries,
    keys,
    values,
    kv_cache,
    kv_lens,
    block_tables,
    query_start_loc,
    distribution,
    softmax_aux=None,
    *,
    softmax_scale=None,
    sliding_window=None,
    logits_soft_cap=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    cfg=None,
):
    """Writes the new tokens into the cache and attends over it; returns ``(out, kv_cache)``.

    Row m of sequence r is written at, and stands at, position ``i = kv_lens[r] - q_len + m`` and
    sees the keys ``j <= i`` in the window::

        cache[i] = keys[m] if it has the cache's dtype else cast(clip(keys[m] / k_scale))
        x[i, j] = softmax_scale * q_scale * k_scale * dot(q[i], k[j]);  x = cap * tanh(x / cap)
        out[i] = sum_j exp(x[i, j] - lse[i]) * v[j] * v_scale

    queries ``[T, h, d]``; keys, values ``[T, hk, d]``; kv_cache ``[P, ps, 2 * hk, d]`` or packed
    ``[P, ps, ceil(2 * hk / pack), pack, align(d, 128)]`` with heads in the order K0 V0 K1 V1 ...;
    kv_lens ``[n]`` counts the new tokens; block_tables ``[n, max_pages]`` or flat; query_start_loc
    ``[n + 1]``; distribution ``[3]``: its last entry is the number of sequences, the others are
    promises to the scheduler and not needed here. With ``q_scale`` the query is quantised to the
    cache's dtype. The input cache is not modified; a donated one is updated in place.
    Differentiable in queries, keys, values, caches of 16 bits or more, softmax_aux and scales.
    Source: Ragged Paged Attention (arXiv 2604.15464).
    """
    queries, keys, values, kv_cache = map(jnp.asarray, (queries, keys, values, kv_cache))
    d = queries.shape[-1]
    hk = keys.shape[1]
    n = kv_lens.shape[0]
    tables = jnp.asarray(block_tables, jnp.int32)
    tables = tables if tables.ndim == 2 else tables.reshape(n, tables.size // max(n, 1))
    count = jnp.asarray(distribution, jnp.int32)[2]
    if 0 not in (*tables.shape, queries.shape[0], *kv_cache.shape[:2]):
        page, place = write_slots(
            kv_lens, tables, query_start_loc, count, queries.shape[0], kv_cache.shape[1]
        )
        kv_cache = write(
            kv_cache,
            keys if keys.dtype == kv_cache.dtype else quantise(keys, k_scale, kv_cache.dtype),
            values if values.dtype == kv_cache.dtype else quantise(values, v_scale, kv_cache.dtype),
            page,
            place,
        )
    q = queries
    if q_scale is not None:
        # values of the cache's dtype, held in the query's own: products are exact either way
        q = quantise(queries, q_scale, kv_cache.dtype).astype(queries.dtype)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    out = attend_ragged(
        q, kv_cache, kv_lens, tables, query_start_loc, count, softmax_aux,
        kv_heads=hk, logit_scales=(scale, q_scale, k_scale), v_scale=v_scale,
        logits_soft_cap=logits_soft_cap, sliding_window=sliding_window, cfg=cfg,
    )  # fmt: skip
    return out, kv_cache


def heuristic(inv) -> dict:
    """Tile rows and step follow from the shapes when left open."""
    return {}


def sample_inputs(inv, rng):
    """Sequences of equal share of the rows, their contexts full."""
    a = dict(inv.arguments)
    pages, page_size = a["kv_cache"].shape[:2]
    n = a["kv_lens"].shape[0]
    columns = int(jax.numpy.size(a["block_tables"])) // max(n, 1)
    total = a["queries"].shape[0]
    a["query_start_loc"] = jnp.asarray([total * r // n for r in range(n + 1)], jnp.int32)
    a["kv_lens"] = jnp.full((n,), columns * page_size, jnp.int32)
    table = rng.permutation(max(pages, n * columns))[: n * columns] % max(pages, 1)
    a["block_tables"] = jnp.asarray(table.reshape(a["block_tables"].shape), jnp.int32)
    a["distribution"] = jnp.asarray([0, 0, n], jnp.int32)
    names = (
        "queries",
        "keys",
        "values",
        "kv_cache",
        "softmax_aux",
        "q_scale",
        "k_scale",
        "v_scale",
    )
    for name in names:
        x = a[name]
        if hasattr(x, "shape"):
            a[name] = jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    return (), a

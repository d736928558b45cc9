"""mla_decode: latent attention in absorbed form over a paged latent cache.

Every query head reads the same row, so one token costs ``2 * h * (dc + latent_dim)`` operations
per ``dc`` entries read. Below about a hundred heads the bytes decide.
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
from ejkernel.kernels.xla._paged.layouts import LatentPages, Tables
from ejkernel.types.attention import field


def mla_decode(
    query,
    latent_cache,
    context_lens,
    block_tables,
    *,
    latent_dim=512,
    softmax_scale=None,
    logits_soft_cap=None,
    sliding_window=None,
    softmax_aux=None,
    k_scale=None,
    num_splits=None,
    return_lse=False,
    cfg=None,
):
    """Attention of the last tokens of each sequence over rows that are key and value at once.

    ``c[j]`` is the cache row of token j times ``k_scale``; its first ``latent_dim`` entries are the
    value. Query row m of ``q`` stands at position ``i = context_len - q + m`` and sees ``j <= i``::

        x[i, j] = softmax_scale * dot(query[i], c[j]);  x = cap * tanh(x / cap)
        out[i] = sum_j exp(x[i, j] - lse[i]) * c[j, :latent_dim]

    query ``[b, h, dc]``, ``[b, 1, h, dc]`` or ``[b, q, h, dc]``, already multiplied by the key
    up-projection; latent_cache ``[P, ps, dc]``; context_lens ``[b]``; block_tables
    ``[b, max_blocks]``. Returns the rank of the query with last axis ``latent_dim``; with
    ``return_lse`` also the natural-log ``lse`` of the query's shape without its last axis.
    softmax_scale defaults to ``dc ** -0.5``. Differentiable in query, caches of 16 bits or more,
    softmax_aux and k_scale. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
    """
    query, latent_cache = jnp.asarray(query), jnp.asarray(latent_cache)
    q = query[:, None] if query.ndim == 3 else query
    b, rows, h, dc = q.shape
    table = Tables(latent_cache.shape[1], latent_cache.shape[0], block_tables.shape[1])
    dtype = accumulation_dtype(query, latent_cache)
    row_bytes = b * dc * jnp.dtype(q.dtype).itemsize
    tokens = step_tokens(table, table.capacity, row_bytes, field(cfg, "pages_per_block"))
    splits = split_count(table, num_splits, field(cfg, "num_splits"))
    lens = jnp.clip(jnp.asarray(context_lens, jnp.int32), 0, table.capacity)
    position = jnp.maximum(lens[:, None] - rows + jnp.arange(rows, dtype=jnp.int32)[None], -1)
    tiles = Tiles(jnp.arange(b, dtype=jnp.int32), position, jnp.zeros_like(lens), lens)
    spec = Spec(tokens, max(b * splits, 1), logits_soft_cap, left_of(sliding_window), dtype)
    scale = dc**-0.5 if softmax_scale is None else softmax_scale
    o, lse = attend_rows(
        spec,
        LatentPages(table, latent_dim),
        q[:, :, None],
        (latent_cache, jnp.asarray(block_tables, jnp.int32)),
        head_scale(1, dtype, scale, k_scale),
        head_sinks(softmax_aux, h, 1, dtype),
        tiles,
        splits,
    )
    o = o * head_scale(1, dtype, k_scale).reshape(())
    o = o.reshape(*query.shape[:-1], latent_dim).astype(query.dtype)
    return (o, lse.reshape(query.shape[:-1])) if return_lse else o


def heuristic(inv) -> dict:
    """One split: XLA walks the blocks of all rows together."""
    return {"num_splits": 1}


def sample_inputs(inv, rng):
    """Random rows, full contexts and tables that visit every page."""
    a = dict(inv.arguments)
    pages, page_size = a["latent_cache"].shape[:2]
    rows, columns = a["block_tables"].shape
    a["context_lens"] = jnp.full((rows,), columns * page_size, jnp.int32)
    table = rng.permutation(max(pages, rows * columns))[: rows * columns] % max(pages, 1)
    a["block_tables"] = jnp.asarray(table.reshape(rows, columns), jnp.int32)
    for name in ("query", "latent_cache", "softmax_aux", "k_scale"):
        x = a[name]
        if hasattr(x, "shape"):
            a[name] = jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    return (), a

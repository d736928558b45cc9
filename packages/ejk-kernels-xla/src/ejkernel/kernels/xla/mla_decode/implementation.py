"""mla_decode: latent attention in absorbed form over a paged latent cache.

Every query head reads the same row, so one token costs ``2 * h * (dc + latent_dim)`` operations
per ``dc`` entries read. Below about a hundred heads the bytes decide.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.xla._paged.core import Tiles, Tree
from ejkernel.kernels.xla._paged.decode import attend_call, step_tokens
from ejkernel.kernels.xla._paged.kernel import SplitKernel, split_count
from ejkernel.kernels.xla._paged.layouts import LatentPages, Tables
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.calls import arguments


class MLADecode(SplitKernel):
    """Latent attention of the last tokens over a paged cache.

    ``cfg``: ``num_splits`` where the call gives none, ``pages_per_block``. Differentiable in
    query, caches of 16 bits or more, softmax_aux and k_scale.
    """

    call = calls.MLADecode
    reads = (
        arguments.PAGES
        | arguments.DECODE_OPTIONS
        | arguments.TREE
        | {"query", "latent_cache", "latent_dim", "k_scale", "num_splits", "return_lse"}
    )

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, query = work.problem, arrays["query"]
        cache, tables = arrays["latent_cache"], arrays["block_tables"]
        q = query[:, None] if query.ndim == 3 else query
        b, rows, _, dc = q.shape
        table = Tables(cache.shape[1], cache.shape[0], tables.shape[1])
        row_bytes = b * dc * q.dtype.itemsize
        tokens = step_tokens(table, table.capacity, row_bytes, work.tiles.pages_per_block)
        splits = split_count(table, p.num_splits, work.tiles.num_splits)
        lens = jnp.clip(arrays["context_lens"], 0, table.capacity)
        position = jnp.maximum(lens[:, None] - rows + jnp.arange(rows, dtype=jnp.int32)[None], -1)
        tree = None
        if "tree_mask" in arrays:
            at = arrays.get("positions", position)
            tree = Tree(arrays["tree_mask"], lens - rows, at)
        tiles = Tiles(jnp.arange(b, dtype=jnp.int32), position, jnp.zeros_like(lens), lens, tree)
        k_scale = arrays.get("k_scale")
        o, lse = attend_call(
            p,
            LatentPages(table, p.latent_dim),
            (cache, tables),
            q[:, :, None],
            tiles,
            tokens,
            sinks=arrays.get("softmax_aux"),
            scales=(p.softmax_scale, k_scale),
            v_scale=k_scale,
            splits=splits,
        )
        o = o.reshape(*query.shape[:-1], p.latent_dim).astype(query.dtype)
        return (o, lse.reshape(query.shape[:-1])), ()


mla_decode = MLADecode()

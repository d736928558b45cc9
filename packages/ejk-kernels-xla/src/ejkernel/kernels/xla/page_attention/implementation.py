"""page_attention: one new token per sequence against its pages.

Bound: memory. A step reads every visible key and value once; per key and query head it does
``2 * (d + dv)`` operations, far below what a page's bytes take to arrive.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.xla._paged.core import Tiles
from ejkernel.kernels.xla._paged.decode import attend_call, step_tokens
from ejkernel.kernels.xla._paged.kernel import SplitKernel, split_count
from ejkernel.kernels.xla._paged.layouts import SplitPages, Tables
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.calls import arguments


class PageAttention(SplitKernel):
    """One token per sequence over its paged cache.

    ``cfg``: ``num_splits`` where the call gives none, ``pages_per_block``. Differentiable in
    query, caches of 16 bits or more, softmax_aux and the scales.
    """

    call = calls.PageAttention
    reads = (
        arguments.PAGES
        | arguments.DECODE_OPTIONS
        | arguments.CACHE_SCALES
        | {"query", "key_cache", "value_cache", "num_splits", "return_lse"}
    )

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, query = work.problem, arrays["query"]
        keys, values, tables = (arrays[n] for n in ("key_cache", "value_cache", "block_tables"))
        b, h, d = query.shape[0], *query.shape[-2:]
        pages, page_size, hk, dv = values.shape
        table = Tables(page_size, pages, tables.shape[1])
        row_bytes = b * hk * (d + dv) * query.dtype.itemsize
        tokens = step_tokens(table, table.capacity, row_bytes, work.tiles.pages_per_block)
        splits = split_count(table, p.num_splits, work.tiles.num_splits)
        lens = jnp.clip(arrays["context_lens"], 0, table.capacity)
        rows = jnp.arange(b, dtype=jnp.int32)
        o, lse = attend_call(
            p,
            SplitPages(table),
            (keys, values, tables),
            query.reshape(b, 1, hk, h // max(hk, 1), d),
            Tiles(rows, lens[:, None] - 1, jnp.zeros_like(lens), lens),
            tokens,
            sinks=arrays.get("softmax_aux"),
            scales=(p.softmax_scale, arrays.get("k_scale")),
            v_scale=arrays.get("v_scale"),
            splits=splits,
        )
        o = o.reshape(*query.shape[:-1], dv).astype(query.dtype)
        return (o, lse.reshape(query.shape[:-1])), ()


page_attention = PageAttention()

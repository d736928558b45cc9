"""ragged_page_attention_v3: write the new keys and values into the pages, then attend."""

from __future__ import annotations

from typing import Any

from ejkernel.kernels.xla._paged.kernel import GroupKernel
from ejkernel.kernels.xla._paged.ragged import Sequences, attend_ragged
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.arrays import quantise, quantised_values
from ejkernel.types.calls import arguments
from ejkernel.types.serving.write import write_rows, write_slots


class RaggedPageAttentionv3(GroupKernel):
    """Writes new tokens into the pages and attends over them.

    ``cfg``: ``num_kv_pages_per_block``, ``num_queries_per_block``. The cache that is given is not
    modified; a donated one is updated in place. Differentiable in queries, keys, values, caches of
    16 bits or more, softmax_aux and the scales.
    """

    call = calls.RaggedPageAttentionv3
    reads = (
        arguments.RAGGED_UPDATE
        | arguments.DECODE_OPTIONS
        | arguments.CACHE_SCALES
        | arguments.TREE
        | {"q_scale", "return_lse"}
    )

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
            cache = write_rows(cache, keys, values, *slots)
        if q_scale is not None:
            # rounded to the cache's dtype, kept in the query's: dot products are exact either way
            q = quantised_values(q, q_scale, cache.dtype)
        tree = (arrays.get(name) for name in ("tree_mask", "positions"))
        out, lse = attend_ragged(
            work.problem,
            work.tiles,
            q,
            Sequences(cache, lens, tables, starts, count, keys.shape[1], *tree),
            sinks=arrays.get("softmax_aux"),
            logit_scales=(work.problem.softmax_scale, q_scale, k_scale),
            v_scale=v_scale,
            batch_invariant=work.batch_invariant,
        )
        return (out, lse, cache), ()


ragged_page_attention_v3 = RaggedPageAttentionv3()

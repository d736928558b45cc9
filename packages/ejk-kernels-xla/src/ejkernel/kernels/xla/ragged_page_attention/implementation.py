"""ragged_page_attention: packed queries of sequences of any mix of prefill and decoding.

The packed rows are cut into tiles of one sequence; one loop covers a group of tiles and visits
only the cache blocks its tiles can see. Bound: memory while decoding, arithmetic in long prefills.
"""

from __future__ import annotations

from typing import Any

from ejkernel.kernels.xla._paged.kernel import GroupKernel
from ejkernel.kernels.xla._paged.ragged import Sequences, attend_ragged
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.calls import arguments

PAGES = ("kv_pages", "context_lens", "block_tables", "query_start_loc", "num_seqs")


class RaggedPageAttention(GroupKernel):
    """Causal attention of packed query rows over their pages.

    ``cfg``: ``num_kv_pages_per_block``, ``num_queries_per_block``. Differentiable in queries,
    caches of 16 bits or more, softmax_aux and the scales.
    """

    call = calls.RaggedPageAttention
    reads = (
        arguments.RAGGED
        | arguments.DECODE_OPTIONS
        | arguments.CACHE_SCALES
        | arguments.TREE
        | {"return_lse"}
    )

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p = work.problem
        tree = (arrays.get(name) for name in ("tree_mask", "positions"))
        sequences = Sequences(*(arrays[name] for name in PAGES), p.kv_pages.shape[2] // 2, *tree)
        outputs = attend_ragged(
            p,
            work.tiles,
            arrays["queries"],
            sequences,
            sinks=arrays.get("softmax_aux"),
            logit_scales=(p.softmax_scale, arrays.get("k_scale")),
            v_scale=arrays.get("v_scale"),
            batch_invariant=work.batch_invariant,
        )
        return outputs, ()


ragged_page_attention = RaggedPageAttention()

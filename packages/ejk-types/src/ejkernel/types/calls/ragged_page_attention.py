"""The call of ragged_page_attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ejkernel.types.calls import drawn, settle
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, Cache, F, I

SCALES = ("k_scale", "v_scale")


class RaggedPageAttention(Call):
    """Mixed prefill and decode over a paged cache that already holds the new tokens."""

    name = "ragged_page_attention"
    outputs = ("tokens heads head_dim",)

    @staticmethod
    def takes(
        queries: F[Array, "tokens heads head_dim"],
        kv_pages: Cache[Array, "pages page_size combined_kv_heads head_dim"],
        context_lens: I[Array, " sequences"],
        block_tables: I[Array, "sequences max_blocks"],
        query_start_loc: I[Array, " sequences_plus_1"],
        num_seqs: int | I[Array, ""] | I[Array, "1"],
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        *,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sliding_window: int | tuple[int, int] | None = None,
        k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
        v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    ) -> None: ...

    @staticmethod
    def check_values(a: Arguments) -> None:
        settle.check_sequences(a, lengths="context_lens", counts="num_seqs")
        valid = settle.known(a["num_seqs"])
        if valid is not None:  # rows past the valid ones may hold anything
            settle.check_tables(a, "context_lens", "block_tables", "kv_pages", rows=valid)
        settle.integers_to_arrays(a, "num_seqs")
        settle.scalars_to_arrays(a, "k_scale", "v_scale")

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        heads = settle.combined_heads(a, "kv_pages")
        settle.plus_one(a, "query_start_loc", "context_lens")
        settle.softmax_options(a, query="queries")
        settle.sinks(a, query="queries")
        settle.head_scales(a, "k_scale", "v_scale", kv_heads=heads)
        settle.scalar_index(a, "num_seqs")

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Sequences of equal length, their contexts full."""
        n, tokens = a["block_tables"].shape[0], a["queries"].shape[0]
        found = drawn.tables(a, rng, "context_lens", "kv_pages")
        found |= {"query_start_loc": drawn.starts(n, tokens), "num_seqs": np.int32(n)}
        return found | drawn.normal(a, rng, "queries", "kv_pages", "softmax_aux", *SCALES)

"""The call of ragged_page_attention_v3."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ejkernel.types.calls import drawn, settle
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, Cache, F, I

SCALES = ("k_scale", "v_scale")


class RaggedPageAttentionv3(Call):
    """Cache update and mixed prefill/decode attention in one call."""

    name = "ragged_page_attention_v3"
    outputs = ("tokens heads head_dim", "=kv_cache")

    @staticmethod
    def takes(
        queries: F[Array, "tokens heads head_dim"],
        keys: F[Array, "tokens kv_heads head_dim"] | Cache[Array, "tokens kv_heads head_dim"],
        values: F[Array, "tokens kv_heads head_dim"] | Cache[Array, "tokens kv_heads head_dim"],
        kv_cache: Cache[Array, "pages page_size combined_kv_heads head_dim"]
        | Cache[Array, "pages page_size packed_kv_heads packing padded_head_dim"],
        kv_lens: I[Array, " sequences"],
        block_tables: I[Array, "sequences max_blocks"] | I[Array, " table_entries"],
        query_start_loc: I[Array, " sequences_plus_1"],
        distribution: I[Array, "3"],
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        *,
        softmax_scale: float | None = None,
        sliding_window: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        q_scale: float | F[Array, ""] | None = None,
        k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
        v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    ) -> None: ...

    @staticmethod
    def check_values(a: Arguments) -> None:
        valid = settle.check_distribution(a)
        if valid is not None:  # rows past the valid ones may hold anything
            settle.check_sequences(a, lengths="kv_lens", rows=valid)
            settle.check_tables(a, "kv_lens", "block_tables", "kv_cache", rows=valid)
        settle.scalars_to_arrays(a, "q_scale", "k_scale", "v_scale", divide=True)

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        settle.grouped_heads(a, query="queries", key="keys")
        settle.cache_form(a)
        settle.plus_one(a, "query_start_loc", "kv_lens")
        settle.softmax_options(a, query="queries")
        settle.sinks(a, query="queries")
        settle.head_scales(a, "k_scale", "v_scale", kv_heads=a["keys"].shape[1])
        settle.head_scales(a, "q_scale", kv_heads=None)

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Sequences of equal length, their contexts full."""
        n, tokens = a["kv_lens"].shape[0], a["queries"].shape[0]
        found = drawn.tables(a, rng, "kv_lens", "kv_cache")
        found["query_start_loc"] = drawn.starts(n, tokens)
        found["distribution"] = np.array([0, 0, n], np.int32)
        names = ("queries", "keys", "values", "kv_cache", "softmax_aux", "q_scale", *SCALES)
        return found | drawn.normal(a, rng, *names)

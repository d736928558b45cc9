"""The call of page_attention."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ejkernel.types.calls.paged import PagedCall
from ejkernel.types.calls.softmax import AttentionCall
from ejkernel.types.calls.spec import Arguments
from ejkernel.types.calls.words import Array, Cache, F, I


class PageAttention(PagedCall, AttentionCall):
    """One decode token per sequence over a paged cache."""

    name = "page_attention"
    normal_samples = True

    @staticmethod
    def takes(
        query: F[Array, "batch 1 heads head_dim"] | F[Array, "batch heads head_dim"],
        key_cache: Cache[Array, "pages page_size kv_heads head_dim"],
        value_cache: Cache[Array, "pages page_size kv_heads v_dim"],
        context_lens: I[Array, " batch"],
        block_tables: I[Array, "batch max_blocks"],
        *,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sliding_window: int | tuple[int, int] | None = None,
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
        v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
        num_splits: int | None = None,
    ) -> None: ...

    @classmethod
    def output_axes(cls, a: Arguments) -> tuple[str, ...]:
        return ("batch heads v_dim" if a["query"].ndim == 3 else "batch 1 heads v_dim",)

    @classmethod
    def check_values(cls, a: Arguments) -> None:
        super().check_values(a)
        cls.check_tables(a)

    @classmethod
    def operands(cls, a: Mapping[str, Any], problem: Any) -> dict[str, Any]:
        """q ``[b, h, d]``, k and v pages, lens, tables, sink ``[h, n]``, k_scale, v_scale."""
        query = a["query"]
        return {
            "q": query if query.ndim == 3 else query[:, 0],
            "k": a["key_cache"],
            "v": a["value_cache"],
            "lens": a["context_lens"],
            "tables": a["block_tables"],
            "sink": a["softmax_aux"],
            "k_scale": a["k_scale"],
            "v_scale": a["v_scale"],
        }

    @classmethod
    def without_work(cls, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        query, values, table = a["query"], a["value_cache"], a["block_tables"]
        rows = (query.shape[0], query.shape[-2], values.shape[3])
        return (
            (jnp.zeros(rows, query.dtype),) if 0 in (*rows, *values.shape, *table.shape) else None
        )

    @classmethod
    def results(cls, a: Mapping[str, Any], outputs: tuple[Any, ...]) -> Any:
        (o,) = outputs
        return o if a["query"].ndim == 3 else o[:, None]

"""The call of page_attention."""

from collections.abc import Mapping
from typing import Any

from ejkernel.types.calls.decode import DecodeCall
from ejkernel.types.calls.paged import PagedCall
from ejkernel.types.calls.softmax import AttentionCall
from ejkernel.types.calls.spec import Arguments
from ejkernel.types.calls.words import Array, Cache, F, I
from ejkernel.types.serving.operands import broadcast_operands, in_order
from ejkernel.types.serving.problem import PagedProblem


class PageAttention(DecodeCall, PagedCall, AttentionCall):
    """One decode token per sequence over a paged cache."""

    name = "page_attention"
    normal_samples = True

    @staticmethod
    def signature(
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
        return_lse: bool = False,
    ) -> None: ...

    @classmethod
    def check_values(cls, a: Arguments) -> None:
        super().check_values(a)
        cls.check_tables(a)

    @classmethod
    def problem(cls, a: Mapping[str, Any]) -> PagedProblem:
        columns = a["block_tables"].shape[1]
        arrays = (a["query"], a["key_cache"], a["value_cache"])
        return PagedProblem.from_arguments(a, *arrays, max_pages=columns)

    @classmethod
    def stage_operands(cls, arrays: Mapping[str, Any], problem: PagedProblem) -> dict[str, Any]:
        """Returns the operands of the first stage."""
        operands = {
            "q": cls._query_rows(arrays),
            "k": arrays["key_cache"],
            "v": arrays["value_cache"],
            "lens": arrays["context_lens"],
            "tables": arrays["block_tables"],
        }
        return in_order(operands | broadcast_operands(arrays))

    @classmethod
    def empty_outputs(cls, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        query, values, table = a["query"], a["value_cache"], a["block_tables"]
        is_empty = 0 in (*query.shape[:-1], *values.shape, *table.shape)
        return cls._nothing_seen(query, values.shape[3]) if is_empty else None

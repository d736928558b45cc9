"""The call of ragged_decode_attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ejkernel.types.calls import values
from ejkernel.types.calls.decode import DecodeCall
from ejkernel.types.calls.spec import Arguments
from ejkernel.types.calls.words import Array, F, I
from ejkernel.types.serving.operands import broadcast_operands, in_order
from ejkernel.types.serving.problem import PagedProblem


class RaggedDecodeAttention(DecodeCall):
    """One decode token per sequence over a contiguous cache."""

    name = "ragged_decode_attention"
    sequence_hint = "shard batch or heads"
    normal_samples = True

    @staticmethod
    def signature(
        query: F[Array, "batch 1 heads head_dim"] | F[Array, "batch heads head_dim"],
        key: F[Array, "batch kv_len kv_heads head_dim"],
        value: F[Array, "batch kv_len kv_heads v_dim"],
        sequence_start: I[Array, " batch"],
        sequence_end: I[Array, " batch"],
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        *,
        softmax_scale: float | None = None,
        sliding_window: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        return_lse: bool = False,
    ) -> None: ...

    @classmethod
    def check_contents(cls, a: Arguments) -> None:
        """Rows of keys lie inside the cache, and none ends before it starts."""
        length = a["key"].shape[1]
        for name in ("sequence_start", "sequence_end"):
            bounds = a[name]
            is_outside = (bounds < 0) | (bounds > length)
            values.check_entries(name, bounds, is_outside, f"0 to {length}, the tokens of key")
        start, end = a["sequence_start"], a["sequence_end"]

        def legal(row: int) -> str:
            return f"0 to sequence_end[{row}], which is {int(end[row])}"

        values.check_entries("sequence_start", start, start > end, legal)

    @classmethod
    def problem(cls, a: Mapping[str, Any]) -> PagedProblem:
        """The problem of a paged cache: every sequence has one page, its row of the cache."""
        return PagedProblem.from_arguments(a, a["query"], a["key"], a["value"], max_pages=1)

    @classmethod
    def stage_operands(cls, arrays: Mapping[str, Any], problem: PagedProblem) -> dict[str, Any]:
        """Returns the operands of the first stage."""
        operands = {
            "q": cls._query_rows(arrays),
            "k": arrays["key"],
            "v": arrays["value"],
            "lens": arrays["sequence_end"],
            # a numpy array is a constant of the program; jnp.arange would be a launch
            "tables": np.arange(problem.batch, dtype=np.int32)[:, None],
            "begins": arrays["sequence_start"],
        }
        return in_order(operands | broadcast_operands(arrays))

    @classmethod
    def empty_outputs(cls, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        query, value = a["query"], a["value"]
        is_empty = 0 in (*query.shape, value.shape[1], value.shape[3])
        return cls._nothing_seen(query, value.shape[3]) if is_empty else None

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Whole rows."""
        b, length = a["key"].shape[:2]
        ends = {"sequence_start": np.zeros((b,), np.int32)}
        ends["sequence_end"] = np.full((b,), length, np.int32)
        return super().samples(a, rng) | ends

"""Stages and mapped calls of operations on the newest tokens of each sequence over a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ejkernel.types.attention.softmax import name_residuals
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.serving.operands import fold_decode
from ejkernel.types.serving.problem import PagedProblem


class DecodeCall(Call):
    """A call whose kernels are the stages ``decode`` and ``merge``."""

    @classmethod
    def output_axes(cls, a: Arguments) -> tuple[str, ...]:
        rows = "batch heads" if a["query"].ndim == 3 else "batch 1 heads"
        return cls.select_outputs(a, (rows + " v_dim", rows))

    @classmethod
    def visible_keys(cls, a: Arguments) -> tuple[Any, Any]:
        """Returns the sequence of every query row, and the keys that it sees of it."""
        lengths = a["context_lens"]
        return jnp.arange(lengths.shape[0], dtype=jnp.int32), lengths

    @classmethod
    def with_rows(cls, a: Arguments, tables: Any, lengths: Any) -> Arguments:
        """Returns the call in which every query row is a sequence, of this table and length."""
        return {**a, "block_tables": tables, "context_lens": lengths}

    @classmethod
    def stage_outputs(cls, problem: PagedProblem) -> tuple[str, ...]:
        """Returns the names of the arrays that the last stage leaves."""
        return ("o", "lse") if problem.return_lse else ("o",)

    @classmethod
    def outputs_of_stages(
        cls, arrays: Mapping[str, Any], problem: PagedProblem, outputs: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Returns the outputs of the call from the arrays of the last stage."""
        rows = arrays["query"].shape[:-1]
        o, *lse = outputs
        return name_residuals(o.reshape(*rows, problem.value_dim), *(x.reshape(rows) for x in lse))

    @staticmethod
    def _query_rows(arrays: Mapping[str, Any]) -> Any:
        """Returns the query ``[batch, heads, head_dim]``."""
        query = arrays["query"]
        return query if query.ndim == 3 else query[:, 0]

    @classmethod
    def _nothing_seen(cls, query: Any, value_dim: int) -> tuple[Any, ...]:
        """Returns the outputs of rows that see no key: 0, with an lse of minus infinity."""
        rows = query.shape[:-1]
        lse = jnp.full(rows, -jnp.inf, jnp.float32)
        return jnp.zeros((*rows, value_dim), query.dtype), lse

    @classmethod
    def fold_batch(
        cls, problem: PagedProblem, size: int, operands: Mapping[str, Any],
        is_batched: Mapping[str, bool],
    ) -> tuple[PagedProblem, dict[str, Any]]:  # fmt: skip
        """Returns ``size`` calls as one of more sequences, so that work stays even."""
        return fold_decode(problem, size, operands, is_batched)

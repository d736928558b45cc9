"""Stages and mapped calls of operations on the newest tokens of each sequence over a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel.types.serving.operands import fold_decode
from ejkernel.types.serving.problem import PagedProblem


class DecodeCall:
    """A call whose kernels are the stages ``decode`` and ``merge``."""

    @classmethod
    def stage_outputs(cls, problem: PagedProblem) -> tuple[str, ...]:
        """Returns the names of the arrays that the last stage leaves."""
        return ("o", "lse") if problem.return_lse else ("o",)

    @classmethod
    def fold_batch(
        cls, problem: PagedProblem, size: int, operands: Mapping[str, Any],
        is_batched: Mapping[str, bool],
    ) -> tuple[PagedProblem, dict[str, Any]]:  # fmt: skip
        """Returns ``size`` calls as one of more sequences, so that work stays even."""
        return fold_decode(problem, size, operands, is_batched)

"""Softmax attention as a kernel object, as far as no kernel does it in its own way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ejkernel.types.hidden import cleared_rows, without_dead_rows
from ejkernel.types.pattern import rows_see_tiles
from ejkernel.types.problem import Problem
from ejkernel.types.softmax import row_delta, sink_gradient
from ejkernel.types.structure import HULL, LISTED


class SoftmaxKernel:
    """A kernel whose own part of the backward pass are the gradients of q, k and v.

    Rows that see no key are cleared where a walk would read them: their weights are 0, but what
    they hold may be anything.
    """

    def notes_on(self, problem: Problem, target: Any) -> tuple[str, ...]:
        if problem.pattern_blocks is not None:
            return (LISTED,)
        return (HULL,) if problem.rules.arrays else ()

    def backward_tiles(self, work: Any) -> Iterable[tuple[int, int]]:
        """Rows and keys of each tile that the backward pass walks over a pattern with."""
        return ()

    def finds_delta(self, work: Any) -> bool:
        """Whether ``gradients`` finds delta itself."""
        return False

    def gradients(self, work: Any, arrays: dict[str, Any]) -> dict[str, Any]:
        """Gradients by name. Beside the arrays of the call there are do, ``base``, what forward
        saved, and delta; in place of delta o and dlse where ``finds_delta`` says so."""
        raise NotImplementedError

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        p, q = work.problem, arrays["q"]
        (o, lse), (do, dlse) = outputs, cotangents
        if p.pattern_blocks is None:
            q, do, dlse = without_dead_rows(arrays["mask"], p.kv_len, lse, q, do, dlse)
        elif p.biased or not all(rows_see_tiles(p, *tile) for tile in self.backward_tiles(work)):
            # the gradient of a bias reads every row
            q, do, dlse = cleared_rows(lse, q, do, dlse)
        given = {"q": q, "do": do, "base": saved}
        if "sink" not in arrays and self.finds_delta(work):
            return self.gradients(work, arrays | given | {"o": o, "dlse": dlse})
        delta = row_delta(o, do, dlse)
        found = self.gradients(work, arrays | given | {"delta": delta})
        if "sink" in arrays:
            found["sink"] = sink_gradient(arrays["sink"], lse, delta)
        return found

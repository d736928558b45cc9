"""Base of kernels over the blockwise passes: final rows with sinks, and their gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from ejkernel.kernels.xla._common.blockwise import Spec, row_delta
from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._common.tiles import Blocks, Passes
from ejkernel.kernels.xla.flash_attention import tiles
from ejkernel.kernels.xla.kernel import XlaKernel
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types.attention.rows import finalize_rows, sink_gradient


class BlockwiseKernel(XlaKernel):
    """Attention of query, key and value by ``blockwise``; sinks and delta apply to full rows.

    Residuals are the arguments, o and two values per row for its probabilities (``RowScales``).
    """

    has_backward: ClassVar[bool] = True
    saved_axes: ClassVar[str] = "batch q_len heads"

    def choose(self, problem: Any, target: Any) -> Passes:
        heads, dim = problem.query.shape[2:]
        return tiles.choose(heads // max(problem.key.shape[2], 1), dim)

    def rows(self, work: Work, arrays: Arrays) -> tuple[Any, Any, float]:
        """Output and ``Rows`` of all keys, as ``blockwise.forward`` gives them, and their unit."""
        raise NotImplementedError

    def output_dtype(self, work: Work, arrays: Arrays) -> Any:
        """Returns the dtype of o."""
        return arrays["query"].dtype

    def gradients(self, work: Work, arrays: Arrays, **rows: Any) -> Mapping[str, Any]:
        """Returns gradients by name; ``rows`` are keywords of ``blockwise.backward``."""
        raise NotImplementedError

    # ---- a part of the keys, as in ``SoftmaxKernel`` ------------------------------------------

    def row_unit(self, problem: Any) -> float:
        return Spec.from_problem(problem, Blocks(1, 1)).unit(problem.bias)

    def partial_dtypes(self, problem: Any) -> tuple[Any, Any]:
        arrays = (problem.query, problem.key, problem.value)
        acc = accumulation_dtype(*arrays, at_least=jnp.dtype(problem.logits_dtype))
        return acc, acc

    def partial_result(self, work: Work, arrays: Arrays) -> tuple[Any, Any]:
        o, rows, _ = self.rows(work, arrays)
        return o, rows

    def partial_gradients(
        self, work: Work, arrays: Arrays, *, scales: Any, delta: Any, dlse: Any, o: Any, do: Any
    ) -> Mapping[str, Any]:
        return self.gradients(work, arrays, row_scales=scales, delta=delta, do=do)

    def saved_of(self, problem: Any, scales: Any) -> Any:
        return scales

    def scales_of(self, problem: Any, saved: Any, lse: Any, sinks: Any) -> Any:
        return saved

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        o, rows, unit = self.rows(work, arrays)
        o, lse, row_scales = finalize_rows(o, rows, arrays.get("softmax_aux"), unit)
        return (o.astype(self.output_dtype(work, arrays)), lse), row_scales

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        delta = row_delta(outputs[0], *cotangents, saved.m.dtype)
        rows = {"row_scales": saved, "delta": delta, "do": cotangents[0]}
        grads = dict(self.gradients(work, arrays, **rows))
        if "softmax_aux" in arrays:
            grads["softmax_aux"] = sink_gradient(arrays["softmax_aux"], saved, delta)
        return grads

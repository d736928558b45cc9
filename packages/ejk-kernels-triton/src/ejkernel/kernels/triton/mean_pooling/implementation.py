"""Mean pooling in Triton as one kernel object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.kernel import TritonKernel, unsupported_operands
from ejkernel.kernels.triton.mean_pooling import tiles
from ejkernel.kernels.triton.mean_pooling.backward import PoolBackward
from ejkernel.kernels.triton.mean_pooling.forward import MergeSplits, PoolGroups
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.problems.mean_pooling import PoolingProblem


class MeanPooling(TritonKernel):
    """Means of sequences, packed sequences or chunks of them, on a GPU.

    float16, bfloat16 and float32, accumulated in float32. Two calls give the same bits.
    Differentiable once. ``vmap`` is one launch. ``cfg``: token_tile, channel_tile, num_warps.
    """

    call = calls.MeanPooling
    reads = frozenset({"x", "cu_seqlens", "chunk_size", "attention_mask"})
    problem = staticmethod(PoolingProblem.from_call)
    choose = staticmethod(tiles.choose)
    neighbours = staticmethod(tiles.neighbours)
    saved_axes = "batch"

    def variant_reason(self, problem: Any) -> str | None:
        return None

    def sequence_problem(self, problem: Any) -> Any:
        return replace(problem, batch=1)

    def unsupported_reason(self, problem: PoolingProblem, target: Target) -> str | None:
        return unsupported_operands({"x": problem.dtype}, {})

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, t, rows = work.problem, work.tiles, _rows(work.problem, arrays)
        pooled = call(PoolGroups(p, t), x=arrays["x"], **rows)
        if t.split:
            partial, count = pooled["out"], pooled.get("count")
            launch = MergeSplits(p, t)
            pooled = call(launch, partial=partial, partial_count=count, cu=rows["cu"])
        return (pooled["out"],), pooled.get("count")

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        launch = PoolBackward(work.problem, work.tiles)
        rows = _rows(work.problem, arrays)
        return {"x": call(launch, dout=cotangents[0], count=saved, **rows)["dx"]}


def _rows(problem: PoolingProblem, arrays: Arrays) -> dict[str, jax.Array | None]:
    """Returns the operands that say which rows belong to a group."""
    cu = arrays["cu_seqlens"][None] if problem.sequences else None
    return {"row_mask": arrays["kept"] if problem.masked else None, "cu": cu}


mean_pooling = MeanPooling()

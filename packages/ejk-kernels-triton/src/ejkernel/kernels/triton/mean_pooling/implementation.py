"""Mean pooling in Triton as one kernel object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.kernel import TritonKernel, unsupported
from ejkernel.kernels.triton.launch import Batched, KernelPlan, Launch, struct
from ejkernel.kernels.triton.mean_pooling import tiles as choice
from ejkernel.kernels.triton.mean_pooling.tiles import Problem, Tiles
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls


class MeanPooling(TritonKernel):
    """Means of sequences, packed sequences or chunks of them, on a GPU.

    float16, bfloat16 and float32, summed in float32. Two runs give the same bits. Differentiable
    once. ``vmap`` is one launch. ``cfg``: token_tile, channel_tile, num_warps.
    """

    call = calls.MeanPooling
    reads = frozenset({"x", "cu_seqlens", "chunk_size", "attention_mask"})
    problem = staticmethod(choice.problem_of)
    choose = staticmethod(choice.choose)
    neighbours = staticmethod(choice.neighbours)
    saved_axes = "batch"

    def unsupported_reason(self, problem: Problem, target: Target) -> str | None:
        return unsupported({"x": problem.dtype}, {})

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, t = work.problem, work.tiles
        cu = [arrays["cu_seqlens"][None]] if p.sequences else []
        kept = [arrays["kept"]] if p.masked else []
        found = call(PoolPlan(p, t, "sums"), arrays["x"], *kept, *cu)
        if t.part:
            found = call(PoolPlan(p, t, "merge"), *found, *cu)
        mean, *count = found
        return (mean,), tuple(count)

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        p = work.problem
        cu = [arrays["cu_seqlens"][None]] if p.sequences else []
        kept = [*saved, arrays["kept"]] if p.masked else []
        return {"x": call(PoolPlan(p, work.tiles, "spread"), cotangents[0], *kept, *cu)[0]}


@dataclass(frozen=True)
class PoolPlan(Batched, KernelPlan):
    """One of the three launches: means or sums of parts, the parts' means, the gradient."""

    problem: Problem
    tiles: Tiles
    kind: str

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p, dtype = self.problem, self.problem.dtype
        if self.kind == "spread":
            return (struct(dtype, p.batch, p.rows, p.channels),)
        rows = p.batch * p.groups
        if self.kind == "sums" and self.tiles.part:
            rows, dtype = p.batch * self.tiles.split(p)[0], "float32"
        found = (struct(dtype, rows, p.channels),)
        return (*found, struct("float32", rows)) if p.masked else found

    def launch(self, target: Target) -> Launch:
        from ejkernel.kernels.triton.mean_pooling import backward, forward

        kinds = {"sums": forward.launch, "merge": forward.merge_launch, "spread": backward.launch}
        return kinds[self.kind](self.problem, self.tiles)


mean_pooling = MeanPooling()

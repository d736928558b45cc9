"""Mean pooling in Triton as one kernel object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.bridge import Plan, call, merge_leading
from ejkernel.kernels.triton.kernel import TritonKernel
from ejkernel.kernels.triton.launch import Launch
from ejkernel.kernels.triton.mean_pooling import tiles as choice
from ejkernel.kernels.triton.mean_pooling.tiles import BYTES, Problem, Tiles
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls


class MeanPooling(TritonKernel):
    """Means of sequences, packed sequences or chunks of them, on a GPU; see the operation of this
    name.

    float16, bfloat16 and float32, summed in float32. Two runs give the same bits. Differentiable
    once. ``vmap`` is one launch. ``cfg``: token_tile, channel_tile, num_warps.

    Source: the arithmetic mean.
    """

    call = calls.MeanPooling

    def problem(self, a: Mapping[str, Any]) -> Problem:
        return choice.problem_of(a)

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.dtype not in BYTES:
            return f"x: {problem.dtype} is not supported, only {', '.join(BYTES)}"
        return None

    def choose(self, problem: Problem, target: Target) -> Tiles:
        return choice.choose(problem, target)

    def near(self, problem: Problem, target: Target, chosen: Tiles) -> Iterable[Tiles]:
        return choice.near(problem, chosen)

    def honour(self, chosen: Tiles, cfg: Any, problem: Problem, target: Target) -> Tiles:
        return choice.honour(chosen, cfg, problem)

    def fields(self, chosen: Tiles) -> dict[str, Any]:
        return choice.fields(chosen)

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, t = work.problem, work.tiles
        cu = [arrays["cu_seqlens"][None]] if p.sequences else []
        kept = [arrays["kept"]] if p.masked else []
        found = call(PoolPlan(p, t, "sums"), arrays["x"], *kept, *cu)
        if t.part:
            found = call(PoolPlan(p, t, "merge"), *found, *cu)
        mean, *count = found
        return (mean,), tuple(count)

    def backward(
        self,
        work: Work,
        arrays: Arrays,
        outputs: tuple[Any, ...],
        saved: Any,
        cotangents: tuple[Any, ...],
    ) -> Mapping[str, Any]:
        p = work.problem
        cu = [arrays["cu_seqlens"][None]] if p.sequences else []
        kept = [*saved, arrays["kept"]] if p.masked else []
        return {"x": call(PoolPlan(p, work.tiles, "spread"), cotangents[0], *kept, *cu)[0]}


@dataclass(frozen=True)
class PoolPlan(Plan):
    """One of the three launches: means or sums of parts, the parts' means, the gradient."""

    problem: Problem
    tiles: Tiles
    kind: str

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        from ejkernel.kernels.triton.mean_pooling import forward

        p, dtype = self.problem, jnp.dtype(self.problem.dtype)
        if self.kind == "spread":
            return (jax.ShapeDtypeStruct((p.batch, p.rows, p.channels), dtype),)
        rows = p.batch * p.groups
        if self.kind == "sums" and self.tiles.part:
            rows, dtype = p.batch * forward.split(p, self.tiles)[0], jnp.dtype(jnp.float32)
        found = (jax.ShapeDtypeStruct((rows, p.channels), dtype),)
        return (*found, jax.ShapeDtypeStruct((rows,), jnp.float32)) if p.masked else found

    def launch(self, target: Target) -> Launch:
        from ejkernel.kernels.triton.mean_pooling import backward, forward

        make = {
            "sums": forward.launch,
            "merge": forward.merge_launch,
            "spread": backward.launch,
        }[self.kind]
        return make(self.problem, self.tiles)

    def fold(
        self, size: int, arrays: Sequence[jax.Array], batched: Sequence[bool]
    ) -> tuple[Plan, Sequence[jax.Array]]:
        p = self.problem
        merged = [
            merge_leading(size, x, on, x.shape[1 if on else 0])
            for x, on in zip(arrays, batched, strict=True)
        ]
        return replace(self, problem=replace(p, batch=size * p.batch)), merged


mean_pooling = MeanPooling()

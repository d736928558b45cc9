"""Linear attention in Triton: three operations, one kernel object each over the same kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.triton.kernel import TritonKernel
from ejkernel.kernels.triton.linear_attention import tiles
from ejkernel.kernels.triton.linear_attention.pipeline import Pipeline, decode
from ejkernel.kernels.triton.linear_attention.problem import Problem, problem_of
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.call_kernel import CallKernel
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.calls import arguments


class LinearAttention(TritonKernel):
    """Common to the three operations."""

    problem = staticmethod(problem_of)
    choose = staticmethod(tiles.choose)
    neighbours = staticmethod(tiles.neighbours)
    saved_axes = "batch heads key_dim v_dim"  # states before the segments of all rows

    def variant_reason(self, problem: Any) -> str | None:
        return None

    def sequence_problem(self, problem: Any) -> Any:
        return replace(problem, batch=1)

    def unsupported_reason(self, problem: Problem, target: Target) -> str | None:
        return problem.unsupported or None

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        if tiles.few_tokens(work.problem):
            return decode(work, arrays), None
        pipeline = Pipeline(work, arrays)
        starts, state = pipeline.segment_starts(arrays.get("initial_state"))
        return (pipeline.compute_output(starts), state), starts

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        do, dstate = cotangents
        pipeline = Pipeline(work, arrays | {"do": do})
        if saved is None:
            saved, _ = pipeline.segment_starts(arrays.get("initial_state"))
        return pipeline.compute_gradients(arrays, saved, outputs[1], dstate)


class RecurrentAttention(LinearAttention):
    """The gated recurrence, on a GPU.

    float16, bfloat16 and float32, states and accumulation in float32; head dims up to 256.
    Gates of every kind. Two calls give the same bits. Differentiable once.
    ``vmap`` is one launch. ``cfg``: time_tile, dv_tile, num_warps, num_stages.
    """

    call = calls.RecurrentAttention
    reads = arguments.RECURRENCE | {"g", "g_gamma", "gk", "gv"}


class GLAttention(LinearAttention):
    """Gated linear attention, on a GPU, as ``recurrent_attention``."""

    call = calls.GLAttention
    reads = arguments.RECURRENCE | {"g", "g_gamma"}


class LightningAttention(LinearAttention):
    """Linear attention with one decay a head and layer, on a GPU, as ``recurrent_attention``."""

    call = calls.LightningAttention
    reads = arguments.RECURRENCE | {"layer_idx", "num_layers"}

    def on_shards(self, a: Mapping[str, Any]) -> tuple[CallKernel, Mapping[str, Any]]:
        """A shard has some of the heads, and decays count all of them."""
        decays = jnp.asarray(self.problem(a).slopes, jnp.float32)
        same = {n: x for n, x in a.items() if n not in ("layer_idx", "num_layers")}
        return _decaying, same | {"g_gamma": decays}


class _Decaying(GLAttention):
    """Lightning attention by the decays of its heads, which have no gradients."""

    def operands(self, a: Mapping[str, Any], problem: Problem) -> Arrays:
        operands = super().operands(a, problem)
        operands["decays"] = operands.pop("g_gamma")
        return operands


_decaying = _Decaying()

recurrent_attention = RecurrentAttention()
gla_attention = GLAttention()
lightning_attention = LightningAttention()

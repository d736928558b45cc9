"""The short causal convolution in Triton as one kernel object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.causal_conv1d import tiles
from ejkernel.kernels.triton.causal_conv1d.backward import ConvolveBackwardLaunch
from ejkernel.kernels.triton.causal_conv1d.forward import ConvolveLaunch
from ejkernel.kernels.triton.kernel import TritonKernel, unsupported_operands
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.calls import arguments
from ejkernel.types.problems.convolution import ConvolutionProblem, float_dtypes


class CausalConv1D(TritonKernel):
    """A convolution of 2 to 8 taps over the tokens of each channel, with its state, on a GPU.

    float16, bfloat16 and float32, mixed too, summed in float32. Two runs give the same bits.
    Differentiable once. ``vmap`` is one launch. ``cfg``: token_tile, channel_tile, num_warps.
    """

    call = calls.CausalConv1D
    reads = arguments.CONVOLUTION
    choose = staticmethod(tiles.choose)
    neighbours = staticmethod(tiles.neighbours)

    def problem(self, a: Mapping[str, Any]) -> ConvolutionProblem:
        return ConvolutionProblem.from_call(a, unsupported_operands(float_dtypes(a), {}) or "")

    def variant_reason(self, problem: Any) -> str | None:
        return None

    def sequence_problem(self, problem: Any) -> Any:
        return replace(problem, batch=1)

    def unsupported_reason(self, problem: ConvolutionProblem, target: Target) -> str | None:
        return problem.unsupported or None

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        results = call(ConvolveLaunch(work.problem, work.tiles), **_operands(arrays))
        return (results["y"], results["state"]), ()

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        p, (dy, dstate) = work.problem, cotangents
        t = work.tiles.backward(p, work.target, has_state="initial_state" in arrays)
        launch = ConvolveBackwardLaunch(p, t)
        # the gradient of a state that nobody gets is 0
        dstate = dstate if p.returns_state else None
        results = call(launch, **_operands(arrays), dy=dy, dstate=dstate)
        dtaps, width = jnp.sum(results["partials"], 0), p.width
        gradients = {"x": results["dx"], "weight": dtaps[:width].T}
        if "bias" in arrays:
            gradients["bias"] = dtaps[width]
        if "initial_state" in arrays:
            gradients["initial_state"] = results["dinitial"]
        return gradients


def _operands(arrays: Arrays) -> dict[str, Any]:
    """Returns the operands of both launches by name; what batch rows share has a leading 1."""
    shared = {"weight": "weight", "bias": "bias", "cu": "cu_seqlens"}
    operands = {name: arrays.get(theirs) for name, theirs in shared.items()}
    operands = {name: x if x is None else x[None] for name, x in operands.items()}
    return operands | {"x": arrays["x"], "initial_state": arrays.get("initial_state")}


causal_conv1d = CausalConv1D()

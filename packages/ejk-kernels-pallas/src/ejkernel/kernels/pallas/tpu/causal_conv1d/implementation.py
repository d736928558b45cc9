"""The short causal convolution on TPU as one kernel object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.kernels.pallas.tpu.causal_conv1d.backward import backward
from ejkernel.kernels.pallas.tpu.causal_conv1d.forward import forward
from ejkernel.kernels.pallas.tpu.causal_conv1d.tiles import choose
from ejkernel.kernels.pallas.tpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.tpu.common.segments import packed_bounds, visits
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.calls import arguments
from ejkernel.types.problems.convolution import ConvolutionProblem, float_dtypes

DTYPES = ("bfloat16", "float32")
MIN_ROWS = 16


class CausalConv1D(PallasKernel):
    """A convolution of 2 to 8 taps over the tokens of each channel, with its state, on a TPU.

    bfloat16 and float32, mixed too, summed in float32, 16 rows and more. Two calls give the same
    bits. Differentiable once. No config names tiles.
    """

    call = calls.CausalConv1D
    reads = arguments.CONVOLUTION
    fixed_tiles = True
    chip = staticmethod(current_chip)
    choose = staticmethod(choose)

    def problem(self, a: Mapping[str, Any]) -> ConvolutionProblem:
        return ConvolutionProblem.from_call(a, _unsupported(a))

    def variant_reason(self, problem: ConvolutionProblem) -> str | None:
        return None  # a row is a sum of its taps, in their order, wherever in a block it lies

    def unsupported_reason(self, problem: ConvolutionProblem, target: Chip) -> str | None:
        return problem.unsupported or None

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, x = work.problem, arrays["x"]
        bounds, operands = _operands(p, arrays)
        schedule = visits(bounds, p.total, work.tiles.rows)
        y = forward(p, work.tiles, work.target, schedule, *operands).reshape(x.shape)
        if not p.returns_state:
            return (y, jnp.zeros((p.states, p.channels, p.width - 1), p.dtype)), ()
        flat, _, states = operands
        row, is_state_token = _last_tokens(p, bounds)
        from_rows = jnp.take(flat, row, axis=0, mode="clip").astype(jnp.float32)
        # the tokens before a short sequence are the end of its state
        from_state = jnp.sum(jnp.where(is_state_token[..., None], states[:, None], 0.0), axis=2)
        final = jnp.where((row < p.total)[..., None], from_rows, from_state)
        return (y, jnp.swapaxes(final, 1, 2).astype(p.dtype)), ()

    def backward(
        self, work: Work, arrays: Arrays, outputs: Any, saved: Any, cotangents: Any
    ) -> Mapping[str, Any]:
        p, (dy, dfinal) = work.problem, cotangents
        bounds, operands = _operands(p, arrays)
        schedule = visits(bounds, p.total, work.tiles.rows)
        dy = dy.reshape(p.total, p.channels)
        dx, dtaps, dstates = backward(p, work.tiles, work.target, schedule, *operands, dy)
        is_empty = bounds[1:-1] == bounds[:-2]
        dstates = jnp.where(is_empty[:, None, None], 0.0, dstates[:-1])
        # the gradient of a state that nobody gets is 0
        if p.returns_state:
            row, is_state_token = _last_tokens(p, bounds)
            dlast = jnp.swapaxes(dfinal.astype(jnp.float32), 1, 2)
            dx = dx.at[row].add(dlast.astype(dx.dtype), mode="drop")
            from_last = jnp.where(is_state_token[..., None], dlast[:, :, None], 0.0)
            dstates += jnp.sum(from_last, axis=1)
        gradients = {
            "x": dx.reshape(arrays["x"].shape),
            "weight": dtaps[: p.width].T,
            "bias": dtaps[p.width],
            "initial_state": jnp.swapaxes(dstates, 1, 2),
        }
        return {name: dx for name, dx in gradients.items() if name in arrays}


def _unsupported(a: Mapping[str, Any]) -> str:
    """Returns the reason why no kernel here takes the call, or ""."""
    for name, dtype in float_dtypes(a).items():
        if dtype not in DTYPES:
            return f"{name}: {dtype} is not supported, only {' and '.join(DTYPES)}"
    if a["x"].shape[1] < MIN_ROWS:
        return f"x: fewer than {MIN_ROWS} rows are not supported"
    return ""


def _operands(p: ConvolutionProblem, arrays: Arrays) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the bounds of the sequences and the operands of both passes.

    Bounds are ``[states + 2]``: the last segment has the rows of no sequence. Operands are rows
    ``[total, channels]`` and, in float32, taps with the bias ``[w + 1, channels]`` and states
    ``[states, w - 1, channels]``.
    """
    if p.sequences:
        bounds = packed_bounds(arrays["cu_seqlens"], p.total)
    else:
        bounds = jnp.asarray(np.arange(p.batch + 1) * p.rows, jnp.int32)
    bias = arrays.get("bias")
    bias = jnp.zeros(p.channels) if bias is None else bias
    taps = [arrays["weight"].T.astype(jnp.float32), bias[None].astype(jnp.float32)]
    state = arrays.get("initial_state")
    if state is None:
        states = jnp.zeros((p.states, p.width - 1, p.channels), jnp.float32)
    else:
        states = jnp.swapaxes(state.astype(jnp.float32), 1, 2)
    flat = arrays["x"].reshape(p.total, p.channels)
    return jnp.append(bounds, p.total), (flat, jnp.concatenate(taps), states)


def _last_tokens(p: ConvolutionProblem, bounds: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns where the last w - 1 tokens of every sequence are, for its final state.

    First their rows ``[states, w - 1]``; ``p.total``, which no row has, for a token that is older
    than the sequence. Then ``[states, w - 1, w - 1]``: which token of the initial state that is.
    """
    start, end = bounds[:-2, None], bounds[1:-1, None]
    row = end - (p.width - 1) + jnp.arange(p.width - 1)
    age = row - start + p.width - 1
    is_state_token = age[..., None] == jnp.arange(p.width - 1)
    return jnp.where(row >= start, row, p.total), is_state_token


causal_conv1d = CausalConv1D()

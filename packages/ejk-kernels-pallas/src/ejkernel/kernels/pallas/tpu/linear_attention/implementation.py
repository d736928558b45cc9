"""Linear attention on TPU: three operations, one kernel object each over the same kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.kernels.pallas.tpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.tpu.common.segments import Visits, packed_bounds, visits
from ejkernel.kernels.pallas.tpu.linear_attention.backward import backward
from ejkernel.kernels.pallas.tpu.linear_attention.forward import forward, in_lanes
from ejkernel.kernels.pallas.tpu.linear_attention.problem import (
    Problem,
    choose,
    problem_of,
    variant_reason,
)
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.attention.softmax import sum_by_halves
from ejkernel.types.calls import arguments


class LinearAttention(PallasKernel):
    """The part that the three operations share."""

    fixed_tiles = True
    chip = staticmethod(current_chip)
    problem = staticmethod(problem_of)
    choose = staticmethod(choose)

    def unsupported_reason(self, problem: Problem, target: Chip) -> str | None:
        return problem.unsupported or None

    def variant_reason(self, problem: Problem) -> str | None:
        return variant_reason(problem, self.choose(problem, self.target()))

    def log_decays(self, work: Work, arrays: Arrays) -> jax.Array | None:
        """Returns the sum of the log decays, float32 ``[heads, 1, rows]``."""
        p = work.problem
        if not p.gated:
            return None
        total = jnp.zeros((p.heads, 1, p.total), jnp.float32)
        if "g" in arrays:
            gate = jnp.moveaxis(arrays["g"].astype(jnp.float32), 2, 0)
            total += gate.reshape(p.heads, 1, p.total)
        if "g_gamma" in arrays:
            total += arrays["g_gamma"].astype(jnp.float32)[:, None, None]
        return total

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        return self._forward(work, arrays, keep=True)

    def without_gradients(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        return self._forward(work, arrays, keep=False)

    def _forward(self, work: Work, arrays: Arrays, *, keep: bool) -> tuple[tuple[Any, ...], Any]:
        p = work.problem
        state = arrays.get("initial_state")
        if state is None:
            state = jnp.zeros((p.total_states, p.heads, p.dim, p.value_dim), jnp.float32)
        o, final, before = forward(
            *(p, work.tiles, work.target, visits_of(work, arrays)),
            self._operands(work, arrays, "query", "key", "value"),
            state.astype(jnp.float32),
            keep=keep,
        )
        return (batched(p, o, p.heads), final), before

    def _operands(self, work: Work, arrays: Arrays, *names: str) -> tuple[jax.Array | None, ...]:
        rows = (by_head(arrays[name].astype(work.problem.dtype)) for name in names)
        return (*rows, self.log_decays(work, arrays))

    def backward(
        self, work: Work, arrays: Arrays, outputs: Any, saved: Any, cotangents: Any
    ) -> Mapping[str, Any]:
        p, (do, dfinal) = work.problem, cotangents
        operands = self._operands(work, arrays | {"do": do}, "query", "key", "value", "do")
        schedule = visits_of(work, arrays)
        dq, dk, dv, dgate, dinitial = backward(
            p, work.tiles, work.target, schedule, operands, saved, dfinal
        )
        dq, dk, dv = (batched(p, x, p.heads) for x in (dq, dk, dv))
        if p.group > 1:
            dk, dv = (sum_groups(work, x) for x in (dk, dv))
        gradients = {"query": dq, "key": dk, "value": dv, "initial_state": dinitial}
        if dgate is not None:
            dgate = dgate.reshape(p.heads, p.batch, p.rows)
            gradients["g"] = jnp.moveaxis(dgate, 0, 2)
            gradients["g_gamma"] = jnp.sum(dgate, axis=(1, 2))
        return {name: x for name, x in gradients.items() if name in arrays}


def visits_of(work: Work, arrays: Arrays) -> Visits:
    """Returns the visits of the sequences and of the rows that belong to none."""
    p = work.problem
    if p.sequences:
        bounds = jnp.append(packed_bounds(arrays["cu_seqlens"], p.total), p.total)
    else:
        bounds = jnp.asarray(np.arange(p.batch + 1) * p.rows, jnp.int32)
    return visits(bounds, p.total, work.tiles.rows, empty_segments=True)


def by_head(x: jax.Array) -> jax.Array:
    """``[batch, rows, heads, d]`` in the ``row_shape`` of kernels."""
    if in_lanes(x.shape[3]):
        return x.reshape(1, -1, x.shape[2] * x.shape[3])
    return jnp.moveaxis(x, 2, 0).reshape(x.shape[2], -1, x.shape[3])


def batched(p: Problem, x: jax.Array, heads: int) -> jax.Array:
    """An array in ``row_shape`` as ``[batch, rows, heads, d]``."""
    if x.shape[0] == heads and not in_lanes(x.shape[2]):
        return jnp.moveaxis(x.reshape(heads, p.batch, p.rows, -1), 0, 2)
    return x.reshape(p.batch, p.rows, heads, -1)


def sum_groups(work: Work, x: jax.Array) -> jax.Array:
    """Returns the sums ``[batch, rows, kv heads, d]`` over the heads that share a key."""
    shape = (*x.shape[:2], work.problem.kv_heads, work.problem.group, x.shape[3])
    if work.batch_invariant:
        return sum_by_halves(jnp.moveaxis(x.reshape(shape), 3, -1))
    return jnp.sum(x.reshape(shape), axis=3)


class RecurrentAttention(LinearAttention):
    """The gated recurrence, on a TPU.

    bfloat16 and float32, accumulated in float32, head dims up to 256, 16 rows and more, and one log
    decay a head; decays of channels are not supported. Two calls give the same bits. Differentiable
    once, in memory ``s + (s / 512) dk dv`` a head. No config names tiles.
    """

    call = calls.RecurrentAttention
    reads = arguments.RECURRENCE | {"g", "g_gamma"}


class GLAttention(LinearAttention):
    """Gated linear attention, on a TPU, within the limits of ``recurrent_attention``."""

    call = calls.GLAttention
    reads = arguments.RECURRENCE | {"g", "g_gamma"}


class LightningAttention(LinearAttention):
    """Linear attention with one decay a head and layer, on a TPU, as ``recurrent_attention``."""

    call = calls.LightningAttention
    reads = arguments.RECURRENCE | {"layer_idx", "num_layers"}

    def log_decays(self, work: Work, arrays: Arrays) -> jax.Array | None:
        p, options = work.problem, work.options
        step = -8.0 / p.heads * (1.0 - options.layer_idx / options.num_layers)
        slopes = jnp.asarray(step * np.arange(p.heads), jnp.float32)
        return super().log_decays(work, {"g_gamma": slopes})


recurrent_attention = RecurrentAttention()
gla_attention = GLAttention()
lightning_attention = LightningAttention()

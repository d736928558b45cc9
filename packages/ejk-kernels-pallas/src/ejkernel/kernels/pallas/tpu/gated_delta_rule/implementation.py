"""The gated delta rule on TPU as one kernel object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.kernels.pallas.tpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.tpu.gated_delta_rule.backward import backward
from ejkernel.kernels.pallas.tpu.gated_delta_rule.forward import forward
from ejkernel.kernels.pallas.tpu.gated_delta_rule.problem import (
    Problem,
    Tiles,
    choose,
    problem_of,
)
from ejkernel.kernels.pallas.tpu.linear_attention.implementation import (
    batched,
    by_head,
    visits_of,
)
from ejkernel.kernels.pallas.tpu.linear_attention.problem import variant_reason
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.calls import arguments


class GatedDeltaRule(PallasKernel):
    """The gated delta rule, gates per head or per key channel, on a TPU.

    bfloat16 and float32, accumulated in float32, head dims up to 256, 16 rows and more, as many
    value heads a key as vector memory holds states for. Two calls give the same bits.
    Differentiable once, in memory ``s + (s / 512) dk dv`` a head. No config names tiles.
    """

    call = calls.GatedDeltaRule
    reads = arguments.RECURRENCE | {"g", "beta", "normalize_qk"}
    fixed_tiles = True
    chip = staticmethod(current_chip)
    problem = staticmethod(problem_of)
    choose = staticmethod(choose)

    def unsupported_reason(self, problem: Problem, target: Chip) -> str | None:
        if problem.unsupported:
            return problem.unsupported
        # what the compiler keeps of chunks of channel gates is up to a third more than estimated
        limit = target.tile_memory if problem.channels else target.vmem
        if Tiles(chunks=1).vmem(problem, backward=True) > limit:
            heads = f"{problem.group} heads of {problem.value_dim} that share a key"
            return f"value: the states of {heads} do not fit into vector memory"
        return None

    def variant_reason(self, problem: Problem) -> str | None:
        return variant_reason(problem, self.choose(problem, self.target()))

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
            _operands(p, arrays, "query", "key", "value"),
            state.astype(jnp.float32),
            keep=keep,
        )
        return (batched(p, o, p.heads), final), before

    def backward(
        self, work: Work, arrays: Arrays, outputs: Any, saved: Any, cotangents: Any
    ) -> Mapping[str, Any]:
        p, (do, dfinal) = work.problem, cotangents
        operands = _operands(p, arrays | {"do": do}, "query", "key", "value", "do")
        dq, dk, dv, dbeta, dgate, dinitial = backward(
            p, work.tiles, work.target, visits_of(work, arrays), operands, saved, dfinal
        )
        dq, dk = (batched(p, x, p.kv_heads) for x in (dq, dk))
        dv = batched(p, dv, p.heads)
        gradients = {"query": dq, "key": dk, "value": dv, "initial_state": dinitial}
        gradients["beta"] = _batched_factors(p, dbeta)
        if dgate is not None:
            gradients["g"] = (
                batched(p, dgate, p.heads) if p.channels else _batched_factors(p, dgate)
            )
        return {name: x for name, x in gradients.items() if name in arrays}


def _operands(p: Problem, arrays: Arrays, *names: str) -> tuple[jax.Array | None, ...]:
    """Returns rows by head, and in float32 beta ``[heads, 1, rows]`` and the log decays, if any."""
    rows = (by_head(arrays[name].astype(p.dtype)) for name in names)
    beta = arrays.get("beta")
    if beta is None:
        beta = jnp.ones((p.batch, p.rows, p.heads))
    gate = arrays["g"] if p.gated else None
    if gate is not None:
        gate = by_head(gate.astype(jnp.float32)) if p.channels else _factors_by_head(p, gate)
    return (*rows, _factors_by_head(p, beta), gate)


def _factors_by_head(p: Problem, x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x.astype(jnp.float32), 2, 0).reshape(p.heads, 1, p.total)


def _batched_factors(p: Problem, x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x.reshape(p.heads, p.batch, p.rows), 0, 2)


gated_delta_rule = GatedDeltaRule()

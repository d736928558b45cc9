"""Chunks of the delta rule with one decay a head: factors of the rows, and of the pairs.

Gradients, with dS that of the state after a chunk, R the decays to the chunk end, and the names of
``chunk``:

    A_ts = scale d(t, s) do_t u_s      B_ts = -d(t, s) dv_t u_s  (s before t)
    dq   = scale D do S^T + A k        dk = -D dv S^T + R u dS^T + B k + A^T q + B^T k

and dg as in linear attention, from A * (q k^T) + B * (k k^T) and what goes through the states.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.tpu.gated_delta_rule.chunk import (
    Gates,
    PairGradients,
    chunk_rows,
    row_dots,
)
from ejkernel.kernels.pallas.tpu.gated_delta_rule.problem import Problem
from ejkernel.kernels.pallas.tpu.linear_attention.backward import gate_gradient
from ejkernel.kernels.pallas.tpu.linear_attention.chunk import Decay, Order, decay_of, dot, scale_by


@dataclass(frozen=True)
class HeadGates(Gates):
    """A chunk with one decay for all channels, or with none.

    Attributes:
        unit_pairs: dots of unit queries and keys, and of unit keys, ``[t, s]``, not decayed.
    """

    decay: Decay
    unit_pairs: tuple[jax.Array, jax.Array]

    def read_queries(self, state: jax.Array) -> jax.Array:
        p, rows = self.p, self.rows
        return scale_by(rows.q_factor * p.scale, self.decay.since) * dot(p, rows.q, state)

    def read_keys(self, state: jax.Array) -> jax.Array:
        return scale_by(self.rows.k_factor, self.decay.since) * dot(self.p, self.rows.k, state)

    def next_state(self, update: jax.Array, state: jax.Array) -> jax.Array:
        update = scale_by(self.rows.k_factor, self.decay.until) * update
        return scale_by(state, self.decay.total) + dot(self.p, self.rows.k, update, (0, 0))

    def update_gradient(self, dstate: jax.Array) -> jax.Array:
        return scale_by(self.rows.k_factor, self.decay.until) * dot(self.p, self.rows.k, dstate)

    def state_gradient(self, do: jax.Array, dv: jax.Array, dstate: jax.Array) -> jax.Array:
        p, rows, decay = self.p, self.rows, self.decay
        do = scale_by(rows.q_factor * p.scale, decay.since) * do.astype(jnp.float32)
        dstate = scale_by(dstate, decay.total) + dot(p, rows.q, do, (0, 0))
        return dstate - dot(p, rows.k, scale_by(rows.k_factor, decay.since) * dv, (0, 0))

    def gradients(
        self,
        do: jax.Array,
        dv: jax.Array,
        update: jax.Array,
        state: jax.Array,
        dstate: jax.Array,
    ) -> PairGradients:
        p, decay = self.p, self.decay
        unit_q, unit_k = self.rows.unit_q, self.rows.unit_k
        # A and B: the gradients of scores and gram with respect to what decays in them
        dscores = dot(p, do, update, (1, 1)) * decay.pairs * p.scale
        dgram = jnp.where(self.order.before, -dot(p, dv, update, (1, 1)) * decay.pairs, 0.0)
        dq_state = scale_by(dot(p, do, state, (1, 1)), decay.since) * p.scale
        dk_state = -scale_by(dot(p, dv, state, (1, 1)), decay.since)
        dk_entering = scale_by(dot(p, update, dstate, (1, 1)), decay.until)
        dq = dq_state + dot(p, dscores, unit_k)
        dk = dk_state + dk_entering + dot(p, dgram, unit_k)
        dk += dot(p, dscores, unit_q, (0, 0)) + dot(p, dgram, unit_k, (0, 0))
        if not p.gated:
            return PairGradients(dq, dk, None)
        qk, kk = self.unit_pairs
        since = row_dots(unit_q, dq_state) + row_dots(unit_k, dk_state)
        until = row_dots(unit_k, dk_entering)
        total = scale_by(jnp.sum(dstate * state, keepdims=True), decay.total)
        pairs = qk * dscores + kk * dgram
        dgate = gate_gradient(p, self.order, pairs, since, until, total)
        return PairGradients(dq, dk, dgate)


def head_gates(
    p: Problem, order: Order, gate: jax.Array | None, q: jax.Array, k: jax.Array
) -> HeadGates:
    """Returns a chunk from its log decays ``[1, CHUNK]``, or None, and its queries and keys."""
    decay, rows = decay_of(order, gate), chunk_rows(p, q, k)
    qk, kk = rows.normalize_dots(p, dot(p, q, k, (1, 1)), dot(p, k, k, (1, 1)))
    gram = jnp.where(order.before, kk * decay.pairs, 0.0)
    return HeadGates(p, order, rows, qk * decay.pairs * p.scale, gram, decay, (qk, kk))

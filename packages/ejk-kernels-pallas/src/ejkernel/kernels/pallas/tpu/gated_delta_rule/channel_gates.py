"""Chunks of the delta rule with one decay for each key channel.

Gates have no bound, so a factor of row t times one of row s may overflow. But two rows differ first
in some bit of their places in the chunk: at that level s lies in the earlier and t in the later
half of a block. The decay between them is that from s to the end of the earlier half times that
from there to t, both at most 1. A chunk of 128 rows has seven levels: each is one matmul of
decayed queries and keys with decayed keys, of which the pairs of the level are kept.

A row has one factor E at a level, whether it is the row or the column of a pair: the exponential of
a sum of log decays, which a matmul with zeros and ones adds up. With dE that of a factor, the
gradient of the log decays is the matmul of E dE with the same zeros and ones: no sum is the
difference of two others, here or there.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.tpu.gated_delta_rule.chunk import (
    LEVELS,
    Gates,
    PairGradients,
    as_column,
    as_row,
    chunk_rows,
    is_pair,
    row_dots,
    rows_and_columns,
)
from ejkernel.kernels.pallas.tpu.gated_delta_rule.problem import Problem
from ejkernel.kernels.pallas.tpu.linear_attention.chunk import (
    MIN_LOG_DECAY,
    Order,
    dot,
    split_bfloat16,
)
from ejkernel.kernels.pallas.tpu.linear_attention.problem import CHUNK


def _selection(order: Order, level: int, reverse: bool) -> jax.Array:
    """Returns which log decays r are summed in the factor E of a row, zeros and ones ``[row, r]``.

    For a row of a later half those from the start of the half up to the row; for a row of an
    earlier half those after the row up to the end of the half.
    """
    row, column = rows_and_columns()
    is_later_half = ((row >> level) & 1) == (0 if reverse else 1)
    same_half = (row >> level) == (column >> level)
    is_upto, is_after = is_later_half & order.upto, ~(is_later_half | order.upto)
    return _as_ones(same_half & (is_upto | is_after))


def _as_ones(mask: jax.Array) -> jax.Array:
    return jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)


def _decayed(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns rows ``[CHUNK, dk]`` times decays of the same shape, float32."""
    return x.astype(jnp.float32) * factor


def _sum_selected(selection: jax.Array, gate: jax.Array) -> jax.Array:
    """Returns the sums ``[CHUNK, dk]`` of the selected log decays, with all digits of float32."""
    total = jnp.zeros(gate.shape, jnp.float32)
    for part in split_bfloat16(gate):
        total += jnp.dot(selection, part, preferred_element_type=jnp.float32)
    return total


@dataclass(frozen=True)
class ChannelGates(Gates):
    """A chunk with a decay for each key channel.

    Attributes:
        factors: E of each level ``[CHUNK, dk]``.
        since, until: decays ``[CHUNK, dk]`` from the chunk start to a row, from a row to the end.
        total: ``[1, dk]``, over the chunk.
    """

    factors: tuple[jax.Array, ...]
    since: jax.Array
    until: jax.Array
    total: jax.Array

    def read_queries(self, state: jax.Array) -> jax.Array:
        p, rows = self.p, self.rows
        return rows.q_factor * p.scale * dot(p, _decayed(rows.q, self.since), state)

    def read_keys(self, state: jax.Array) -> jax.Array:
        return self.rows.k_factor * dot(self.p, _decayed(self.rows.k, self.since), state)

    def next_state(self, update: jax.Array, state: jax.Array) -> jax.Array:
        update = self.rows.k_factor * update
        entering = dot(self.p, _decayed(self.rows.k, self.until), update, (0, 0))
        return state * as_column(self.total) + entering

    def update_gradient(self, dstate: jax.Array) -> jax.Array:
        return self.rows.k_factor * dot(self.p, _decayed(self.rows.k, self.until), dstate)

    def state_gradient(self, do: jax.Array, dv: jax.Array, dstate: jax.Array) -> jax.Array:
        p, rows = self.p, self.rows
        do = rows.q_factor * p.scale * do
        dstate = dstate * as_column(self.total) + dot(p, _decayed(rows.q, self.since), do, (0, 0))
        return dstate - dot(p, _decayed(self.rows.k, self.since), rows.k_factor * dv, (0, 0))

    def gradients(
        self,
        do: jax.Array,
        dv: jax.Array,
        update: jax.Array,
        state: jax.Array,
        dstate: jax.Array,
    ) -> PairGradients:
        p, order = self.p, self.order
        unit_q, unit_k = self.rows.unit_q, self.rows.unit_k
        dscores = dot(p, do, update, (1, 1)) * p.scale
        dgram = -dot(p, dv, update, (1, 1))
        dq_state = dot(p, do, state, (1, 1)) * self.since * p.scale
        dk_state = -dot(p, dv, state, (1, 1)) * self.since
        dk_entering = dot(p, update, dstate, (1, 1)) * self.until
        dscores_diagonal = row_dots(do, update) * p.scale  # a row reads itself without decay
        dq = dq_state + dscores_diagonal * unit_k
        dk = dk_state + dk_entering + dscores_diagonal * unit_q

        dgate = as_row(row_dots(dstate, state)) * self.total
        upto, after = _as_ones(order.upto), _as_ones(~order.upto)
        dgate += dot(p, upto, unit_q * dq_state + unit_k * dk_state, (0, 0))
        dgate += dot(p, after, unit_k * dk_entering, (0, 0))
        for level, factor in zip(LEVELS, self.factors, strict=True):
            pairs = is_pair(level, p.reverse)
            dscores_level, dgram_level = (jnp.where(pairs, x, 0.0) for x in (dscores, dgram))
            q, k = unit_q * factor, unit_k * factor
            dq_level = dot(p, dscores_level, k)
            dk_level = dot(p, dgram_level, k)
            dk_level += dot(p, dscores_level, q, (0, 0)) + dot(p, dgram_level, k, (0, 0))
            dq += dq_level * factor
            dk += dk_level * factor
            selection = _selection(order, level, p.reverse)
            dgate += dot(p, selection, q * dq_level + k * dk_level, (0, 0))
        return PairGradients(dq, dk, dgate)


def channel_gates(
    p: Problem, order: Order, gate: jax.Array, q: jax.Array, k: jax.Array
) -> ChannelGates:
    """Returns a chunk from its log decays, queries and keys, ``[CHUNK, dk]`` each."""
    gate, rows = jnp.maximum(gate, MIN_LOG_DECAY), chunk_rows(p, q, k)
    row, column = rows_and_columns()
    qk = jnp.where(row == column, row_dots(q.astype(jnp.float32), k.astype(jnp.float32)), 0.0)
    kk = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    factors = []
    for level in LEVELS:
        factor = jnp.exp(_sum_selected(_selection(order, level, p.reverse), gate))
        factors.append(factor)
        decayed_k, pairs = _decayed(k, factor), is_pair(level, p.reverse)
        qk = jnp.where(pairs, dot(p, _decayed(q, factor), decayed_k, (1, 1)), qk)
        kk = jnp.where(pairs, dot(p, decayed_k, decayed_k, (1, 1)), kk)
    qk, kk = rows.normalize_dots(p, qk, kk)
    since, until = (
        jnp.exp(_sum_selected(_as_ones(mask), gate)) for mask in (order.upto, ~order.upto)
    )
    total = jnp.exp(jnp.sum(gate, axis=0, keepdims=True))
    return ChannelGates(p, order, rows, qk * p.scale, kk, tuple(factors), since, until, total)

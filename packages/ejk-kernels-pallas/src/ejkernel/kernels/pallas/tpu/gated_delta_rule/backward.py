"""The gradients of the gated delta rule on a TPU, chunk after chunk against time.

With dS the gradient of the state after a chunk, D and R the decays from its start and to its end,
and the names of ``chunk``,

    du   = scores^T do + R k dS        w = inverse^T du        dv = beta w
    A_ts = scale d(t, s) do_t u_s      B_ts = -d(t, s) dv_t u_s  (s before t)
    dq   = scale D do S^T + A k        dk = -D dv S^T + R u dS^T + B k + A^T q + B^T k
    dbeta = w (v - D k S - gram u), row by row
    dS'  = decay of the chunk dS + scale (D q)^T do - (D k)^T dv

and dg as in linear attention, from A * (q k^T) + B * (k k^T) and what goes through the states.
Where queries and keys are normalized their gradients lose what lies along them.

Grid (head, visit) against time: a step first repeats the states before its chunks from the state
that ``forward`` kept for the visit. The gradients of heads that share a key are added by XLA.

Source: derived from the forward pass.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.compat import result
from ejkernel.kernels.pallas.tpu.common.chip import Chip
from ejkernel.kernels.pallas.tpu.common.segments import Visits
from ejkernel.kernels.pallas.tpu.gated_delta_rule.chunk import (
    as_row,
    next_state,
    terms_of,
    updates_of,
)
from ejkernel.kernels.pallas.tpu.gated_delta_rule.forward import load_chunk
from ejkernel.kernels.pallas.tpu.gated_delta_rule.problem import Problem
from ejkernel.kernels.pallas.tpu.linear_attention.backward import gate_gradient
from ejkernel.kernels.pallas.tpu.linear_attention.chunk import (
    dot,
    order_of_rows,
    rows_of_chunk,
    times,
)
from ejkernel.kernels.pallas.tpu.linear_attention.forward import (
    chunk_order,
    compiler_params,
    position_of,
    row_shape,
    specs_of,
    store_rows,
)
from ejkernel.kernels.pallas.tpu.linear_attention.problem import CHUNK, Tiles


def _along(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the dots of the rows ``[CHUNK, 1]``."""
    return jnp.sum(x * y, axis=1, keepdims=True)


def _kernel(p: Problem, t: Tiles, *all_refs: Any) -> None:
    tables, refs = all_refs[:4], list(all_refs[4:])
    q_ref, k_ref, v_ref, do_ref, beta_ref = (refs.pop(0) for _ in range(5))
    gate_ref = refs.pop(0) if p.gated else None
    before_ref, dfinal_ref = refs.pop(0), refs.pop(0)
    dq_ref, dk_ref, dv_ref, dbeta_ref = (refs.pop(0) for _ in range(4))
    dgate_ref = refs.pop(0) if p.gated else None
    dinitial_ref, dstate_ref, states_ref = refs
    against = not p.reverse
    at, order = position_of(p, t, tables, against), order_of_rows(p.reverse)

    @pl.when(at.opens)
    def _open() -> None:
        dstate_ref[...] = jnp.where(at.sequence < p.states, dfinal_ref[0, 0], 0.0)

    state = before_ref[0, 0]
    for chunk in chunk_order(t, p.reverse):
        states_ref[chunk] = state
        decay, beta, (q, k, v) = load_chunk(
            at, order, chunk, beta_ref, gate_ref, q_ref, k_ref, v_ref
        )
        terms = terms_of(p, order, decay, q, k, beta)
        update, _ = updates_of(p, terms, k, v, state)
        state = next_state(p, terms, decay, k, update, state)

    dstate = dstate_ref[...]
    for chunk in chunk_order(t, against):
        rows, first = pl.ds(chunk * CHUNK, CHUNK), at.first + chunk * CHUNK
        decay, beta, (q, k, v, do) = load_chunk(
            at, order, chunk, beta_ref, gate_ref, q_ref, k_ref, v_ref, do_ref
        )
        terms, state = terms_of(p, order, decay, q, k, beta), states_ref[chunk]
        update, error = updates_of(p, terms, k, v, state)
        du = dot(p, terms.scores, do, (0, 0)) + terms.k_until * dot(p, k, dstate)
        w = dot(p, terms.inverse, du, (0, 0))
        dv = terms.beta * w
        dbeta = _along(w, error - dot(p, terms.gram, update))

        unit_q, unit_k = (
            x.astype(jnp.float32) * factor
            for x, factor in ((q, terms.q_factor), (k, terms.k_factor))
        )
        reading = dot(p, do, update, (1, 1)) * decay.pairs * p.scale
        erasing = jnp.where(order.before, -dot(p, dv, update, (1, 1)) * decay.pairs, 0.0)
        dq_state = times(dot(p, do, state, (1, 1)), decay.since) * p.scale
        dk_state = -times(dot(p, dv, state, (1, 1)), decay.since)
        dk_entering = times(dot(p, update, dstate, (1, 1)), decay.until)
        dq = dq_state + dot(p, reading, unit_k)
        dk = dk_state + dk_entering + dot(p, erasing, unit_k)
        dk += dot(p, reading, unit_q, (0, 0)) + dot(p, erasing, unit_k, (0, 0))
        if p.normalize:
            dq = (dq - unit_q * _along(dq, unit_q)) * terms.q_factor
            dk = (dk - unit_k * _along(dk, unit_k)) * terms.k_factor
        inside = rows_of_chunk(first, 0, at.start, at.end)
        for ref, x in ((dq_ref, dq), (dk_ref, dk), (dv_ref, dv)):
            store_rows(ref, rows, x, inside)
        within = rows_of_chunk(first, 1, at.start, at.end)
        dbeta_ref[0, :, rows] = jnp.where(within, as_row(dbeta), dbeta_ref[0, :, rows])
        if dgate_ref is not None:
            qk, kk = terms.unit_pairs
            since = _along(unit_q, dq_state) + _along(unit_k, dk_state)
            until = _along(unit_k, dk_entering)
            total = times(jnp.sum(dstate * state, keepdims=True), decay.total)
            pairs = qk * reading + kk * erasing
            dgate = gate_gradient(p, order, pairs, since, until, total)
            dgate_ref[0, :, rows] = jnp.where(within, dgate, dgate_ref[0, :, rows])
        dstate = times(dstate, decay.total) + dot(p, q, terms.q_since * do, (0, 0))
        dstate -= dot(p, k, terms.k_since * dv, (0, 0))
    dstate_ref[...] = dstate

    @pl.when(at.closes & (at.sequence < p.states))
    def _close() -> None:
        dinitial_ref[0, 0] = dstate_ref[...]


def backward(
    p: Problem,
    t: Tiles,
    chip: Chip,
    schedule: Visits,
    arrays: tuple[jax.Array, ...],
    before: jax.Array,
    dfinal: jax.Array,
) -> list[jax.Array]:
    """Returns dq, dk (of every value head) and dv in ``row_shape``, the gradients ``[heads, 1,
    rows]`` of beta and of the log decays if there are any, and that of the initial states.

    ``arrays``: q, k, v, do, beta and log decays; ``before``: what ``forward`` kept.
    """
    specs = specs_of(p, t, not p.reverse)
    tables = (*schedule.tables, schedule.count[None])
    state = (p.dim, p.value_dim)
    keys = "float32" if p.group > 1 else p.dtype
    outputs: list[Any] = [
        (specs.rows(width), row_shape(p, width, p.heads), dtype)
        for width, dtype in ((p.dim, keys), (p.dim, keys), (p.value_dim, p.dtype))
    ]
    outputs += [(specs.gates, (p.heads, 1, p.total), "float32")] * (1 + p.gated)
    outputs.append((specs.states, (p.states, p.heads, *state), "float32"))
    inside = 8 * CHUNK * (p.dim + p.value_dim) + 28 * CHUNK * CHUNK
    return pl.pallas_call(
        functools.partial(_kernel, p, t),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(p.heads, schedule.count),
            in_specs=[
                specs.rows(p.dim, True),
                specs.rows(p.dim, True),
                specs.rows(p.value_dim),
                specs.rows(p.value_dim),
                specs.gates,
                *([specs.gates] if p.gated else []),
                specs.visits,
                specs.states,
            ],
            out_specs=[spec for spec, _, _ in outputs],
            scratch_shapes=[
                pltpu.VMEM(state, jnp.float32),
                pltpu.VMEM((t.chunks, *state), jnp.float32),
            ],
        ),
        out_shape=[result(shape, dtype, *arrays) for _, shape, dtype in outputs],
        compiler_params=compiler_params(chip, t.vmem(p, backward=True)),
        cost_estimate=pl.CostEstimate(
            flops=2 * p.heads * p.total * (inside + 10 * p.dim * p.value_dim),
            transcendentals=0,
            bytes_accessed=3 * sum(x.nbytes for x in arrays),
        ),
        interpret=chip.interpret,
        name="ejkernel_gated_delta_rule_gradients",
    )(*tables, *arrays, before, dfinal)

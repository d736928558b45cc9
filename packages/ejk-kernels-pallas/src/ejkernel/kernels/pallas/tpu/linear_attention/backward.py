"""The gradients of linear attention on a TPU, chunk after chunk against time.

With P = (q k^T) * D, E = (do v^T) * D, H the state before a chunk and G the gradient of the state
after it (``forward`` has the other names):

    dq = scale * (E k + since * do H^T)        dk = scale * E^T q + until * (v G^T)
    dv = scale * P^T do + until * (k G)        G' = total * G + scale * (since * q)^T do

A log decay g_r is in every D[t, s] with s < r <= t in time, in since_t for t >= r, in until_s for
s < r, and in ``total``:

    dg_r = sum of W[t, s] over s < r <= t + sum of a_t, t >= r + sum of b_s, s < r + <G, total H>

with W = scale * (q k^T) * E, a and b the rowwise dots of q and k with their gradients through
the state. A matmul with zeros and ones adds up exactly these terms, so that nothing
cancels.

Grid (head, visit) against time: a step first repeats the states before its chunks from the state
that ``forward`` kept for the visit. The gradients of heads that share a key are added by XLA.

Bound: 5 matmuls inside the chunk and 6 through states of forward's 2 and 2.

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
from ejkernel.kernels.pallas.tpu.linear_attention.chunk import (
    Order,
    decay_of,
    dot,
    order_of_rows,
    rows_of_chunk,
    scale_by,
)
from ejkernel.kernels.pallas.tpu.linear_attention.forward import (
    chunk_order,
    compiler_params,
    load_chunk,
    position_of,
    row_shape,
    specs_of,
    store_rows,
)
from ejkernel.kernels.pallas.tpu.linear_attention.problem import CHUNK, Problem, Tiles


def gate_gradient(
    p: Problem, order: Order, pairs: jax.Array, since: jax.Array, until: jax.Array, total: jax.Array
) -> jax.Array:
    """Returns the gradient ``[1, CHUNK]`` of the log decays of a chunk.

    ``pairs``: W ``[t, s]``. ``since``, ``until``: a ``[t, 1]`` and b ``[s, 1]``. ``total``:
    <G, total H>.
    """
    upto = jnp.where(order.upto, 1.0, 0.0)
    # [s, r]: sum of W[t, s] over the rows t that are not before r
    pairs_from_r = dot(p, pairs, upto, (0, 0))
    is_before_r = ~order.upto  # [s, r]
    terms = jnp.where(order.upto, since, 0.0)  # of rows t that are not before r
    terms = terms + jnp.where(is_before_r, pairs_from_r + until, 0.0)
    return jnp.sum(terms, axis=0, keepdims=True) + total


def _kernel(
    p: Problem,
    t: Tiles,
    segment: Any,
    shift: Any,
    bounds: Any,
    count: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    do_ref: Any,
    gate_ref: Any | None,
    before_ref: Any,
    dfinal_ref: Any,
    dq_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    dgate_ref: Any | None,
    dinitial_ref: Any,
    dstate_ref: Any,
    states_ref: Any,
) -> None:
    """Runs a grid step; ``states_ref``: the states before the chunks of the visit."""
    against = not p.reverse  # whether steps go from the last row to the first: against time
    at = position_of(p, t, (segment, shift, bounds, count), against)
    order = order_of_rows(p.reverse)

    @pl.when(at.opens)
    def _open() -> None:
        dstate_ref[...] = jnp.where(at.sequence < p.total_states, dfinal_ref[0, 0], 0.0)

    state = before_ref[0, 0]
    for chunk in chunk_order(t, p.reverse):
        states_ref[chunk] = state
        gate, (k, v) = load_chunk(at, chunk, gate_ref, k_ref, v_ref)
        decay = decay_of(order, gate)
        state = scale_by(state, decay.total) + dot(p, scale_by(k, decay.until), v, (0, 0))

    dstate = dstate_ref[...]
    for chunk in chunk_order(t, against):
        rows, first = pl.ds(chunk * CHUNK, CHUNK), at.first + chunk * CHUNK
        gate, (q, k, v, do) = load_chunk(at, chunk, gate_ref, q_ref, k_ref, v_ref, do_ref)
        decay, state = decay_of(order, gate), states_ref[chunk]
        scores = dot(p, q, k, (1, 1)) * p.scale
        dscores = dot(p, do, v, (1, 1)) * decay.pairs
        dq_state = scale_by(dot(p, do, state, (1, 1)), decay.since) * p.scale
        dk_state = scale_by(dot(p, v, dstate, (1, 1)), decay.until)
        dq = dot(p, dscores, k) * p.scale + dq_state
        dk = dot(p, dscores, q, (0, 0)) * p.scale + dk_state
        dv = dot(p, scores * decay.pairs, do, (0, 0)) + scale_by(dot(p, k, dstate), decay.until)
        for ref, x in ((dq_ref, dq), (dk_ref, dk), (dv_ref, dv)):
            store_rows(ref, rows, x, rows_of_chunk(first, 0, at.start, at.end))
        if dgate_ref is not None:
            since = jnp.sum(q.astype(jnp.float32) * dq_state, axis=1, keepdims=True)
            until = jnp.sum(k.astype(jnp.float32) * dk_state, axis=1, keepdims=True)
            total = scale_by(jnp.sum(dstate * state, keepdims=True), decay.total)
            dgate = gate_gradient(p, order, scores * dscores, since, until, total)
            lanes_inside = rows_of_chunk(first, 1, at.start, at.end)
            dgate_ref[0, :, rows] = jnp.where(lanes_inside, dgate, dgate_ref[0, :, rows])
        dstate = scale_by(dstate, decay.total) + p.scale * dot(
            p, scale_by(q, decay.since), do, (0, 0)
        )
    dstate_ref[...] = dstate

    @pl.when(at.closes & (at.sequence < p.total_states))
    def _close() -> None:
        dinitial_ref[0, 0] = dstate_ref[...]


def backward(
    p: Problem,
    t: Tiles,
    chip: Chip,
    schedule: Visits,
    arrays: tuple[jax.Array | None, ...],
    before: jax.Array,
    dfinal: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array]:
    """Returns dq, dk and dv in ``row_shape``, the gradient ``[heads, 1, rows]`` of the log
    decays or None, and that of the initial states.

    ``arrays``: q, k, v, do, and log decays or None; ``before``: what ``forward`` kept.
    """
    specs = specs_of(p, t, not p.reverse)
    tables = (*schedule.tables, schedule.count[None])
    state = (p.dim, p.value_dim)
    keys, values = (row_shape(p, width, p.heads) for width in state)
    # of a head each; the heads of a group are added up outside
    dkv_dtype = "float32" if p.group > 1 else p.dtype
    present = jax.tree.leaves(arrays)
    flops = 2 * p.heads * p.total * (5 * CHUNK * max(p.dim, p.value_dim) + 6 * p.dim * p.value_dim)
    return pl.pallas_call(
        functools.partial(_kernel, p, t),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(p.heads, schedule.count),
            in_specs=[
                specs.rows(p.dim),
                specs.rows(p.dim, shared=True),
                specs.rows(p.value_dim, shared=True),
                specs.rows(p.value_dim),
                specs.gates if p.gated else None,
                specs.visits,
                specs.states,
            ],
            out_specs=[
                specs.rows(p.dim),
                specs.rows(p.dim),
                specs.rows(p.value_dim),
                specs.gates if p.gated else None,
                specs.states,
            ],
            scratch_shapes=[
                pltpu.VMEM(state, jnp.float32),
                pltpu.VMEM((t.chunks, *state), jnp.float32),
            ],
        ),
        out_shape=[
            result(keys, p.out, *present),
            result(keys, dkv_dtype, *present),
            result(values, dkv_dtype, *present),
            result((p.heads, 1, p.total), "float32", *present) if p.gated else None,
            result((p.total_states, p.heads, *state), "float32", *present),
        ],
        compiler_params=compiler_params(chip, t.vmem(p, backward=True)),
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=0, bytes_accessed=3 * sum(x.nbytes for x in present)
        ),
        interpret=chip.interpret,
        name="ejkernel_linear_attention_gradients",
    )(*tables, *arrays, before, dfinal)

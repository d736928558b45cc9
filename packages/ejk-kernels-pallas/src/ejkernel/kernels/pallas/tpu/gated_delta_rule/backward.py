"""The gradients of the gated delta rule on a TPU, chunk after chunk against time.

With dS the gradient of the state after a chunk, D and R the decays from its start and to its end,
and the names of ``chunk``,

    du   = scores^T do + R k dS        w = inverse^T du        dv = beta w
    dbeta = w (v - D k S - gram u), row by row
    dS'  = decay of the chunk dS + scale (D q)^T do - (D k)^T dv

``head_gates`` and ``channel_gates`` have dq, dk and dg.
Where queries and keys are normalized their gradients lose what lies along them.

Grid (key head, visit against time, head of its group). Heads that share a key follow one another in
a block, which adds up their gradients of queries and keys in float32; each has a state of its own.
What is written for a value head has blocks for the whole group, so that no block is left and
visited again.
The states before the chunks are those that ``forward`` kept: 128 KiB to write and read a chunk of
dims of 128, for a third of the work.

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
from ejkernel.kernels.pallas.tpu.common.chip import LANES, Chip
from ejkernel.kernels.pallas.tpu.common.segments import Visits
from ejkernel.kernels.pallas.tpu.gated_delta_rule.chunk import (
    as_row,
    pull_back_normalization,
    row_dots,
    updates_of,
)
from ejkernel.kernels.pallas.tpu.gated_delta_rule.forward import (
    gate_spec,
    load_chunks,
    states_spec,
)
from ejkernel.kernels.pallas.tpu.gated_delta_rule.problem import Problem
from ejkernel.kernels.pallas.tpu.linear_attention.chunk import (
    dot,
    order_of_rows,
    rows_of_chunk,
)
from ejkernel.kernels.pallas.tpu.linear_attention.forward import (
    Specs,
    chunk_order,
    compiler_params,
    in_lanes,
    position_of,
    row_shape,
    specs_of,
    store_rows,
)
from ejkernel.kernels.pallas.tpu.linear_attention.problem import CHUNK, Tiles


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
    beta_ref: Any,
    gate_ref: Any | None,
    before_ref: Any,
    dfinal_ref: Any,
    dq_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    dbeta_ref: Any,
    dgate_ref: Any | None,
    dinitial_ref: Any,
    dstates_ref: Any,
    dq_acc: Any,
    dk_acc: Any,
) -> None:
    """Runs a grid step; ``dq_acc`` and ``dk_acc`` are sums over the heads that share a key, None
    where there is one."""
    head, against = pl.program_id(2), not p.reverse
    dv_ref = _head_rows(dv_ref, head, p.value_dim)
    if p.channels:
        dgate_ref = _head_rows(dgate_ref, head, p.dim)
    at = position_of(p, t, (segment, shift, bounds, count), against)
    order = order_of_rows(p.reverse)

    @pl.when(at.opens)
    def _open() -> None:
        dstates_ref[head] = jnp.where(at.sequence < p.total_states, dfinal_ref[0, head], 0.0)

    dstate = dstates_ref[head]
    inputs = (beta_ref, gate_ref, q_ref, k_ref, v_ref, do_ref)
    chunks = load_chunks(p, at, order, chunk_order(t, against), *inputs)
    for chunk, gates, system, (v, do) in chunks:
        rows, first = pl.ds(chunk * CHUNK, CHUNK), at.first + chunk * CHUNK
        state = before_ref[0, chunk]
        update, error = updates_of(p, gates, system, v, state)
        du = dot(p, gates.scores, do, (0, 0)) + gates.update_gradient(dstate)
        w = dot(p, system.inverse, du, (0, 0))
        dv = system.beta * w
        dbeta = row_dots(w, error - dot(p, gates.gram, update))
        pair_gradients = gates.gradients(do, dv, update, state, dstate)
        dq, dk = pull_back_normalization(p, gates.rows, pair_gradients.dq, pair_gradients.dk)
        inside = rows_of_chunk(first, 0, at.start, at.end)
        store_rows(dv_ref, rows, dv, inside)
        if dq_acc is None:
            store_rows(dq_ref, rows, dq, inside)
            store_rows(dk_ref, rows, dk, inside)
        else:
            for acc, x in ((dq_acc, dq), (dk_acc, dk)):
                acc[rows] = jnp.where(head == 0, 0.0, acc[rows]) + x
        lanes_inside = rows_of_chunk(first, 1, at.start, at.end)
        dbeta_ref[head, :, rows] = jnp.where(lanes_inside, as_row(dbeta), dbeta_ref[head, :, rows])
        if p.channels:
            store_rows(dgate_ref, rows, pair_gradients.dgate, inside)
        elif dgate_ref is not None:
            dgate = jnp.where(lanes_inside, pair_gradients.dgate, dgate_ref[head, :, rows])
            dgate_ref[head, :, rows] = dgate
        dstate = gates.state_gradient(do, dv, dstate)
    dstates_ref[head] = dstate

    if dq_acc is not None:

        @pl.when(head == p.group - 1)
        def _store_sums() -> None:
            for chunk in range(t.chunks):
                rows = pl.ds(chunk * CHUNK, CHUNK)
                inside = rows_of_chunk(at.first + chunk * CHUNK, 0, at.start, at.end)
                for ref, acc in ((dq_ref, dq_acc), (dk_ref, dk_acc)):
                    store_rows(ref, rows, acc[rows], inside)

    @pl.when(at.closes & (at.sequence < p.total_states))
    def _close() -> None:
        dinitial_ref[0, head] = dstates_ref[head]


def _head_rows(ref: Any, head: Any, width: int) -> Any:
    """Returns the rows ``[1, rows, width]`` of a value head in a block of its group."""
    if in_lanes(width):
        return ref.at[:, :, pl.ds(pl.multiple_of(head * width, LANES), width)]
    return ref.at[pl.ds(head, 1)]


def _by_value_head(p: Problem, spec: pl.BlockSpec | None) -> pl.BlockSpec | None:
    """Returns a spec of (value head, step) for the grid (key head, step, head of the group)."""
    if spec is None:
        return None
    index, group = spec.index_map, p.group
    assert index is not None
    return pl.BlockSpec(spec.block_shape, lambda m, i, g, *tables: index(m * group + g, i, *tables))


def _by_key_head(spec: pl.BlockSpec, axis: int, heads: int) -> pl.BlockSpec:
    """Returns a spec of (head, step) for the same grid, with blocks of ``heads`` heads along an
    axis: all of a group, or the key head alone."""
    index, shape = spec.index_map, spec.block_shape
    assert index is not None and shape is not None
    block = tuple(heads * int(n) if i == axis else n for i, n in enumerate(shape))  # ty: ignore[invalid-argument-type]
    return pl.BlockSpec(block, lambda m, i, g, *tables: index(m, i, *tables))


def _group_rows(p: Problem, specs: Specs, width: int) -> pl.BlockSpec:
    """Returns the block spec of rows of the value heads that share a key."""
    return _by_key_head(specs.rows(width), 2 if in_lanes(width) else 0, p.group)


def backward(
    p: Problem,
    t: Tiles,
    chip: Chip,
    schedule: Visits,
    arrays: tuple[jax.Array | None, ...],
    before: jax.Array,
    dfinal: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array]:
    """Returns dq, dk and dv in ``row_shape``, the gradients of beta
    ``[heads, 1, rows]``, of the log decays or None, and of the initial states.

    ``arrays``: q, k, v, do, beta and log decays or None; ``before``: what ``forward`` kept.
    """
    specs = specs_of(p, t, not p.reverse)
    tables = (*schedule.tables, schedule.count[None])
    state = (p.dim, p.value_dim)
    present = jax.tree.leaves(arrays)
    inputs = [
        *[specs.rows(p.dim, shared=True)] * 2,
        *[specs.rows(p.value_dim)] * 2,
        specs.gates,
        gate_spec(p, specs),
        states_spec(p, t, not p.reverse),
    ]
    key_rows = _by_key_head(specs.rows(p.dim), 0, 1)
    factors = _by_key_head(specs.gates, 0, p.group)
    states = _by_key_head(specs.states, 1, p.group)
    dgate_rows = _group_rows(p, specs, p.dim) if p.channels else factors
    dqk = result(row_shape(p, p.dim, p.kv_heads), p.dtype, *present)
    dbeta = dgate = result((p.heads, 1, p.total), "float32", *present)
    if p.channels:
        dgate = result(row_shape(p, p.dim, p.heads), "float32", *present)
    key_acc = pltpu.VMEM((t.rows, p.dim), jnp.float32) if p.group > 1 else None
    # multiply-adds a row: matrices of the chunk times rows, and times each other
    inside_chunk = 8 * CHUNK * (p.dim + p.value_dim) + 28 * CHUNK * CHUNK
    return pl.pallas_call(
        functools.partial(_kernel, p, t),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(p.kv_heads, schedule.count, p.group),
            in_specs=[*(_by_value_head(p, spec) for spec in inputs), states],
            out_specs=[
                key_rows,
                key_rows,
                _group_rows(p, specs, p.value_dim),
                factors,
                dgate_rows if p.gated else None,
                states,
            ],
            scratch_shapes=[pltpu.VMEM((p.group, *state), jnp.float32), key_acc, key_acc],
        ),
        out_shape=[
            dqk,
            dqk,
            result(row_shape(p, p.value_dim, p.heads), p.dtype, *present),
            dbeta,
            dgate if p.gated else None,
            result((p.total_states, p.heads, *state), "float32", *present),
        ],
        compiler_params=compiler_params(chip, t.vmem(p, backward=True), axes=3),
        cost_estimate=pl.CostEstimate(
            flops=2 * p.heads * p.total * (inside_chunk + 10 * p.dim * p.value_dim),
            transcendentals=0,
            bytes_accessed=3 * sum(x.nbytes for x in present),
        ),
        interpret=chip.interpret,
        name="ejkernel_gated_delta_rule_gradients",
    )(*tables, *arrays, before, dfinal)

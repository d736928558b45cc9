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
    along,
    as_row,
    shorten,
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


def _kernel(p: Problem, t: Tiles, *all_refs: Any) -> None:
    tables, refs = all_refs[:4], list(all_refs[4:])
    q_ref, k_ref, v_ref, do_ref, beta_ref = (refs.pop(0) for _ in range(5))
    gate_ref = refs.pop(0) if p.gated else None
    before_ref, dfinal_ref = refs.pop(0), refs.pop(0)
    dq_ref, dk_ref, dv_ref, dbeta_ref = (refs.pop(0) for _ in range(4))
    dgate_ref = refs.pop(0) if p.gated else None
    dinitial_ref, states_ref, *sums = refs
    head, against = pl.program_id(2), not p.reverse
    dv_ref = _rows_of(dv_ref, head, p.value_dim)
    if p.channels:
        dgate_ref = _rows_of(dgate_ref, head, p.dim)
    at, order = position_of(p, t, tables, against), order_of_rows(p.reverse)

    @pl.when(at.opens)
    def _open() -> None:
        states_ref[head] = jnp.where(at.sequence < p.total_states, dfinal_ref[0, head], 0.0)

    dstate = states_ref[head]
    refs = (beta_ref, gate_ref, q_ref, k_ref, v_ref, do_ref)
    for chunk, gates, system, (v, do) in load_chunks(p, at, order, chunk_order(t, against), *refs):
        rows, first = pl.ds(chunk * CHUNK, CHUNK), at.first + chunk * CHUNK
        state = before_ref[0, chunk]
        update, error = updates_of(p, gates, system, v, state)
        du = dot(p, gates.scores, do, (0, 0)) + gates.update_gradient(dstate)
        w = dot(p, system.inverse, du, (0, 0))
        dv = system.beta * w
        dbeta = along(w, error - dot(p, gates.gram, update))
        of_pairs = gates.gradients(do, dv, update, state, dstate)
        dq, dk = shorten(p, gates.rows, of_pairs.dq, of_pairs.dk)
        inside = rows_of_chunk(first, 0, at.start, at.end)
        store_rows(dv_ref, rows, dv, inside)
        if sums:
            for ref, x in zip(sums, (dq, dk), strict=True):
                ref[rows] = jnp.where(head == 0, 0.0, ref[rows]) + x
        else:
            store_rows(dq_ref, rows, dq, inside)
            store_rows(dk_ref, rows, dk, inside)
        within = rows_of_chunk(first, 1, at.start, at.end)
        dbeta_ref[head, :, rows] = jnp.where(within, as_row(dbeta), dbeta_ref[head, :, rows])
        if p.channels:
            store_rows(dgate_ref, rows, of_pairs.dgate, inside)
        elif dgate_ref is not None:
            dgate_ref[head, :, rows] = jnp.where(within, of_pairs.dgate, dgate_ref[head, :, rows])
        dstate = gates.state_gradient(do, dv, dstate)
    states_ref[head] = dstate

    if sums:

        @pl.when(head == p.group - 1)
        def _store_sums() -> None:
            for chunk in range(t.chunks):
                rows = pl.ds(chunk * CHUNK, CHUNK)
                inside = rows_of_chunk(at.first + chunk * CHUNK, 0, at.start, at.end)
                for ref, of_heads in zip((dq_ref, dk_ref), sums, strict=True):
                    store_rows(ref, rows, of_heads[rows], inside)

    @pl.when(at.closes & (at.sequence < p.total_states))
    def _close() -> None:
        dinitial_ref[0, head] = states_ref[head]


def _rows_of(ref: Any, head: Any, width: int) -> Any:
    """Returns the rows ``[1, rows, width]`` of a value head in a block of its group."""
    if in_lanes(width):
        return ref.at[:, :, pl.ds(pl.multiple_of(head * width, LANES), width)]
    return ref.at[pl.ds(head, 1)]


def _by_head(p: Problem, spec: pl.BlockSpec) -> pl.BlockSpec:
    """Returns a spec by (value head, visit) for the grid of this kernel."""
    index, group = spec.index_map, p.group
    assert index is not None
    return pl.BlockSpec(spec.block_shape, lambda m, i, g, *tables: index(m * group + g, i, *tables))


def _together(spec: pl.BlockSpec, axis: int, heads: int) -> pl.BlockSpec:
    """Returns a spec by (head, visit) for blocks of as many ``heads``, next to each other."""
    index, shape = spec.index_map, spec.block_shape
    assert index is not None and shape is not None
    wide = tuple(heads * int(n) if at == axis else n for at, n in enumerate(shape))  # ty: ignore[invalid-argument-type]
    return pl.BlockSpec(wide, lambda m, i, g, *tables: index(m, i, *tables))


def _of_group(p: Problem, specs: Specs, width: int) -> pl.BlockSpec:
    """Returns the blocks of rows of the value heads that share a key."""
    return _together(specs.rows(width), 2 if in_lanes(width) else 0, p.group)


def backward(
    p: Problem,
    t: Tiles,
    chip: Chip,
    schedule: Visits,
    arrays: tuple[jax.Array, ...],
    before: jax.Array,
    dfinal: jax.Array,
) -> list[jax.Array]:
    """Returns dq, dk and dv in ``row_shape``, the gradients of beta
    ``[heads, 1, rows]``, of the log decays if there are any, and of the initial states.

    ``arrays``: q, k, v, do, beta and log decays; ``before``: what ``forward`` kept.
    """
    specs = specs_of(p, t, not p.reverse)
    tables = (*schedule.tables, schedule.count[None])
    state = (p.dim, p.value_dim)
    keys = (_together(specs.rows(p.dim), 0, 1), row_shape(p, p.dim, p.kv_heads), p.dtype)
    values, of_values = _of_group(p, specs, p.value_dim), row_shape(p, p.value_dim, p.heads)
    factors = (_together(specs.gates, 0, p.group), (p.heads, 1, p.total), "float32")
    outputs: list[Any] = [keys, keys, (values, of_values, p.dtype), factors]
    if p.channels:
        gates = _of_group(p, specs, p.dim), row_shape(p, p.dim, p.heads), "float32"
        outputs.append(gates)
    elif p.gated:
        outputs.append(factors)
    states = _together(specs.states, 1, p.group)
    outputs.append((states, (p.total_states, p.heads, *state), "float32"))
    inputs = [
        *[specs.rows(p.dim, True)] * 2,
        *[specs.rows(p.value_dim)] * 2,
        specs.gates,
        *gate_spec(p, specs),
        states_spec(p, t, not p.reverse),
    ]
    inside = 8 * CHUNK * (p.dim + p.value_dim) + 28 * CHUNK * CHUNK
    return pl.pallas_call(
        functools.partial(_kernel, p, t),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(p.kv_heads, schedule.count, p.group),
            in_specs=[*(_by_head(p, spec) for spec in inputs), states],
            out_specs=[spec for spec, _, _ in outputs],
            scratch_shapes=[
                pltpu.VMEM((p.group, *state), jnp.float32),
                *([pltpu.VMEM((t.rows, p.dim), jnp.float32)] * 2 if p.group > 1 else []),
            ],
        ),
        out_shape=[result(shape, dtype, *arrays) for _, shape, dtype in outputs],
        compiler_params=compiler_params(chip, t.vmem(p, backward=True), axes=3),
        cost_estimate=pl.CostEstimate(
            flops=2 * p.heads * p.total * (inside + 10 * p.dim * p.value_dim),
            transcendentals=0,
            bytes_accessed=3 * sum(x.nbytes for x in arrays),
        ),
        interpret=chip.interpret,
        name="ejkernel_gated_delta_rule_gradients",
    )(*tables, *arrays, before, dfinal)

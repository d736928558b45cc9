"""The gradients of the gated delta rule on a TPU, chunk after chunk against time.

With dS the gradient of the state after a chunk, D and R the decays from its start and to its end,
and the names of ``chunk``,

    du   = scores^T do + R k dS        w = inverse^T du        dv = beta w
    dbeta = w (v - D k S - gram u), row by row
    dS'  = decay of the chunk dS + scale (D q)^T do - (D k)^T dv

``head_gates`` and ``channel_gates`` have dq, dk and dg.
Where queries and keys are normalized their gradients lose what lies along them.

Grid (head, visit) against time; the states before the chunks are those that ``forward`` kept:
128 KiB to write and read a chunk of dims of 128, for a third of the work.
The gradients of heads that share a key are added by XLA.

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
    chunk_order,
    compiler_params,
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
    dinitial_ref, dstate_ref = refs
    against = not p.reverse
    at, order = position_of(p, t, tables, against), order_of_rows(p.reverse)

    @pl.when(at.opens)
    def _open() -> None:
        dstate_ref[...] = jnp.where(at.sequence < p.total_states, dfinal_ref[0, 0], 0.0)

    dstate = dstate_ref[...]
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
        for ref, x in ((dq_ref, dq), (dk_ref, dk), (dv_ref, dv)):
            store_rows(ref, rows, x, inside)
        within = rows_of_chunk(first, 1, at.start, at.end)
        dbeta_ref[0, :, rows] = jnp.where(within, as_row(dbeta), dbeta_ref[0, :, rows])
        if p.channels:
            store_rows(dgate_ref, rows, of_pairs.dgate, inside)
        elif dgate_ref is not None:
            dgate_ref[0, :, rows] = jnp.where(within, of_pairs.dgate, dgate_ref[0, :, rows])
        dstate = gates.state_gradient(do, dv, dstate)
    dstate_ref[...] = dstate

    @pl.when(at.closes & (at.sequence < p.total_states))
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
    """Returns dq, dk (of every value head) and dv in ``row_shape``, the gradients of beta
    ``[heads, 1, rows]``, of the log decays if there are any, and of the initial states.

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
    outputs.append((specs.gates, (p.heads, 1, p.total), "float32"))
    of_gates = row_shape(p, p.dim, p.heads) if p.channels else (p.heads, 1, p.total)
    outputs += [(spec, of_gates, "float32") for spec in gate_spec(p, specs)]
    outputs.append((specs.states, (p.total_states, p.heads, *state), "float32"))
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
                *gate_spec(p, specs),
                states_spec(p, t, not p.reverse),
                specs.states,
            ],
            out_specs=[spec for spec, _, _ in outputs],
            scratch_shapes=[pltpu.VMEM(state, jnp.float32)],
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

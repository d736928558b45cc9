"""The gated delta rule forward on a TPU, chunk after chunk.

    o = scale D q S + scores u        S' = decay of the chunk S + (k decayed to its end)^T u

with the names of ``chunk``. Grid, blocks and visits as in linear attention: the state of a value
head stays in vector memory while its sequences are visited.

Bound: 2 s (4 C (dk + dv) / 2 + 3 dk dv) FLOPs a head besides the inverse, whose fourteen float32
matmuls of C^3 a chunk are the most: at dims and chunks of 128 five sixths of all passes of the
matrix unit.

Sources: Yang et al. 2024 (arXiv 2406.06484), section 3; Yang et al. 2024 (arXiv 2412.06464).
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
from ejkernel.kernels.pallas.tpu.gated_delta_rule.chunk import next_state, terms_of, updates_of
from ejkernel.kernels.pallas.tpu.gated_delta_rule.problem import Problem
from ejkernel.kernels.pallas.tpu.linear_attention.chunk import (
    Decay,
    Order,
    decay_of,
    dot,
    masked_rows,
    order_of_rows,
    rows_of_chunk,
)
from ejkernel.kernels.pallas.tpu.linear_attention.forward import (
    Position,
    chunk_order,
    compiler_params,
    position_of,
    row_shape,
    specs_of,
    store_rows,
)
from ejkernel.kernels.pallas.tpu.linear_attention.problem import CHUNK, Tiles


def load_chunk(
    at: Position, order: Order, chunk: int, beta_ref: Any, gate_ref: Any, *refs: Any
) -> tuple[Decay, jax.Array, list[jax.Array]]:
    """Returns the decays, beta ``[1, CHUNK]`` and the rows of a chunk; other rows are 0."""
    rows, first = pl.ds(chunk * CHUNK, CHUNK), at.first + chunk * CHUNK
    inside = rows_of_chunk(first, 0, at.start, at.stop)
    within = rows_of_chunk(first, 1, at.start, at.stop)
    gate = None if gate_ref is None else jnp.where(within, gate_ref[0, :, rows], 0.0)
    beta = jnp.where(within, beta_ref[0, :, rows], 0.0)
    return decay_of(order, gate), beta, [masked_rows(ref[0, rows], inside) for ref in refs]


def _kernel(p: Problem, t: Tiles, keep: bool, *all_refs: Any) -> None:
    tables, refs = all_refs[:4], list(all_refs[4:])
    q_ref, k_ref, v_ref, beta_ref = (refs.pop(0) for _ in range(4))
    gate_ref = refs.pop(0) if p.gated else None
    initial_ref, o_ref, final_ref, *refs = refs
    before_ref = refs.pop(0) if keep else None
    (state_ref,) = refs
    at, order = position_of(p, t, tables, p.reverse), order_of_rows(p.reverse)

    @pl.when(at.opens)
    def _open() -> None:
        state_ref[...] = initial_ref[0, 0]

    if before_ref is not None:
        before_ref[0, 0] = state_ref[...]

    state = state_ref[...]
    for chunk in chunk_order(t, p.reverse):
        decay, beta, (q, k, v) = load_chunk(
            at, order, chunk, beta_ref, gate_ref, q_ref, k_ref, v_ref
        )
        terms = terms_of(p, order, decay, q, k, beta)
        update, _ = updates_of(p, terms, k, v, state)
        o = terms.q_since * dot(p, q, state) + dot(p, terms.scores, update)
        first = at.first + chunk * CHUNK
        inside = rows_of_chunk(first, 0, at.start, at.end)
        store_rows(o_ref, pl.ds(chunk * CHUNK, CHUNK), o, inside)
        state = next_state(p, terms, decay, k, update, state)
    state_ref[...] = state

    @pl.when(at.closes & (at.sequence < p.states))
    def _close() -> None:
        final_ref[0, 0] = state_ref[...]


def forward(
    p: Problem,
    t: Tiles,
    chip: Chip,
    schedule: Visits,
    arrays: tuple[jax.Array, ...],
    initial: jax.Array,
    *,
    keep: bool,
) -> list[jax.Array]:
    """Returns o in ``row_shape``, final states ``[states, heads, dk, dv]``, and with ``keep``
    the states ``[heads, visits, dk, dv]`` before the visits.

    ``arrays``: q, k, v in ``row_shape``, beta and log decays ``[heads, 1, rows]``.
    """
    specs = specs_of(p, t, p.reverse)
    tables = (*schedule.tables, schedule.count[None])
    state = (p.dim, p.value_dim)
    outputs = [
        (specs.rows(p.value_dim), row_shape(p, p.value_dim, p.heads), p.out),
        (specs.states, (p.states, p.heads, *state), "float32"),
    ]
    if keep:
        visits = schedule.segment.shape[0]
        outputs.append((specs.visits, (p.heads, visits, *state), "float32"))
    inside = 2 * CHUNK * (p.dim + p.value_dim) + 14 * CHUNK * CHUNK
    return pl.pallas_call(
        functools.partial(_kernel, p, t, keep),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(p.heads, schedule.count),
            in_specs=[
                specs.rows(p.dim, True),
                specs.rows(p.dim, True),
                specs.rows(p.value_dim),
                specs.gates,
                *([specs.gates] if p.gated else []),
                specs.states,
            ],
            out_specs=[spec for spec, _, _ in outputs],
            scratch_shapes=[pltpu.VMEM(state, jnp.float32)],
        ),
        out_shape=[result(shape, dtype, *arrays) for _, shape, dtype in outputs],
        compiler_params=compiler_params(chip, t.vmem(p)),
        cost_estimate=pl.CostEstimate(
            flops=2 * p.heads * p.total * (inside + 3 * p.dim * p.value_dim),
            transcendentals=0,
            bytes_accessed=2 * sum(x.nbytes for x in arrays),
        ),
        interpret=chip.interpret,
        name="ejkernel_gated_delta_rule",
    )(*tables, *arrays, initial)

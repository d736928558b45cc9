"""The gated delta rule forward on a TPU, chunk after chunk.

    o = scale (D q) S + scores u        S' = decay of the chunk S + (k decayed to its end)^T u

with the names of ``chunk``; ``head_gates`` and ``channel_gates`` know how these decay. Grid,
blocks and visits as in linear attention: the state of a value head stays in
vector memory while its sequences are visited.

Bound: 2 s (4 C (dk + dv) / 2 + 3 dk dv) FLOPs a head besides the inverse, whose twelve float32
matmuls of C^3 a chunk are the most: three bfloat16 passes each, at dims and chunks of 128 three
quarters of all passes of the matrix unit. Gates of channels add seven times two matmuls of pairs
and three for their factors.

Sources: Yang et al. 2024 (arXiv 2406.06484), section 3; Yang et al. 2024 (arXiv 2412.06464).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.compat import result
from ejkernel.kernels.pallas.tpu.common.chip import Chip
from ejkernel.kernels.pallas.tpu.common.segments import Visits, zero_outside
from ejkernel.kernels.pallas.tpu.gated_delta_rule.channel_gates import channel_gates
from ejkernel.kernels.pallas.tpu.gated_delta_rule.chunk import (
    Gates,
    System,
    systems_of,
    updates_of,
)
from ejkernel.kernels.pallas.tpu.gated_delta_rule.head_gates import head_gates
from ejkernel.kernels.pallas.tpu.gated_delta_rule.problem import Problem
from ejkernel.kernels.pallas.tpu.linear_attention.chunk import (
    Order,
    dot,
    order_of_rows,
    rows_of_chunk,
)
from ejkernel.kernels.pallas.tpu.linear_attention.forward import (
    Position,
    Specs,
    chunk_order,
    compiler_params,
    position_of,
    row_shape,
    specs_of,
    store_rows,
    visit_of_step,
)
from ejkernel.kernels.pallas.tpu.linear_attention.problem import CHUNK, Tiles


class Chunk(NamedTuple):
    """A chunk of a block.

    Attributes:
        number: its place in the block.
        others: its rows of values, and of do in the backward pass, ``[CHUNK, dv]`` each.
    """

    number: int
    gates: Gates
    system: System
    others: list[jax.Array]


def load_chunks(
    p: Problem, at: Position, order: Order, chunks: Sequence[int], beta_ref: Any, *refs: Any
) -> list[Chunk]:
    """Returns the chunks in the order of ``chunks``; rows of other sequences are 0.

    ``refs``: of gates or None, queries, keys, and the arrays of ``Chunk.others``. All chunks of a
    block are loaded before the first is used, since their systems are inverted side by side.
    """
    parts = [_load_chunk(p, at, order, chunk, beta_ref, *refs) for chunk in chunks]
    gates, betas, others = zip(*parts, strict=True)
    systems = systems_of(p, gates, betas)
    return [Chunk(*x) for x in zip(chunks, gates, systems, others, strict=True)]


def _load_chunk(
    p: Problem, at: Position, order: Order, chunk: int, beta_ref: Any, gate_ref: Any, *refs: Any
) -> tuple[Gates, jax.Array, list[jax.Array]]:
    rows, first = pl.ds(chunk * CHUNK, CHUNK), at.first + chunk * CHUNK
    inside, lanes_inside = (rows_of_chunk(first, axis, at.start, at.stop) for axis in (0, 1))
    q, k, *others = (zero_outside(ref[0, rows], inside) for ref in refs)
    gates: Gates
    if p.channels:
        gates = channel_gates(p, order, zero_outside(gate_ref[0, rows], inside), q, k)
    else:
        gate = None if gate_ref is None else jnp.where(lanes_inside, gate_ref[0, :, rows], 0.0)
        gates = head_gates(p, order, gate, q, k)
    beta = jnp.where(lanes_inside, beta_ref[0, :, rows], 0.0)
    return gates, beta, others


def gate_spec(p: Problem, specs: Specs) -> pl.BlockSpec | None:
    """Returns the blocks of the log decays, if there are any."""
    if p.channels:
        return specs.rows(p.dim)
    return specs.gates if p.gated else None


def states_spec(p: Problem, t: Tiles, backwards: bool) -> pl.BlockSpec:
    """Returns the blocks of the states before the chunks of a visit."""

    def of_visit(h: Any, i: Any, *tables: Any) -> Any:
        return h, visit_of_step(i, tables[3], backwards), 0, 0

    return pl.BlockSpec((1, t.chunks, p.dim, p.value_dim), of_visit)


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
    beta_ref: Any,
    gate_ref: Any | None,
    initial_ref: Any,
    o_ref: Any,
    final_ref: Any,
    before_ref: Any | None,
    state_ref: Any,
) -> None:
    """Runs a grid step; ``before_ref``: the states before the chunks, where they are kept."""
    at = position_of(p, t, (segment, shift, bounds, count), p.reverse)
    order = order_of_rows(p.reverse)

    @pl.when(at.opens)
    def _open() -> None:
        state_ref[...] = initial_ref[0, 0]

    state = state_ref[...]
    inputs = (beta_ref, gate_ref, q_ref, k_ref, v_ref)
    chunks = load_chunks(p, at, order, chunk_order(t, p.reverse), *inputs)
    for chunk, gates, system, (v,) in chunks:
        if before_ref is not None:
            before_ref[0, chunk] = state
        update, _ = updates_of(p, gates, system, v, state)
        o = gates.read_queries(state) + dot(p, gates.scores, update)
        first = at.first + chunk * CHUNK
        inside = rows_of_chunk(first, 0, at.start, at.end)
        store_rows(o_ref, pl.ds(chunk * CHUNK, CHUNK), o, inside)
        state = gates.next_state(update, state)
    state_ref[...] = state

    @pl.when(at.closes & (at.sequence < p.total_states))
    def _close() -> None:
        final_ref[0, 0] = state_ref[...]


def forward(
    p: Problem,
    t: Tiles,
    chip: Chip,
    schedule: Visits,
    arrays: tuple[jax.Array | None, ...],
    initial: jax.Array,
    *,
    keep: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns o in ``row_shape``, final states ``[states, heads, dk, dv]``, and with ``keep``
    the states ``[heads, chunks, dk, dv]`` before the chunks of all visits.

    ``arrays``: q, k, v in ``row_shape``, beta ``[heads, 1, rows]``, and log decays in the shape of
    beta, of channels in ``row_shape``, or None.
    """
    specs = specs_of(p, t, p.reverse)
    tables = (*schedule.tables, schedule.count[None])
    state = (p.dim, p.value_dim)
    chunks = schedule.segment.shape[0] * t.chunks
    present = jax.tree.leaves(arrays)
    # multiply-adds a row: of scores, gram, o and u; of the inverse
    inside_chunk = 2 * CHUNK * (p.dim + p.value_dim) + 14 * CHUNK * CHUNK
    return pl.pallas_call(
        functools.partial(_kernel, p, t),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(p.heads, schedule.count),
            in_specs=[
                specs.rows(p.dim, shared=True),
                specs.rows(p.dim, shared=True),
                specs.rows(p.value_dim),
                specs.gates,
                gate_spec(p, specs),
                specs.states,
            ],
            out_specs=[
                specs.rows(p.value_dim),
                specs.states,
                states_spec(p, t, p.reverse) if keep else None,
            ],
            scratch_shapes=[pltpu.VMEM(state, jnp.float32)],
        ),
        out_shape=[
            result(row_shape(p, p.value_dim, p.heads), p.out, *present),
            result((p.total_states, p.heads, *state), "float32", *present),
            result((p.heads, chunks, *state), "float32", *present) if keep else None,
        ],
        compiler_params=compiler_params(chip, t.vmem(p)),
        cost_estimate=pl.CostEstimate(
            flops=2 * p.heads * p.total * (inside_chunk + 3 * p.dim * p.value_dim),
            transcendentals=0,
            bytes_accessed=2 * sum(x.nbytes for x in present),
        ),
        interpret=chip.interpret,
        name="ejkernel_gated_delta_rule",
    )(*tables, *arrays, initial)

"""Linear attention forward on a TPU, chunk after chunk.

    H_t = exp(g_t) H_{t-1} + k_t v_t^T        o_t = scale * q_t H_t

Inside a chunk of C rows, with D[t, s] the decay from row s to row t:

    o = scale * ((q k^T * D) v + since * (q H))        H' = total * H + (until * k)^T v

Grid (head, visit): the state of a head stays in vector memory while its sequences are visited, one
after the other (``common.segments``: a visit is a sequence and a block of rows in it, time may run
backwards). Rows of other sequences count as zeros that do not decay. For the gradients the state
before each visit is kept.

Bound: 2 s (C (dk + dv) + 2 dk dv) FLOPs a head, of 4 s (dk + dv) bytes in bfloat16: at dims and
chunks of 128 that is 128 FLOPs a byte, so memory is the limit, short of the three matmuls for D.

Sources: Yang et al. 2024, Gated Linear Attention (the form by chunks); Qin et al. 2024, Lightning
Attention-2 (the loop that keeps the state on the chip).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.compat import result
from ejkernel.kernels.pallas.tpu.common.chip import LANES, Chip
from ejkernel.kernels.pallas.tpu.common.segments import (
    Visits,
    is_first_visit,
    is_last_visit,
    replace_inside,
    row_block,
    zero_outside,
)
from ejkernel.kernels.pallas.tpu.linear_attention.chunk import (
    decay_of,
    dot,
    order_of_rows,
    rows_of_chunk,
    scale_by,
)
from ejkernel.kernels.pallas.tpu.linear_attention.problem import CHUNK, Problem, Tiles


class Position(NamedTuple):
    """The sequence and rows of a grid step, from the tables in scalar memory.

    Attributes:
        sequence: index of the sequence; ``Problem.total_states`` for the rows that belong to none.
        first: first row of the block.
        start, end: rows that the visit stores: of the sequence, or of none.
        stop: the end of the rows that are loaded: ``end``, or ``start`` where they belong to no
            sequence, since such rows may hold NaN.
        opens, closes: whether the step is the first, the last one of the sequence.
    """

    sequence: Any
    first: Any
    start: Any
    end: Any
    stop: Any
    opens: Any
    closes: Any


def visit_of_step(step: Any, count: Any, backwards: bool) -> Any:
    """Returns the visit of a step of the grid; ``count``: ``[1]``, the number of visits."""
    return count[0] - 1 - step if backwards else step


def position_of(p: Problem, t: Tiles, tables: Any, backwards: bool) -> Position:
    """Returns the position of the present step; ``backwards``: from the last row to the first."""
    segment, shift, bounds, count = tables
    visit, last = visit_of_step(pl.program_id(1), count, backwards), count[0] - 1
    sequence = segment[visit]
    begins = is_first_visit(segment, visit, sequence)
    ends = is_last_visit(segment, visit, sequence, last)
    opens, closes = (ends, begins) if backwards else (begins, ends)
    first = row_block(visit, segment, shift) * t.rows
    start, end = bounds[sequence], bounds[sequence + 1]
    stop = jnp.where(sequence < p.total_states, end, start)
    return Position(sequence, first, start, end, stop, opens, closes)


def chunk_order(t: Tiles, backwards: bool) -> list[int]:
    """Returns the chunks of a block, from the first row to the last or ``backwards``."""
    return list(range(t.chunks))[:: -1 if backwards else 1]


def load_chunk(
    at: Position, chunk: int, gate_ref: Any | None, *refs: Any
) -> tuple[jax.Array | None, list[jax.Array]]:
    """Returns the log decays ``[1, CHUNK]`` of a chunk, or None, and its rows ``[CHUNK, d]``.

    Rows of other sequences are 0, and do not decay.
    """
    rows, first = pl.ds(chunk * CHUNK, CHUNK), at.first + chunk * CHUNK
    inside = rows_of_chunk(first, 0, at.start, at.stop)
    gate = None
    if gate_ref is not None:
        lanes_inside = rows_of_chunk(first, 1, at.start, at.stop)
        gate = jnp.where(lanes_inside, gate_ref[0, :, rows], 0.0)
    return gate, [zero_outside(ref[0, rows], inside) for ref in refs]


def store_rows(ref: Any, rows: Any, x: jax.Array, inside: jax.Array) -> None:
    """Stores the rows of a block that are ``inside``; the others keep what they have."""
    ref[0, rows] = replace_inside(ref[0, rows], x, inside)


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
    gate_ref: Any | None,
    initial_ref: Any,
    o_ref: Any,
    final_ref: Any,
    before_ref: Any | None,
    state_ref: Any,
) -> None:
    """Runs a grid step; ``before_ref``: the state before the visit, where it is kept."""
    at = position_of(p, t, (segment, shift, bounds, count), p.reverse)
    order = order_of_rows(p.reverse)

    @pl.when(at.opens)
    def _open() -> None:
        state_ref[...] = initial_ref[0, 0]

    if before_ref is not None:
        before_ref[0, 0] = state_ref[...]

    state = state_ref[...]
    for chunk in chunk_order(t, p.reverse):
        rows, first = pl.ds(chunk * CHUNK, CHUNK), at.first + chunk * CHUNK
        gate, (q, k, v) = load_chunk(at, chunk, gate_ref, q_ref, k_ref, v_ref)
        decay = decay_of(order, gate)
        o = dot(p, dot(p, q, k, (1, 1)) * decay.pairs, v) + scale_by(dot(p, q, state), decay.since)
        store_rows(o_ref, rows, p.scale * o, rows_of_chunk(first, 0, at.start, at.end))
        state = scale_by(state, decay.total) + dot(p, scale_by(k, decay.until), v, (0, 0))
    state_ref[...] = state

    @pl.when(at.closes & (at.sequence < p.total_states))
    def _close() -> None:
        final_ref[0, 0] = state_ref[...]


def in_lanes(width: int) -> bool:
    """Returns whether heads of a row lie next to each other: as the call gives them."""
    return width % LANES == 0


def row_shape(p: Problem, width: int, heads: int) -> tuple[int, int, int]:
    """Returns the shape of rows of all heads as the kernels read them."""
    return (1, p.total, heads * width) if in_lanes(width) else (heads, p.total, width)


class Specs(NamedTuple):
    """Block specs of the arrays, by index maps of (head, step).

    Attributes:
        rows: ``rows(width, shared=False)`` returns the spec of an array in ``row_shape``; shared
            are those with a head for each group.
        gates: of ``[heads, 1, rows]``.
        states: of ``[states, heads, dk, dv]``, the state of a visit's sequence.
        visits: of ``[heads, visits, dk, dv]``, a state for each visit.
    """

    rows: Callable[..., pl.BlockSpec]
    gates: pl.BlockSpec
    states: pl.BlockSpec
    visits: pl.BlockSpec


def specs_of(p: Problem, t: Tiles, backwards: bool) -> Specs:
    """Returns the block specs; ``backwards``: the grid goes from the last visit to the first.

    Index maps get the head h, the step i, and ``tables``: the tables of ``segments.Visits``, and
    the number of visits.
    """

    def block(step: Any, tables: Any) -> Any:
        segment, shift, _, count = tables
        return row_block(visit_of_step(step, count, backwards), segment, shift)

    def rows(width: int, *, shared: bool = False) -> pl.BlockSpec:
        group = p.group if shared else 1

        def of_rows(h: Any, i: Any, *tables: Any) -> Any:
            head, rows_block = h // group, block(i, tables)
            return (0, rows_block, head) if in_lanes(width) else (head, rows_block, 0)

        return pl.BlockSpec((1, t.rows, width), of_rows)

    def of_state(h: Any, i: Any, *tables: Any) -> Any:
        segment, _, _, count = tables
        sequence = segment[visit_of_step(i, count, backwards)]
        return jnp.minimum(sequence, p.total_states - 1), h, 0, 0

    def of_visit(h: Any, i: Any, *tables: Any) -> Any:
        count = tables[3]
        return h, visit_of_step(i, count, backwards), 0, 0

    return Specs(
        rows,
        pl.BlockSpec((1, 1, t.rows), lambda h, i, *tables: (h, 0, block(i, tables))),
        pl.BlockSpec((1, 1, p.dim, p.value_dim), of_state),
        pl.BlockSpec((1, 1, p.dim, p.value_dim), of_visit),
    )


def compiler_params(chip: Chip, vmem: int, axes: int = 2) -> Any:
    """Returns the parameters of a kernel with ``axes`` axes of its grid; heads, the first of them,
    may be on different cores."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", *("arbitrary",) * (axes - 1)),
        vmem_limit_bytes=chip.vmem_limit(vmem * 3 // 2),
    )


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
    the states ``[heads, visits, dk, dv]`` before the visits.

    ``arrays``: q, k, v in ``row_shape`` and log decays ``[heads, 1, rows]`` or None.
    """
    specs = specs_of(p, t, p.reverse)
    tables = (*schedule.tables, schedule.count[None])
    state = (p.dim, p.value_dim)
    visits = schedule.segment.shape[0]
    present = jax.tree.leaves(arrays)
    flops = 2 * p.heads * p.total * (CHUNK * (p.dim + p.value_dim) + 2 * p.dim * p.value_dim)
    return pl.pallas_call(
        functools.partial(_kernel, p, t),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(p.heads, schedule.count),
            in_specs=[
                specs.rows(p.dim),
                specs.rows(p.dim, shared=True),
                specs.rows(p.value_dim, shared=True),
                specs.gates if p.gated else None,
                specs.states,
            ],
            out_specs=[specs.rows(p.value_dim), specs.states, specs.visits if keep else None],
            scratch_shapes=[pltpu.VMEM(state, jnp.float32)],
        ),
        out_shape=[
            result(row_shape(p, p.value_dim, p.heads), p.out, *present),
            result((p.total_states, p.heads, *state), "float32", *present),
            result((p.heads, visits, *state), "float32", *present) if keep else None,
        ],
        compiler_params=compiler_params(chip, t.vmem(p)),
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=0, bytes_accessed=2 * sum(x.nbytes for x in present)
        ),
        interpret=chip.interpret,
        name="ejkernel_linear_attention",
    )(*tables, *arrays, initial)

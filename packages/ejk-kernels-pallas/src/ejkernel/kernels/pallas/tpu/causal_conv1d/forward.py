"""The short causal convolution on a TPU, a block of rows and channels at a time.

    z_t[c] = bias[c] + sum_i weight[c, i] x_{t-w+1+i}[c]        y_t = act(z_t)

Grid (block of channels, visit): a visit is a sequence and a block of rows that overlap
(``common.segments``). The rows before the block are loaded with it. Rows of other sequences are
taken as 0, and the state of a sequence that begins in the block is put before its first row. Steps
need nothing of each other but the block of the output that sequences share.

Bound: x is read once, y is written once: memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.compat import result
from ejkernel.kernels.pallas.tpu.causal_conv1d.tiles import HALO, Tiles
from ejkernel.kernels.pallas.tpu.common.chip import Chip
from ejkernel.kernels.pallas.tpu.common.segments import (
    Visits,
    replace_inside,
    row_block,
    rows_inside,
)
from ejkernel.types.problems.convolution import ConvolutionProblem


class Position(NamedTuple):
    """Position of a visit.

    Attributes:
        sequence: index of the sequence; ``ConvolutionProblem.states`` for the rows of none.
        start, end: rows of the sequence. first: first row of the block.
    """

    sequence: Any
    start: Any
    end: Any
    first: Any

    def begins(self, t: Tiles) -> Any:
        """Returns whether the sequence begins in the block."""
        return (self.start >= self.first) & (self.start < self.first + t.rows)

    def mask(self, offset: int, rows: int, channels: int) -> jax.Array:
        """Returns which of ``rows`` rows, starting at ``offset`` of the block, are the sequence's,
        ``[rows, channels]``."""
        return rows_inside(self.first + offset, (rows, channels), self.start, self.end)


def position_of(t: Tiles, tables: Any) -> Position:
    """Returns the position of the present visit; the tables are in scalar memory."""
    segment, shift, bounds = tables
    visit = pl.program_id(1)
    current = segment[visit]
    first = row_block(visit, segment, shift) * t.rows
    return Position(current, bounds[current], bounds[current + 1], first)


def load_rows(at: Position, offset: int, ref: Any) -> jax.Array:
    """Returns the rows ``[rows, channels]`` of ``ref`` in float32, 0 where they are not the
    sequence's; the first is ``offset`` rows behind the first row of the block."""
    inside = at.mask(offset, *ref.shape)
    return jnp.where(inside, ref[...].astype(jnp.float32), 0.0)


def insert_state(
    p: ConvolutionProblem, t: Tiles, at: Position, history_ref: Any, state_ref: Any
) -> None:
    """Stores the state of a sequence before its first row, where taps of the block may reach it.

    ``state_ref``: ``[1, w - 1, channels]``, the tokens before the sequence, the latest last. Row 0
    of ``history_ref`` is the row that is ``HALO`` rows before the block.
    """

    @pl.when((at.start > at.first - p.width) & (at.sequence < p.states))
    def _put() -> None:
        for i in range(p.width - 1):
            row = at.start - at.first + (HALO - p.width + 1 + i)
            history_ref[pl.ds(row, 1), :] = state_ref[0, i : i + 1]


def shifted(x: jax.Array, rows: int) -> jax.Array:
    """Returns x with every row ``rows`` further down; rows that leave at the end enter at 0."""
    return pltpu.roll(x, rows % x.shape[0], 0) if rows else x


def convolve(p: ConvolutionProblem, history: jax.Array, taps: jax.Array) -> jax.Array:
    """Returns z for the rows of ``history`` ``[rows, channels]``.

    The first w - 1 rows are meaningless: their taps reach rows that entered from the end. ``taps``
    are the weights of the taps and the bias, float32 ``[w + 1, channels]``.
    """
    z = taps[p.width : p.width + 1] + history * taps[p.width - 1 : p.width]
    for back in range(1, p.width):
        tap = p.width - 1 - back
        z += shifted(history, back) * taps[tap : tap + 1]
    return z


def _kernel(
    p: ConvolutionProblem,
    t: Tiles,
    segment: Any,
    shift: Any,
    bounds: Any,
    before_ref: Any,
    x_ref: Any,
    taps_ref: Any,
    state_ref: Any,
    y_ref: Any,
    history_ref: Any,
) -> None:
    at = position_of(t, (segment, shift, bounds))
    history_ref[:HALO] = load_rows(at, -HALO, before_ref)
    history_ref[HALO:] = load_rows(at, 0, x_ref)
    insert_state(p, t, at, history_ref, state_ref)
    y = convolve(p, history_ref[...], taps_ref[...])[HALO:]
    if p.silu:
        y = y * lax.logistic(y)
    inside = at.mask(0, t.rows, t.channels)
    y = jnp.where(at.sequence < p.states, y, 0.0)
    y_ref[...] = replace_inside(y_ref[...], y, inside)


class Specs(NamedTuple):
    """Block specs of rows, of the ``HALO`` rows before and after, of the taps and the states."""

    rows: pl.BlockSpec
    before: pl.BlockSpec
    after: pl.BlockSpec
    taps: pl.BlockSpec
    states: pl.BlockSpec


def specs_of(p: ConvolutionProblem, t: Tiles) -> Specs:
    """Returns the block specs of the operands of both passes.

    Index maps get the block of channels, the visit, and the tables of ``segments.Visits``.
    """
    halos_per_block, last_halo = t.rows // HALO, (p.total - 1) // HALO

    def halo(distance: int) -> Any:
        def index(channels: Any, visit: Any, segment: Any, shift: Any, bounds: Any) -> Any:
            block = row_block(visit, segment, shift) * halos_per_block + distance
            # rows that a clipped block has instead are masked: their place is outside the sequence
            return jnp.clip(block, 0, last_halo), channels

        return pl.BlockSpec((HALO, t.channels), index)

    def of_rows(channels: Any, visit: Any, segment: Any, shift: Any, bounds: Any) -> Any:
        return row_block(visit, segment, shift), channels

    def of_state(channels: Any, visit: Any, segment: Any, shift: Any, bounds: Any) -> Any:
        return jnp.minimum(segment[visit], p.states - 1), 0, channels

    return Specs(
        rows=pl.BlockSpec((t.rows, t.channels), of_rows),
        before=halo(-1),
        after=halo(halos_per_block),
        taps=pl.BlockSpec((p.width + 1, t.channels), lambda channels, *_: (0, channels)),
        states=pl.BlockSpec((1, p.width - 1, t.channels), of_state),
    )


def compiler_params(chip: Chip, t: Tiles) -> Any:
    """Returns the parameters of both passes; blocks of channels may be on different cores."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=chip.vmem_limit(2 * t.vmem()),
    )


def forward(
    p: ConvolutionProblem,
    t: Tiles,
    chip: Chip,
    schedule: Visits,
    x: jax.Array,
    taps: jax.Array,
    states: jax.Array,
) -> jax.Array:
    """Returns y ``[rows, channels]``.

    ``taps``: float32 ``[w + 1, channels]``, the bias last; ``states``: float32
    ``[states, w - 1, channels]``.
    """
    specs = specs_of(p, t)
    return pl.pallas_call(
        functools.partial(_kernel, p, t),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(-(-p.channels // t.channels), schedule.count),
            in_specs=[specs.before, specs.rows, specs.taps, specs.states],
            out_specs=specs.rows,
            scratch_shapes=[pltpu.VMEM((t.rows + HALO, t.channels), jnp.float32)],
        ),
        out_shape=result((p.total, p.channels), p.dtype, x),
        compiler_params=compiler_params(chip, t),
        cost_estimate=pl.CostEstimate(
            flops=2 * p.width * x.size,
            transcendentals=x.size if p.silu else 0,
            bytes_accessed=2 * x.nbytes,
        ),
        interpret=chip.interpret,
        name="ejkernel_causal_conv1d",
    )(*schedule.tables, x, x, taps, states)

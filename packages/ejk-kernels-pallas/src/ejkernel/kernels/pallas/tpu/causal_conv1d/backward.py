"""The gradient of the short causal convolution on a TPU.

    dz_t = dy_t act'(z_t)          dx_t = sum_i weight[i] dz_{t+w-1-i}
    dweight[i] = sum_t dz_t x_{t-w+1+i}          dbias = sum_t dz_t

Grid and visits as in ``forward``. The rows before and after a block are loaded with it, and z is
computed again, for the rows after it too. The gradients of taps and bias stay in vector memory
until all visits of a block of channels have added to them.

Bound: x and dy are read once, dx is written once: memory.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.compat import result
from ejkernel.kernels.pallas.tpu.causal_conv1d.forward import (
    compiler_params,
    convolve,
    insert_state,
    load_rows,
    position_of,
    shifted,
    specs_of,
)
from ejkernel.kernels.pallas.tpu.causal_conv1d.tiles import HALO, Tiles
from ejkernel.kernels.pallas.tpu.common.chip import Chip
from ejkernel.kernels.pallas.tpu.common.segments import Visits, replace_inside
from ejkernel.types.problems.convolution import ConvolutionProblem


def _kernel(
    p: ConvolutionProblem,
    t: Tiles,
    segment: Any,
    shift: Any,
    bounds: Any,
    before_ref: Any,
    x_ref: Any,
    after_ref: Any,
    dy_ref: Any,
    dy_after_ref: Any,
    taps_ref: Any,
    state_ref: Any,
    dx_ref: Any,
    dtaps_ref: Any,
    dstate_ref: Any,
    history_ref: Any,
    gradient_ref: Any,
) -> None:
    at = position_of(t, (segment, shift, bounds))
    inside = at.mask(0, t.rows, t.channels)
    # the rows of no sequence may hold NaN: they are loaded as 0 from a segment that is empty
    at = at._replace(end=jnp.where(at.sequence < p.states, at.end, at.start))
    history_ref[:HALO] = load_rows(at, -HALO, before_ref)
    history_ref[HALO : HALO + t.rows] = load_rows(at, 0, x_ref)
    history_ref[HALO + t.rows :] = load_rows(at, t.rows, after_ref)
    insert_state(p, t, at, history_ref, state_ref)
    history, taps = history_ref[...], taps_ref[...]
    # dy at first, later the gradient of history; the rows before the block have visits of their own
    gradient_ref[:HALO] = jnp.zeros((HALO, t.channels), jnp.float32)
    gradient_ref[HALO : HALO + t.rows] = load_rows(at, 0, dy_ref)
    gradient_ref[HALO + t.rows :] = load_rows(at, t.rows, dy_after_ref)
    dz = gradient_ref[...]
    if p.silu:
        z = convolve(p, history, taps)
        gate = lax.logistic(z)
        dz = dz * (gate * (1.0 + z * (1.0 - gate)))

    @pl.when(pl.program_id(1) == 0)
    def _begin() -> None:
        dtaps_ref[...] = jnp.zeros_like(dtaps_ref)

    # the taps get the gradient of every row in one visit: not of the rows after the block
    block_dz = dz[: HALO + t.rows]
    dhistory = dz * taps[p.width - 1 : p.width]
    for back in range(p.width):
        tap = p.width - 1 - back
        tap_rows = shifted(history, back)[: HALO + t.rows]
        dtaps_ref[tap : tap + 1] += jnp.sum(block_dz * tap_rows, axis=0, keepdims=True)
        if back:
            # rows that leave at the start come back at the end, where none is used
            dhistory += shifted(dz, -back) * taps[tap : tap + 1]
    dtaps_ref[p.width : p.width + 1] += jnp.sum(block_dz, axis=0, keepdims=True)
    gradient_ref[...] = dhistory

    dx = dhistory[HALO : HALO + t.rows]
    dx_ref[...] = replace_inside(dx_ref[...], dx, inside)

    # the rows before a sequence have the gradient of its state
    @pl.when(at.begins(t) & (at.sequence < p.states))
    def _store_state() -> None:
        for i in range(p.width - 1):
            row = at.start - at.first + (HALO - p.width + 1 + i)
            dstate_ref[0, i : i + 1] = gradient_ref[pl.ds(row, 1), :]


def backward(
    p: ConvolutionProblem,
    t: Tiles,
    chip: Chip,
    schedule: Visits,
    x: jax.Array,
    taps: jax.Array,
    states: jax.Array,
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dx ``[rows, channels]``, and in float32 the gradients of the taps and the bias
    ``[w + 1, channels]`` and of the states ``[states + 1, w - 1, channels]``; the last one and the
    gradients of empty sequences mean nothing."""
    specs = specs_of(p, t)
    extended_rows = t.rows + 2 * HALO

    def of_state(channels: Any, visit: Any, segment: Any, shift: Any, bounds: Any) -> Any:
        return segment[visit], 0, channels

    return pl.pallas_call(
        functools.partial(_kernel, p, t),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(-(-p.channels // t.channels), schedule.count),
            in_specs=[
                specs.before,
                specs.rows,
                specs.after,
                specs.rows,
                specs.after,
                specs.taps,
                specs.states,
            ],
            out_specs=[
                specs.rows,
                specs.taps,
                pl.BlockSpec((1, p.width - 1, t.channels), of_state),
            ],
            scratch_shapes=[pltpu.VMEM((extended_rows, t.channels), jnp.float32)] * 2,
        ),
        out_shape=[
            result((p.total, p.channels), p.dtype, x),
            result((p.width + 1, p.channels), "float32", x),
            result((p.states + 1, p.width - 1, p.channels), "float32", x),
        ],
        compiler_params=compiler_params(chip, t),
        cost_estimate=pl.CostEstimate(
            flops=6 * p.width * x.size,
            transcendentals=x.size if p.silu else 0,
            bytes_accessed=3 * x.nbytes,
        ),
        interpret=chip.interpret,
        name="ejkernel_causal_conv1d_gradient",
    )(*schedule.tables, x, x, x, dy, dy, taps, states)

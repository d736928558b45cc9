"""The gradient of means of segments of any length on a TPU.

    dx[row] = dout[segment of row] / rows of the segment that count;  0 elsewhere

Grid as ``segments``, with one more segment of the rows that belong to none: each visit writes its
rows of a block of dx, which stays in vector memory until its last segment has been visited.

Bound: dx is written once: memory.
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
from ejkernel.kernels.pallas.tpu.common.segments import (
    Visits,
    replace_inside,
    row_block,
    rows_inside,
)
from ejkernel.kernels.pallas.tpu.mean_pooling.segments import (
    inside_segment,
    of_mask,
    of_rows,
    parameters,
)
from ejkernel.kernels.pallas.tpu.mean_pooling.tiles import Tiles
from ejkernel.types.problems.mean_pooling import PoolingProblem


def _kernel(
    t: Tiles,
    segments: int,
    segment: Any,
    shift: Any,
    bounds: Any,
    counts: Any,
    mask_ref: Any | None,
    dout_ref: Any,
    dx_ref: Any,
) -> None:
    visit = pl.program_id(1)
    current = segment[visit]
    first = row_block(visit, segment, shift) * t.rows
    of_segment = rows_inside(first, (t.rows, t.channels), bounds[current], bounds[current + 1])
    seen = inside_segment(t, (segment, shift, bounds), visit, mask_ref)
    number = jnp.maximum(counts[jnp.minimum(current, segments - 1)], 1).astype(jnp.float32)
    scaled = dout_ref[0].astype(jnp.float32) / number
    rows = jnp.where(seen & (current < segments), jnp.broadcast_to(scaled, of_segment.shape), 0.0)
    dx_ref[...] = replace_inside(dx_ref[...], rows, of_segment)


def segments_gradient(
    p: PoolingProblem,
    t: Tiles,
    chip: Chip,
    dout: jax.Array,
    schedule: Visits,
    counts: jax.Array,
    row_mask: jax.Array | None,
) -> jax.Array:
    """Returns the gradient of x ``[rows, channels]``; ``schedule`` visits all its rows."""
    mask = None if row_mask is None else row_mask.astype(jnp.int32)
    segments = counts.shape[0]
    out = result((p.batch * p.rows, p.channels), p.dtype, dout)

    def of_dout(c: Any, v: Any, segment: Any, *tables: Any) -> Any:
        return jnp.minimum(segment[v], segments - 1), 0, c

    return pl.pallas_call(
        functools.partial(_kernel, t, segments),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(-(-p.channels // t.channels), schedule.count),
            in_specs=[
                None if mask is None else pl.BlockSpec((1, t.rows), of_mask),
                pl.BlockSpec((1, 1, t.channels), of_dout),
            ],
            out_specs=pl.BlockSpec((t.rows, t.channels), of_rows),
        ),
        out_shape=out,
        compiler_params=parameters(chip, p, t),
        cost_estimate=pl.CostEstimate(
            flops=out.size, transcendentals=0, bytes_accessed=out.size * p.itemsize
        ),
        interpret=chip.interpret,
        name="ejkernel_pool_segments_gradient",
    )(*schedule.tables, counts, mask, dout[:, None])

"""Means of segments of any length on a TPU: packed sequences, and chunks of more than a block.

    out[segment] = sum of its rows that count / their number, in float32

Grid (block of channels, visit): the visits of a segment (``common.segments``) follow each other and
add to eight accumulators a channel, which the last visit adds up. Rows of other segments may hold
anything. Row counts are in scalar memory.

Bound: x is read once, the means are written once: memory.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.compat import result
from ejkernel.kernels.pallas.tpu.common.chip import SUBLANES, Chip
from ejkernel.kernels.pallas.tpu.common.masks import column
from ejkernel.kernels.pallas.tpu.common.segments import (
    Visits,
    is_first_visit,
    is_last_visit,
    row_block,
    rows_inside,
)
from ejkernel.kernels.pallas.tpu.mean_pooling.chunks import spread_lanes
from ejkernel.kernels.pallas.tpu.mean_pooling.tiles import Tiles
from ejkernel.types.problems.mean_pooling import PoolingProblem


def inside_segment(t: Tiles, tables: Any, visit: Any, mask_ref: Any | None) -> jax.Array:
    """Returns which elements of a block are in rows of the segment that count."""
    segment, shift, bounds = tables
    current = segment[visit]
    first = row_block(visit, segment, shift) * t.rows
    inside = rows_inside(first, (t.rows, t.channels), bounds[current], bounds[current + 1])
    if mask_ref is None:
        return inside
    return inside & (spread_lanes(column(mask_ref[...]), t.channels) != 0)


def _kernel(
    t: Tiles,
    segment: Any,
    shift: Any,
    bounds: Any,
    counts: Any,
    mask_ref: Any | None,
    x_ref: Any,
    out_ref: Any,
    acc_ref: Any,
) -> None:
    visit, last = pl.program_id(1), pl.num_programs(1) - 1
    current = segment[visit]

    @pl.when(is_first_visit(segment, visit, current))
    def _begin() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    inside = inside_segment(t, (segment, shift, bounds), visit, mask_ref)
    x = jnp.where(inside, x_ref[...].astype(jnp.float32), 0.0)
    acc_ref[...] += jnp.sum(x.reshape(t.rows // SUBLANES, SUBLANES, t.channels), axis=0)

    @pl.when(is_last_visit(segment, visit, current, last))
    def _end() -> None:
        total = jnp.sum(acc_ref[...], axis=0, keepdims=True)
        number = jnp.maximum(counts[current], 1).astype(jnp.float32)
        out_ref[0] = (total / number).astype(out_ref.dtype)


def parameters(chip: Chip, p: PoolingProblem, t: Tiles) -> Any:
    """Returns the compiler's parameters for a grid of blocks of channels and visits."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=chip.vmem_limit(2 * t.vmem(p)),
    )


def of_rows(c: Any, v: Any, segment: Any, shift: Any, *tables: Any) -> Any:
    """Block of x of a visit."""
    return row_block(v, segment, shift), c


def of_mask(c: Any, v: Any, segment: Any, shift: Any, *tables: Any) -> Any:
    """Block of the mask ``[1, rows]`` of a visit."""
    return 0, row_block(v, segment, shift)


def pool_segments(
    p: PoolingProblem,
    t: Tiles,
    chip: Chip,
    x: jax.Array,
    schedule: Visits,
    counts: jax.Array,
    row_mask: jax.Array | None,
) -> jax.Array:
    """Returns the means ``[segments, channels]`` of x ``[rows, channels]``."""
    mask = None if row_mask is None else row_mask.astype(jnp.int32)
    segments = counts.shape[0]
    out = pl.pallas_call(
        functools.partial(_kernel, t),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(-(-p.channels // t.channels), schedule.count),
            in_specs=[
                None if mask is None else pl.BlockSpec((1, t.rows), of_mask),
                pl.BlockSpec((t.rows, t.channels), of_rows),
            ],
            out_specs=pl.BlockSpec(
                (1, 1, t.channels), lambda c, v, segment, *tables: (segment[v], 0, c)
            ),
            scratch_shapes=[pltpu.VMEM((SUBLANES, t.channels), jnp.float32)],
        ),
        out_shape=result((segments, 1, p.channels), p.dtype, x),
        compiler_params=parameters(chip, p, t),
        cost_estimate=pl.CostEstimate(flops=x.size, transcendentals=0, bytes_accessed=x.nbytes),
        interpret=chip.interpret,
        name="ejkernel_pool_segments",
    )(*schedule.tables, counts, mask, x)
    return out[:, 0]

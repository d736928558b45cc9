"""The gradient of means of chunks of equal length on a TPU.

    dx[row] = dout[chunk of row] / rows of the chunk that count;  0 for rows that do not count

Grid and bound as ``chunks``: dx is written once, the cotangent read once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels.pallas.compat import result
from ejkernel.kernels.pallas.tpu.common.chip import Chip
from ejkernel.kernels.pallas.tpu.mean_pooling.chunks import (
    counted_rows,
    mask_blocks,
    parameters,
    specs,
    spread_lanes,
)
from ejkernel.kernels.pallas.tpu.mean_pooling.tiles import Tiles
from ejkernel.types.problems.mean_pooling import PoolingProblem


def _kernel(p: PoolingProblem, t: Tiles, mask_ref: Any | None, dout_ref: Any, dx_ref: Any) -> None:
    counts, number = counted_rows(p, t, mask_ref)
    if p.masked:
        number = spread_lanes(number, t.channels)
    scaled = dout_ref[0].astype(jnp.float32) / number
    shape = (t.groups, p.chunk, t.channels)
    if p.chunk % 8 == 0:
        rows = jnp.broadcast_to(scaled[:, None], shape).reshape(t.rows, t.channels)
    else:
        parts = [jnp.broadcast_to(scaled[i : i + 1], shape[1:]) for i in range(t.groups)]
        rows = jnp.concatenate(parts, axis=0)
    if p.masked and counts is not None:
        rows = jnp.where(spread_lanes(counts, t.channels) != 0, rows, 0.0)
    dx_ref[0] = rows.astype(dx_ref.dtype)


def chunks_gradient(
    p: PoolingProblem, t: Tiles, chip: Chip, dout: jax.Array, row_mask: jax.Array | None
) -> jax.Array:
    """Returns the gradient of x, from ``dout`` ``[batch, groups, channels]``."""
    grid, of_mask, of_x, of_means = specs(p, t)
    mask = None if row_mask is None else mask_blocks(t, row_mask)
    out = result((p.batch, p.rows, p.channels), p.dtype, dout)
    return pl.pallas_call(
        functools.partial(_kernel, p, t),
        grid=grid,
        in_specs=[None if mask is None else of_mask, of_means],
        out_specs=of_x,
        out_shape=out,
        compiler_params=parameters(chip, p, t),
        cost_estimate=pl.CostEstimate(
            flops=out.size, transcendentals=0, bytes_accessed=out.size * p.itemsize
        ),
        interpret=chip.interpret,
        name="ejkernel_pool_chunks_gradient",
    )(mask, dout)

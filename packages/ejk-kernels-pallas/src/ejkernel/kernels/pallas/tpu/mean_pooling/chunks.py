"""Means of chunks of equal length on a TPU, for blocks that hold whole chunks.

    out[chunk] = sum of the rows of the chunk that count / their number, in float32

Grid (batch, block of chunks, block of channels); every step is independent of the others.

Bound: x is read once, the means are written once: memory.
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
from ejkernel.kernels.pallas.tpu.common.chip import LANES, Chip
from ejkernel.kernels.pallas.tpu.common.masks import column
from ejkernel.kernels.pallas.tpu.mean_pooling.tiles import Tiles
from ejkernel.types.problems.mean_pooling import PoolingProblem


def spread_lanes(x: jax.Array, width: int) -> jax.Array:
    """Returns ``[n, 128]`` of equal lanes as ``[n, width]``, for any width."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def group_sums(x: jax.Array, groups: int, group: int) -> jax.Array:
    """Returns the sums ``[groups, n]`` of ``group`` rows each of ``[groups * group, n]``."""
    if group % 8 == 0:
        return jnp.sum(x.reshape(groups, group, x.shape[1]), axis=1)
    parts = [x[i * group : (i + 1) * group] for i in range(groups)]
    return jnp.concatenate([jnp.sum(part, axis=0, keepdims=True) for part in parts], axis=0)


def counted_rows(p: PoolingProblem, t: Tiles, mask_ref: Any) -> tuple[jax.Array | None, jax.Array]:
    """Returns which rows of a block count, int32 ``[rows, 128]`` or None for all, and how many of
    each group, float32 ``[groups, 1]`` or ``[groups, 128]``."""
    first = pl.program_id(1) * t.rows
    if not p.masked:
        start = first + lax.broadcasted_iota(jnp.int32, (t.groups, 1), 0) * p.chunk
        count = jnp.clip(p.rows - start, 1, p.chunk).astype(jnp.float32)
        if p.rows % t.rows == 0:
            return None, count
        row = first + lax.broadcasted_iota(jnp.int32, (t.rows, LANES), 0)
        return (row < p.rows).astype(jnp.int32), count
    counts = column(mask_ref[0, 0])
    number = group_sums(counts.astype(jnp.float32), t.groups, p.chunk)
    return counts, jnp.maximum(number, 1.0)


def _kernel(p: PoolingProblem, t: Tiles, mask_ref: Any | None, x_ref: Any, out_ref: Any) -> None:
    counts, number = counted_rows(p, t, mask_ref)
    x = x_ref[0].astype(jnp.float32)
    if counts is not None:
        x = jnp.where(spread_lanes(counts, t.channels) != 0, x, 0.0)
        if p.masked:
            number = spread_lanes(number, t.channels)
    out_ref[0] = (group_sums(x, t.groups, p.chunk) / number).astype(out_ref.dtype)


def specs(
    p: PoolingProblem, t: Tiles
) -> tuple[tuple[int, ...], pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Returns the grid, and the blocks of the mask, of x and of the means."""
    grid = p.batch, -(-p.groups // t.groups), -(-p.channels // t.channels)
    return (
        grid,
        pl.BlockSpec((1, 1, 1, t.rows), lambda b, g, c: (b, g, 0, 0)),
        pl.BlockSpec((1, t.rows, t.channels), lambda b, g, c: (b, g, c)),
        pl.BlockSpec((1, t.groups, t.channels), lambda b, g, c: (b, g, c)),
    )


def mask_blocks(t: Tiles, row_mask: jax.Array) -> jax.Array:
    """Returns int8 ``[batch, rows]`` as int32 ``[batch, blocks, 1, rows of a block]``."""
    batch, rows = row_mask.shape
    padded = jnp.pad(row_mask, ((0, 0), (0, -rows % t.rows)))
    return padded.reshape(batch, -1, 1, t.rows).astype(jnp.int32)


def parameters(chip: Chip, p: PoolingProblem, t: Tiles) -> Any:
    """Returns the compiler's parameters for a grid whose steps are independent."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel",) * 3, vmem_limit_bytes=chip.vmem_limit(2 * t.vmem(p))
    )


def pool_chunks(
    p: PoolingProblem, t: Tiles, chip: Chip, x: jax.Array, row_mask: jax.Array | None
) -> jax.Array:
    """Returns the means ``[batch, groups, channels]`` of x ``[batch, rows, channels]``."""
    grid, of_mask, of_x, of_means = specs(p, t)
    mask = None if row_mask is None else mask_blocks(t, row_mask)
    return pl.pallas_call(
        functools.partial(_kernel, p, t),
        grid=grid,
        in_specs=[None if mask is None else of_mask, of_x],
        out_specs=of_means,
        out_shape=result((p.batch, p.groups, p.channels), p.dtype, x),
        compiler_params=parameters(chip, p, t),
        cost_estimate=pl.CostEstimate(flops=x.size, transcendentals=0, bytes_accessed=x.nbytes),
        interpret=chip.interpret,
        name="ejkernel_pool_chunks",
    )(mask, x)

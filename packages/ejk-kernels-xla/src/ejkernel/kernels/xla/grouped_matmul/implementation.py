"""Grouped matmul: every run of rows times its own matrix, in a loop over tiles of rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla.grouped_matmul.primitives import grouped_rows_matmul
from ejkernel.kernels.xla.grouped_matmul.row_loops import Plan
from ejkernel.kernels.xla.grouped_matmul.tiles import RowTile, row_tile
from ejkernel.kernels.xla.kernel import XlaKernel
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.arrays import result_dtype
from ejkernel.types.calls import arguments


class GroupedMatmul(XlaKernel):
    """Consecutive runs of rows, each times its own matrix.

    The cost is that of the rows: about ``2 k n (sum(group_sizes) + g * block_m / 2)`` operations,
    accumulated in float32 at least. ``cfg``: ``block_m``, the number of rows per step.
    Differentiable to every order, forward and reverse, in lhs, rhs and existing_out. Matrices of
    8-bit values are converted a tile at a time; they have no gradient. Batch-invariant calls have a
    step for every row, which reads its matrix again.
    """

    call = calls.GroupedMatmul
    reads = arguments.GROUPED_PRODUCT | {"preferred_element_type", "precision", "rhs_scale"}
    partitioned = True  # the compiler would gather what a loop over rows reads

    def variant_reason(self, problem: Any) -> str | None:
        return None

    def choose(self, problem: Any, target: Any) -> RowTile:
        return row_tile(problem.lhs.shape[0], problem.rhs.shape[0])

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, lhs, rhs = work.problem, arrays["lhs"], arrays["rhs"]
        dtype = p.preferred_element_type or result_dtype(lhs, rhs)
        accumulate = result_dtype(lhs, rhs, jnp.float32, jax.dtypes.canonicalize_dtype(dtype))
        tile, alone = work.tiles.block_m, work.batch_invariant
        plan = Plan(tile, p.transpose_rhs, p.precision, accumulate, alone)
        rows, groups = lhs.shape[0], rhs.shape[0]
        if groups == 0:
            out = jnp.zeros((rows, rhs.shape[1 if p.transpose_rhs else 2]), accumulate)
        else:
            bounds = _bounds(arrays["group_sizes"], arrays.get("group_offset"), groups, rows)
            out = grouped_rows_matmul(lhs, rhs, *bounds, plan)
            if "rhs_scale" in arrays:
                # as its own shard, a call is differentiated in all floats
                scale = jax.lax.stop_gradient(arrays["rhs_scale"])
                out = _multiply_scale(out, scale, *bounds)
        if "existing_out" in arrays:
            out = out + arrays["existing_out"].astype(accumulate)
        return (out.astype(dtype),), ()


def _bounds(
    group_sizes: jax.Array, group_offset: jax.Array | None, groups: int, rows: int
) -> tuple[jax.Array, jax.Array]:
    """First row and row past the last of every local group, clipped to the rows there are."""
    sizes = jnp.maximum(group_sizes, 0)
    # clipped one by one, no sum of sizes can wrap around
    ends = jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), jnp.minimum(sizes, rows))
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    if group_offset is None:
        return starts, ends
    index = group_offset + jnp.arange(groups, dtype=jnp.int32)
    inside = (index >= 0) & (index < sizes.shape[0])
    index = jnp.clip(index, 0, max(sizes.shape[0] - 1, 0))
    return jnp.where(inside, starts[index], 0), jnp.where(inside, ends[index], 0)


@jax.checkpoint  # a scale for every row and column would be kept for the gradient
def _multiply_scale(
    out: jax.Array, scale: jax.Array, starts: jax.Array, ends: jax.Array
) -> jax.Array:
    return out * _scale_of_rows(scale, starts, ends, out.shape[0]).astype(out.dtype)


def _scale_of_rows(scale: jax.Array, starts: jax.Array, ends: jax.Array, rows: int) -> jax.Array:
    """Returns the factor of every row, ``[]`` or ``[rows, 1 or columns]``; 0 without a group."""
    if scale.ndim == 0:
        return scale
    row = jnp.arange(rows, dtype=ends.dtype)
    # groups that have no rows here may end at 0
    group = jnp.searchsorted(jax.lax.cummax(ends), row, side="right")
    group = jnp.minimum(group, ends.shape[0] - 1)
    inside = (row >= starts[group]) & (row < ends[group])
    row_scale = scale[group] if scale.ndim == 2 else scale[group][:, None]
    return jnp.where(inside[:, None], row_scale, 0)


grouped_matmul = GroupedMatmul()

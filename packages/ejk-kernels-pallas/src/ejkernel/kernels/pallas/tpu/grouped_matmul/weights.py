"""The gradient of the matrices of a grouped matmul on a TPU.

    drhs[g] = lhs[rows of group g]^T dout[rows of group g]

Grid (block of inner, block of columns, visit): the visits of a group follow each other, add to
float32 accumulators in vector memory, and the last one stores them. A group without rows is visited
once and stores zeros. On the border of a group the rows of others are cut from both operands, which
may hold anything there.

Bound: as forward; lhs is read once for each block of columns, the cotangent once for each block of
inner, so that blocks of 1024 x 1024 make 512 FLOPs of every byte of bfloat16.
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
    is_first_visit,
    is_last_visit,
    row_block,
    rows_inside,
    visits,
    zero_outside,
)
from ejkernel.kernels.pallas.tpu.grouped_matmul.forward import compiler_params, dot
from ejkernel.kernels.pallas.tpu.grouped_matmul.groups import segment_bounds
from ejkernel.kernels.pallas.tpu.grouped_matmul.tiles import Tiles
from ejkernel.types.problems.grouped_matmul import GroupedProblem


def _kernel(
    p: GroupedProblem,
    t: Tiles,
    segment: Any,
    shift: Any,
    bounds: Any,
    lhs_ref: Any,
    dout_ref: Any,
    out_ref: Any,
    acc_ref: Any,
) -> None:
    visit, last = pl.program_id(2), pl.num_programs(2) - 1
    group = segment[visit]
    start, end = bounds[group], bounds[group + 1]
    first = row_block(visit, segment, shift) * t.rows

    @pl.when(is_first_visit(segment, visit, group))
    def _begin() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def add(a: jax.Array, b: jax.Array) -> None:
        a, b = (b, a) if p.transposed else (a, b)
        acc_ref[...] += dot(p, a, b, (0, 0))

    covers_block = (start <= first) & (end >= first + t.rows)

    @pl.when(covers_block)
    def _all_rows() -> None:
        add(lhs_ref[...], dout_ref[...])

    @pl.when(~covers_block & (start < end))
    def _rows_of_group() -> None:
        def masked(ref: Any) -> jax.Array:
            return zero_outside(ref[...], rows_inside(first, ref.shape, start, end))

        add(masked(lhs_ref), masked(dout_ref))

    @pl.when(is_last_visit(segment, visit, group, last))
    def _end() -> None:
        out_ref[0] = acc_ref[...].astype(out_ref.dtype)


def rhs_gradient(
    p: GroupedProblem,
    t: Tiles,
    chip: Chip,
    lhs: jax.Array,
    dout: jax.Array,
    group_sizes: jax.Array,
    offset: jax.Array | None,
) -> jax.Array:
    """Returns the gradient of ``rhs``, in its layout and in the dtype of the operands.

    ``lhs``: ``[rows, inner]``; ``dout``: ``[rows, columns]``. Index maps get the block of inner k,
    the block of columns n, the visit v, and the tables of ``segments.Visits``.
    """
    # matrices without rows have a visit that stores zeros; rows without a matrix have none
    bounds = segment_bounds(group_sizes, offset, p.held, p.rows)[1:-1]
    schedule = visits(bounds, p.rows, t.rows, empty_segments=True)
    block, shape = (t.inner, t.columns), (p.inner, p.columns)
    if p.transposed:
        block, shape = block[::-1], shape[::-1]

    def of_lhs(k: Any, n: Any, v: Any, segment: Any, shift: Any, bounds: Any) -> Any:
        return row_block(v, segment, shift), k

    def of_dout(k: Any, n: Any, v: Any, segment: Any, shift: Any, bounds: Any) -> Any:
        return row_block(v, segment, shift), n

    def of_out(k: Any, n: Any, v: Any, segment: Any, shift: Any, bounds: Any) -> Any:
        return segment[v], *((n, k) if p.transposed else (k, n))

    inner_blocks, column_blocks = -(-p.inner // t.inner), -(-p.columns // t.columns)
    moved = lhs.nbytes * column_blocks + dout.nbytes * inner_blocks
    return pl.pallas_call(
        functools.partial(_kernel, p, t),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(inner_blocks, column_blocks, schedule.count),
            in_specs=[
                pl.BlockSpec((t.rows, t.inner), of_lhs),
                pl.BlockSpec((t.rows, t.columns), of_dout),
            ],
            out_specs=pl.BlockSpec((1, *block), of_out),
            scratch_shapes=[pltpu.VMEM(block, jnp.float32)],
        ),
        out_shape=result((p.held, *shape), p.dtype, lhs, dout),
        compiler_params=compiler_params(
            chip, ("parallel", "parallel", "arbitrary"), t.gradient_vmem(p)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * p.rows * p.inner * p.columns, transcendentals=0, bytes_accessed=moved
        ),
        interpret=chip.interpret,
        name="ejkernel_grouped_matmul_weights",
    )(*schedule.tables, lhs, dout)

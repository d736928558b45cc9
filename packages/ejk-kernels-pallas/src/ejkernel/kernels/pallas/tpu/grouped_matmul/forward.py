"""Grouped matmul forward on a TPU, and the gradient of lhs, which is the same with rhs transposed.

    out[rows of group g] = scale[g] * lhs[rows of group g] rhs[g] + existing[rows of group g]

Grid (block of columns, visit, block of inner): a visit is a block of rows and a group that has rows
in it (``common.segments``). The grid has as many visits as the sizes make: no step is idle. The
block of the result stays in vector memory while its groups are visited one after the other, each of
which writes only its rows; where the inner axis is one matmul, without an accumulator. Where the
full inner axis fits, a matrix is fetched once for all its rows, and ``lhs`` once for each block of
columns.

Bound: 2 rows inner columns FLOPs against groups inner columns + rows (inner + columns) elements.
With n rows in a group that is n FLOPs for each byte of a bfloat16 matrix: below 240 rows a group on
v5e (560 on v6e) memory is the limit, and fetching each matrix once is all that counts.

Source: Gale et al. 2022, MegaBlocks (blocks of rows that belong to one group).
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
from ejkernel.kernels.pallas.tpu.common.chip import Chip
from ejkernel.kernels.pallas.tpu.common.matmul import matmul
from ejkernel.kernels.pallas.tpu.common.segments import (
    replace_inside,
    row_block,
    rows_inside,
    visits,
    zero_outside,
)
from ejkernel.kernels.pallas.tpu.grouped_matmul.groups import segment_bounds
from ejkernel.kernels.pallas.tpu.grouped_matmul.tiles import Tiles
from ejkernel.types.problems.grouped_matmul import GroupedProblem


def compiler_params(chip: Chip, semantics: tuple[Any, ...], vmem: int) -> Any:
    """Returns the parameters of a kernel that asks for ``vmem`` bytes of vector memory."""
    limit = min(chip.vmem, max(vmem * 5 // 4, chip.tile_memory // 2))
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=int(limit))


def dot(p: GroupedProblem, a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Returns the matmul of two blocks over one axis each, in float32."""
    is_full = p.dtype == "float32" and p.precision in ("high", "highest")
    precision = lax.Precision.HIGHEST if is_full else lax.Precision.DEFAULT
    return matmul(a, b, axes, precision)


def _zero_past(x: jax.Array, axis: int, length: Any) -> jax.Array:
    """Returns ``x`` with zeros past ``length`` of an axis: the array may end there."""
    return zero_outside(x, lax.broadcasted_iota(jnp.int32, x.shape, axis) < length)


def _kernel(
    p: GroupedProblem,
    t: Tiles,
    segment: Any,
    shift: Any,
    bounds: Any,
    lhs_ref: Any,
    rhs_ref: Any,
    scale_ref: Any | None,
    existing_ref: Any | None,
    out_ref: Any,
    acc_ref: Any | None,
) -> None:
    """Runs a grid step; there is an accumulator where ``Tiles.accumulates``."""
    visit, step, steps = pl.program_id(1), pl.program_id(2), pl.num_programs(2)
    group = segment[visit]
    start, end = bounds[group], bounds[group + 1]
    has_matrix = (group > 0) & (group <= p.held)
    first = row_block(visit, segment, shift) * t.rows

    def multiply(part: Any, length: Any = None) -> jax.Array:
        """Multiplies a slice of the inner axis, of which ``length`` elements exist; None: all."""
        a = lhs_ref[:, part]
        b = (rhs_ref[0, :, part] if p.transposed else rhs_ref[0, part, :]).astype(p.dtype)
        inner_axis = 1 if p.transposed else 0
        if length is not None:
            a, b = _zero_past(a, 1, length), _zero_past(b, inner_axis, length)
        return dot(p, a, b, (1, inner_axis))

    def store(x: jax.Array) -> None:
        """Stores the rows of ``x`` ``[rows, columns]`` that are of the group."""
        if scale_ref is not None:
            x = x * scale_ref[0]
        if existing_ref is not None:
            x = x + existing_ref[...].astype(jnp.float32)
        covers_block = (start <= first) & (end >= first + t.rows)

        @pl.when(covers_block)
        def _all_rows() -> None:
            out_ref[...] = x.astype(out_ref.dtype)

        @pl.when(~covers_block)
        def _rows_of_group() -> None:
            inside = rows_inside(first, x.shape, start, end)
            out_ref[...] = replace_inside(out_ref[...], x, inside)

    if acc_ref is None:  # clearing and reading an accumulator would take a fifth of the bundles

        @pl.when(has_matrix)
        def _store_product() -> None:
            store(multiply(pl.ds(0, t.inner)))

        @pl.when(~has_matrix)
        def _store_zeros() -> None:
            store(jnp.zeros(out_ref.shape, jnp.float32))

        return

    @pl.when(step == 0)
    def _begin() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def add(part: Any, length: Any) -> None:
        product = multiply(part, length)
        acc_ref[...] += product

    @pl.when(has_matrix)
    def _multiply() -> None:
        chunk, last_is_cut = t.chunk, p.inner % t.inner != 0
        remaining = p.inner - step * t.inner

        def multiply_chunk(i: Any, carry: None) -> None:
            begin = pl.multiple_of(i * chunk, chunk)
            add(pl.ds(begin, chunk), remaining - begin if last_is_cut else None)

        if chunk <= t.inner:
            lax.fori_loop(0, t.inner // chunk, multiply_chunk, None)
        tail = t.inner // chunk * chunk
        if tail < t.inner:
            add(pl.ds(tail, t.inner - tail), remaining - tail if last_is_cut else None)

    @pl.when(step == steps - 1)
    def _end() -> None:
        store(acc_ref[...])


def forward(
    p: GroupedProblem,
    t: Tiles,
    chip: Chip,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    offset: jax.Array | None,
    existing: jax.Array | None = None,
    scale: jax.Array | None = None,
) -> jax.Array:
    """Returns ``[rows, columns]``; ``scale`` is float32 ``[held, 1, columns]`` of 8-bit ``rhs``.

    Index maps get the block of columns n, the visit v, the block of inner k, and the tables of
    ``segments.Visits``, whose segment g + 1 has the rows of matrix g.
    """
    schedule = visits(segment_bounds(group_sizes, offset, p.held, p.rows), p.rows, t.rows)
    steps = -(-p.inner // t.inner)

    def matrix(v: Any, segment: Any) -> Any:
        return jnp.clip(segment[v] - 1, 0, p.held - 1)

    def inner_block(v: Any, k: Any, segment: Any) -> Any:
        # rows without a matrix fetch nothing new for each block of it
        return jnp.where((segment[v] > 0) & (segment[v] <= p.held), k, 0) if steps > 1 else 0

    def of_lhs(n: Any, v: Any, k: Any, segment: Any, shift: Any, bounds: Any) -> Any:
        return row_block(v, segment, shift), inner_block(v, k, segment)

    def of_rhs(n: Any, v: Any, k: Any, segment: Any, shift: Any, bounds: Any) -> Any:
        block = inner_block(v, k, segment)
        return matrix(v, segment), *((n, block) if p.transposed else (block, n))

    def of_scale(n: Any, v: Any, k: Any, segment: Any, shift: Any, bounds: Any) -> Any:
        return matrix(v, segment), 0, n

    def of_out(n: Any, v: Any, k: Any, segment: Any, shift: Any, bounds: Any) -> Any:
        return row_block(v, segment, shift), n

    rhs_block = (t.columns, t.inner) if p.transposed else (t.inner, t.columns)
    out_spec = pl.BlockSpec((t.rows, t.columns), of_out)
    operands = [lhs, rhs, scale, existing]
    accumulator = pltpu.VMEM((t.rows, t.columns), jnp.float32)
    column_blocks = -(-p.columns // t.columns)
    moved = lhs.nbytes * column_blocks + rhs.nbytes + p.rows * p.columns * jnp.dtype(p.out).itemsize
    return pl.pallas_call(
        functools.partial(_kernel, p, t),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(column_blocks, schedule.count, steps),
            in_specs=[
                pl.BlockSpec((t.rows, t.inner), of_lhs),
                pl.BlockSpec((1, *rhs_block), of_rhs),
                None if scale is None else pl.BlockSpec((1, 1, t.columns), of_scale),
                None if existing is None else out_spec,
            ],
            out_specs=out_spec,
            scratch_shapes=[accumulator if t.accumulates(p) else None],
        ),
        out_shape=result((p.rows, p.columns), p.out, *jax.tree.leaves(operands)),
        compiler_params=compiler_params(chip, ("parallel", "arbitrary", "arbitrary"), t.vmem(p)),
        cost_estimate=pl.CostEstimate(
            flops=2 * p.rows * p.inner * p.columns, transcendentals=0, bytes_accessed=moved
        ),
        interpret=chip.interpret,
        name="ejkernel_grouped_matmul",
    )(*schedule.tables, *operands)

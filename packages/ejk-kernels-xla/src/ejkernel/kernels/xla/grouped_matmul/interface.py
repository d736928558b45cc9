"""The public function."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.xla.grouped_matmul.primitives import grouped_product
from ejkernel.kernels.xla.grouped_matmul.products import Plan
from ejkernel.kernels.xla.grouped_matmul.tiles import row_tile
from ejkernel.types.arrays import result_dtype
from ejkernel.types.attention import float_array, invalid


def _sizes(group_sizes: Any) -> Any:
    """int32 ``[g_total]``; numpy when the values are known."""
    known = isinstance(group_sizes, (np.ndarray, list, tuple))
    sizes = np.asarray(group_sizes) if known else group_sizes
    integer = hasattr(sizes, "dtype") and jnp.issubdtype(sizes.dtype, jnp.integer)
    if not integer or sizes.ndim != 1:
        raise invalid("group_sizes", "integer[groups]", sizes)
    if known and (sizes < 0).any():
        raise ValueError(f"group_sizes: must not be negative, got {sizes.tolist()}")
    return sizes.astype(np.int32)


def _offset(group_offset: Any, groups: int, total: int) -> Any:
    """The offset as an int or int32 ``[]``."""
    if isinstance(group_offset, bool) or not (
        isinstance(group_offset, int)
        or (
            jnp.issubdtype(getattr(group_offset, "dtype", float), jnp.integer)
            and group_offset.shape in ((), (1,))
        )
    ):
        raise invalid("group_offset", "a Python int, integer[] or integer[1]", group_offset)
    if isinstance(group_offset, (int, np.ndarray, np.generic)):
        group_offset = int(np.asarray(group_offset).reshape(()))
        if not 0 <= group_offset <= total - groups:
            raise ValueError(
                f"group_offset: must be in [0, {total - groups}] for {groups} of {total} groups, "
                f"got {group_offset}"
            )
        return group_offset
    return group_offset.reshape(()).astype(jnp.int32)


def _bounds(
    group_sizes: Any, group_offset: Any, groups: int, rows: int
) -> tuple[jax.Array, jax.Array]:
    """First row and row past the last of every local group, clipped to the rows there are."""
    sizes = jnp.maximum(jnp.asarray(group_sizes), 0)
    # clipped one by one, no sum of sizes can wrap around
    ends = jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), jnp.minimum(sizes, rows))
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    if group_offset is None:
        return starts, ends
    index = group_offset + jnp.arange(groups, dtype=jnp.int32)
    inside = (index >= 0) & (index < sizes.shape[0])
    index = jnp.clip(index, 0, max(sizes.shape[0] - 1, 0))
    return jnp.where(inside, starts[index], 0), jnp.where(inside, ends[index], 0)


@partial(jax.jit, static_argnames=("plan", "dtype"))
def _product(lhs, rhs, sizes, group_offset, existing_out, *, plan: Plan, dtype: Any) -> jax.Array:
    """``grouped_matmul`` of checked arguments."""
    m, groups = lhs.shape[0], rhs.shape[0]
    if groups == 0:
        out = jnp.zeros((m, rhs.shape[1 if plan.transposed else 2]), plan.dtype)
    else:
        starts, ends = _bounds(sizes, group_offset, groups, m)
        out = grouped_product(lhs, rhs, starts, ends, plan)
    if existing_out is not None:
        out = out + existing_out.astype(plan.dtype)
    return out.astype(dtype)


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | int | None = None,
    existing_out: jax.Array | None = None,
    *,
    preferred_element_type: Any = None,
    transpose_rhs: bool = False,
    precision: Any = None,
    cfg: Any = None,
) -> jax.Array:
    """Consecutive runs of rows, each times its own matrix.

        out[r] = lhs[r] @ rhs[group(r) - group_offset] + existing_out[r]

    Args:
        lhs: float ``[m, k]``. Run i of its rows has length ``group_sizes[i]``.
        rhs: float ``[g, k, n]``, or ``[g, n, k]`` with ``transpose_rhs``.
        group_sizes: integer ``[g_total]``, zeros allowed; may be traced. A sum above m is clipped;
            rows past the sum give 0. Negative sizes count as 0.
        group_offset: int, integer ``[]`` or ``[1]``: rhs holds the groups from this one on, and
            rows of other groups give 0. Without it g_total must be g.
        existing_out: float ``[m, n]``, added to the product.
        preferred_element_type: float dtype of the output; default result_type(lhs, rhs).
            Accumulation is in float32 at least.
        precision: of the products.
        cfg: its ``block_m`` is the number of rows per step.

    Returns:
        out ``[m, n]``.

    Differentiable to every order, forward and reverse, in lhs, rhs and existing_out. The cost is
    that of the rows: about ``2 k n (sum(group_sizes) + g * block_m / 2)`` flops.

    Raises:
        InvalidArgument: an array of wrong dtype, rank or size. ValueError: negative group_sizes or
        a group_offset out of range that the host knows.
    """
    lhs = float_array(lhs, "lhs", "m k")
    rhs = float_array(rhs, "rhs", "groups n k" if transpose_rhs else "groups k n")
    (m, k), g, n = lhs.shape, rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    if rhs.shape[2 if transpose_rhs else 1] != k:
        form = f"float[groups, n, {k}]" if transpose_rhs else f"float[groups, {k}, n]"
        raise invalid("rhs", form, rhs)
    sizes = _sizes(group_sizes)
    if group_offset is None:
        if sizes.shape[0] != g:
            raise invalid("group_sizes", f"integer[{g}], one size per matrix of rhs", sizes)
    else:
        if sizes.shape[0] < g:
            raise invalid("group_sizes", f"integer[at least {g}], the matrices of rhs", sizes)
        group_offset = _offset(group_offset, g, sizes.shape[0])
    dtype = result_dtype(lhs, rhs)
    if preferred_element_type is not None:
        dtype = jnp.dtype(preferred_element_type)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise invalid("preferred_element_type", "a float dtype", str(dtype))
    if existing_out is not None:
        existing_out = float_array(existing_out, "existing_out", "m n")
        if existing_out.shape != (m, n):
            raise invalid("existing_out", f"float[{m}, {n}]", existing_out)

    accumulate = result_dtype(lhs, rhs, jnp.float32, jax.dtypes.canonicalize_dtype(dtype))
    plan = Plan(
        tile=row_tile(m, g, cfg),
        transposed=bool(transpose_rhs),
        precision=tuple(precision) if isinstance(precision, list) else precision,
        dtype=accumulate,
    )
    return _product(lhs, rhs, sizes, group_offset, existing_out, plan=plan, dtype=dtype)

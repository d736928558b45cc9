"""Bounds of the rows of each matrix of a grouped matmul.

Before the first matrix and after the last one stands a segment of the rows that have none, so that
every row belongs to exactly one segment.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def segment_bounds(
    group_sizes: jax.Array, offset: jax.Array | None, matrices: int, rows: int
) -> jax.Array:
    """Returns int32 ``[matrices + 3]``: bounds of the rows before the first of the matrices,
    of each matrix, and of those after the last. Sizes that sum to more than ``rows`` are cut."""
    sizes = jnp.clip(group_sizes, 0, rows).astype(jnp.int32)
    if (sizes.shape[0] + 1) * rows < 2**31:
        ends = jnp.minimum(jnp.cumsum(sizes), rows)
    else:  # a sum of int32 could wrap around
        ends = jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), sizes)
    first = 0 if offset is None else offset
    bounds = jax.lax.dynamic_slice(jnp.pad(ends, (1, 0)), (first,), (matrices + 1,))
    return jnp.pad(jnp.pad(bounds, (1, 0)), (0, 1), constant_values=rows)

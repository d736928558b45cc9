"""Matmuls of latent rows whose bits follow from no other row, for batch-invariant calls.

XLA chooses a matmul, and the order of its sums, by the number of rows. A batch-invariant kernel of
grouped_matmul has the tiles of a fixed number of rows; here all rows are one group of it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.arrays import result_dtype
from ejkernel.types.attention.latent import RowProducts
from ejkernel.types.attention.softmax import sum_by_halves


def products_in_order(grouped_matmul: Any) -> RowProducts:
    """Returns matmuls by a kernel object of grouped_matmul, in float32."""

    def multiply(x: jax.Array, weight: jax.Array, *, transposed: bool) -> jax.Array:
        """Returns ``[b, k, n]`` of rows ``[b, k, c]``."""
        dtype, rows = result_dtype(x, weight), x.shape[0] * x.shape[1]
        out = grouped_matmul.run_canonical(
            lhs=x.astype(dtype).reshape(rows, x.shape[2]),
            rhs=weight.astype(dtype).reshape(1, weight.shape[0], -1),
            group_sizes=jnp.full(1, rows, jnp.int32),
            preferred_element_type=jnp.dtype(jnp.float32),
            transpose_rhs=transposed,
        )
        return out.reshape(*x.shape[:2], out.shape[1])

    def expand(latent: jax.Array, weight: jax.Array, precision: Any = None) -> jax.Array:
        out = multiply(latent, weight, transposed=False)
        return out.reshape(*latent.shape[:2], *weight.shape[1:])

    def contract(x: jax.Array, weight: jax.Array, precision: Any = None) -> jax.Array:
        return multiply(x.reshape(*x.shape[:2], -1), weight, transposed=True)

    def sum_heads(x: jax.Array) -> jax.Array:
        return sum_by_halves(jnp.moveaxis(x.astype(jnp.float32), 2, -1))

    return RowProducts(expand, contract, sum_heads)

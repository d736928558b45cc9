"""Matmuls of rows whose bits follow from no other row, for batch-invariant latent attention.

XLA chooses a matmul, and the order of its sums, by the number of rows. The kernel of grouped_matmul
with all rows in one group has the tiles of a fixed number of rows here.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.grouped_matmul.implementation import grouped_matmul
from ejkernel.types.arrays import result_dtype
from ejkernel.types.attention.latent import RowProducts
from ejkernel.types.attention.softmax import sum_by_halves


def _multiply(x: jax.Array, weight: jax.Array, *, transposed: bool) -> jax.Array:
    """Returns the products ``[b, k, n]`` of rows ``[b, k, c]``, in float32."""
    dtype, rows = result_dtype(x, weight), x.shape[0] * x.shape[1]
    out = grouped_matmul.run_canonical(
        lhs=x.astype(dtype).reshape(rows, x.shape[2]),
        rhs=weight.astype(dtype)[None],
        group_sizes=jnp.full(1, rows, jnp.int32),
        preferred_element_type=jnp.dtype(jnp.float32),
        transpose_rhs=transposed,
    )
    return out.reshape(*x.shape[:2], out.shape[1])


def _expand(latent: jax.Array, weight: jax.Array, precision: Any = None) -> jax.Array:
    out = _multiply(latent, weight.reshape(weight.shape[0], -1), transposed=False)
    return out.reshape(*latent.shape[:2], *weight.shape[1:])


def _contract(x: jax.Array, weight: jax.Array, precision: Any = None) -> jax.Array:
    flat = x.reshape(*x.shape[:2], -1)
    return _multiply(flat, weight.reshape(weight.shape[0], -1), transposed=True)


def _sum_heads(x: jax.Array) -> jax.Array:
    return sum_by_halves(jnp.moveaxis(x.astype(jnp.float32), 2, -1))


IN_ORDER = RowProducts(_expand, _contract, _sum_heads)

"""The matmul of two tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def matmul(
    a: jax.Array, b: jax.Array, axes: tuple[int, int], precision: lax.Precision | None = None
) -> jax.Array:
    """Returns the matmul of two tiles over one axis of each, accumulated in float32.

    ``precision``: of float32 operands; one bfloat16 pass by default.
    """
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )

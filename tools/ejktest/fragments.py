"""The 8-bit grouped matmul of Hopper: operands and results as its instructions move them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.pallas.gpu.grouped_matmul import fragments


def convert_columns(columns: jax.Array, kind: Any, dtype: Any) -> jax.Array:
    """Returns int8 ``[columns, depth]`` of values of ``kind`` as ``load_fragment`` returns them."""
    x = fragments.in_fragment_order(columns.T).T
    return lax.bitcast_convert_type(x, jnp.dtype(kind)).astype(dtype)


def transpose_result(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns a result ``[columns, rows]`` as ``stage_result`` writes it, ``[rows, columns]``."""
    halves = x.reshape(-1, 2, fragments.PERMUTED // 2, x.shape[1])
    return halves.swapaxes(1, 2).reshape(x.shape).T.astype(dtype)

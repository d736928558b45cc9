"""Keys, values and queries of single heads, from blocks that hold all heads of each token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.ragged_page_attention.tiles import Layout


def split_words(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the lower and the upper bfloat16 of words of 32 bits, as float32: exact."""
    low, high = words << 16, words & jnp.uint32(0xFFFF0000)
    return pltpu.bitcast(low, jnp.float32), pltpu.bitcast(high, jnp.float32)


def load_head(layout: Layout, block: Any, head: int) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values ``[tokens, width]`` of a kv head, in the dtype of the query.

    ``block``: ``[tokens, rows of a token, width]`` in vector memory, bfloat16 or float32. A key and
    its value in bfloat16 share words of 32 bits, which the load unit reads token by token.
    """
    tokens, rows, width = block.shape
    if layout.chip.interpret:  # which has no views of other dtypes
        k, v = block[:, 2 * head], block[:, 2 * head + 1]
    elif block.dtype == jnp.float32:
        view = block.reshape(tokens * rows, width)
        k, v = (view[pl.ds(2 * head + n, tokens, stride=rows)] for n in range(2))
    else:
        view = block.bitcast(jnp.uint32).reshape(tokens * rows // 2, width)
        k, v = split_words(view[pl.ds(head, tokens, stride=rows // 2)])
    dtype, dim = layout.compute_dtype, layout.paged.dim
    if width > dim:  # padding, which may be NaN
        lane = lax.broadcasted_iota(jnp.int32, k.shape, 1)
        k = jnp.where(lane < dim, k.astype(jnp.float32), 0.0)
    return k.astype(dtype), v.astype(dtype)


def gather_heads(layout: Layout, rows_ref: Any, head: Any) -> jax.Array:
    """Returns the queries of a head, ``[queries, width]``, of rows of tokens and heads."""
    queries = layout.tiles.queries
    return rows_ref[pl.ds(head, queries, stride=layout.heads)].astype(layout.compute_dtype)

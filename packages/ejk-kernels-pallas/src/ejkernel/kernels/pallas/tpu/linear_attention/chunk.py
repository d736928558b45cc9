"""Decays inside a chunk, and matmuls, as both passes of linear attention need them.

Row t reads row s through exp(the sum of the log decays of the rows after s up to t). A matmul with
zeros and ones computes this, never the difference of two longer sums: no digits are lost under
strong decays, and nothing overflows. Three bfloat16 parts of a log decay have all digits of
float32, and times one each of them is exact.

"Up to" and "after" are in time: with ``reverse`` it runs from the last row of a chunk to the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.pallas.tpu.common.matmul import matmul
from ejkernel.kernels.pallas.tpu.linear_attention.problem import CHUNK, Problem

# of a row: its exp is 0, and the sum of CHUNK of them is finite, where -inf + 0 * -inf is NaN
MIN_LOG_DECAY = -1000.0


def dot(p: Problem, a: jax.Array, b: jax.Array, axes: tuple[int, int] = (1, 0)) -> jax.Array:
    """Returns the matmul of two tiles over one axis each, accumulated in float32."""
    precision = lax.Precision.DEFAULT if p.dtype == "bfloat16" else lax.Precision.HIGHEST
    return matmul(a.astype(p.dtype), b.astype(p.dtype), axes, precision)


def split_bfloat16(x: jax.Array, count: int = 3) -> list[jax.Array]:
    """Returns bfloat16 values whose sum is the float32 ``x``, to 8 bits for each of them."""
    parts = []
    for _ in range(count):
        part = x.astype(jnp.bfloat16)
        parts.append(part)
        x = x - part.astype(jnp.float32)
    return parts


@dataclass(frozen=True)
class Order:
    """Masks ``[CHUNK, CHUNK]`` of two rows in time.

    Attributes:
        upto: column is not later than row. before: column is earlier than row.
    """

    upto: jax.Array
    before: jax.Array


def order_of_rows(reverse: bool) -> Order:
    """Returns the masks of a chunk."""
    row, column = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    if reverse:
        return Order(column >= row, column > row)
    return Order(column <= row, column < row)


@dataclass(frozen=True)
class Decay:
    """Decays of a chunk, all factors; None stands for 1 where the state does not decay.

    Attributes:
        pairs: ``[t, s]``, from row s to row t, 0 where s is later.
        since: ``[t, 1]``, from the start of the chunk to row t.
        until: ``[s, 1]``, from row s to the end of the chunk.
        total: ``[1, 1]``, over the chunk.
    """

    pairs: jax.Array
    since: jax.Array | None = None
    until: jax.Array | None = None
    total: jax.Array | None = None


def decay_of(order: Order, gate: jax.Array | None) -> Decay:
    """Returns the decays of a chunk from the log decays ``[1, CHUNK]`` of its rows."""
    if gate is None:
        return Decay(order.upto.astype(jnp.float32))
    gate = jnp.maximum(gate, MIN_LOG_DECAY)
    reaching = jnp.where(order.upto, gate, 0.0)  # [t, r]: row r decays what row t reads
    after = jnp.where(order.before, 1.0, 0.0).astype(jnp.bfloat16)  # [r, s]: row r is after row s
    between = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    for part in split_bfloat16(reaching):
        between += jnp.dot(part, after, preferred_element_type=jnp.float32)
    later = jnp.where(order.upto, 0.0, gate)  # [s, r]: row r is after row s
    return Decay(
        jnp.where(order.upto, jnp.exp(between), 0.0),
        jnp.exp(jnp.sum(reaching, axis=1, keepdims=True)),
        jnp.exp(jnp.sum(later, axis=1, keepdims=True)),
        jnp.exp(jnp.sum(gate, axis=1, keepdims=True)),
    )


def scale_by(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Returns ``x`` times a factor, in the dtype of the factor; None stands for 1."""
    if factor is None:
        return x
    return factor * (x.astype(factor.dtype) if isinstance(x, jax.Array) else x)


def rows_of_chunk(first: Any, axis: int, start: Any, end: Any) -> jax.Array:
    """Returns which of the rows starting at ``first`` lie in a sequence, along an axis of two."""
    shape = (CHUNK, 1) if axis == 0 else (1, CHUNK)
    row = first + lax.broadcasted_iota(jnp.int32, shape, axis)
    return (row >= start) & (row < end)

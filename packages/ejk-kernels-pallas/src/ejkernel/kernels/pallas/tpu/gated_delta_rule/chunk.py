"""The delta rule inside a chunk: triangular inverse, scores, and factors of the rows.

With k of unit length where keys are normalized, D_t the decay from the chunk start to row t and
d(t, s) that from row s to row t,

    inverse = (I + [s before t: beta_t d(t, s) k_t k_s])^-1
    scores  = [s up to t: scale d(t, s) q_t k_s]
    u       = inverse (beta (v - D k S))          the updates, S the state before the chunk

The inverse of a block of 2 m rows has the inverses x of its halves on the diagonal, and -x n x
below. Seven doublings make that of 128 rows, each two matmuls of whole matrices in float32. Powers
of the system are never formed: where keys repeat they overflow.

Lengths of queries and keys are factors of accumulators: a bfloat16 key keeps its exact length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.pallas.tpu.gated_delta_rule.problem import Problem
from ejkernel.kernels.pallas.tpu.linear_attention.chunk import Decay, Order, dot, times
from ejkernel.kernels.pallas.tpu.linear_attention.problem import CHUNK

NORM_EPSILON = 1e-6


def _rows_and_columns() -> tuple[jax.Array, jax.Array]:
    row, column = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    return row, column


def as_row(x: jax.Array) -> jax.Array:
    """Returns a column ``[CHUNK, 1]`` as ``[1, CHUNK]``."""
    row, column = _rows_and_columns()
    return jnp.sum(jnp.where(row == column, x, 0.0), axis=0, keepdims=True)


def as_column(x: jax.Array) -> jax.Array:
    """Returns a row ``[1, CHUNK]`` as ``[CHUNK, 1]``."""
    row, column = _rows_and_columns()
    return jnp.sum(jnp.where(row == column, x, 0.0), axis=1, keepdims=True)


def invert(system: jax.Array, reverse: bool) -> jax.Array:
    """Returns the inverse of ``I + system``; only pairs of a row and an earlier one are read."""
    row, column = _rows_and_columns()
    inverse = jnp.where(row == column, 1.0, 0.0)
    for level in range(CHUNK.bit_length() - 1):
        of_row, of_column = row >> level, column >> level
        later, earlier = (of_column, of_row) if reverse else (of_row, of_column)
        below = jnp.where((earlier % 2 == 0) & (later == earlier + 1), system, 0.0)
        if level:
            below = _dot_float32(_dot_float32(inverse, below), inverse)
        inverse = inverse - below
    return inverse


def _dot_float32(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def reciprocal_length(p: Problem, x: jax.Array) -> Any:
    """Returns 1 / sqrt(sum of squares + epsilon) of every row ``[CHUNK, 1]``, or 1."""
    if not p.normalize:
        return 1.0
    x = x.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + NORM_EPSILON)


@dataclass(frozen=True)
class Terms:
    """Matrices and factors of a chunk.

    Attributes:
        unit_pairs: dots of unit queries and keys, and of unit keys, ``[t, s]``, not decayed.
        scores, gram: decayed; the gram matrix only where the column is earlier.
        inverse: of the triangular system.
        q_since, k_since, k_until: factors ``[CHUNK, 1]`` of the rows of q and k.
        q_factor, k_factor: reciprocal lengths ``[CHUNK, 1]``, or 1.
        beta: ``[CHUNK, 1]``.
    """

    unit_pairs: tuple[jax.Array, jax.Array]
    scores: jax.Array
    gram: jax.Array
    inverse: jax.Array
    q_since: Any
    k_since: Any
    k_until: Any
    q_factor: Any
    k_factor: Any
    beta: jax.Array


def terms_of(
    p: Problem, order: Order, decay: Decay, q: jax.Array, k: jax.Array, beta: jax.Array
) -> Terms:
    """Returns the terms of a chunk by its rows; ``beta`` is ``[1, CHUNK]``."""
    q_factor, k_factor = reciprocal_length(p, q), reciprocal_length(p, k)
    qk, kk = dot(p, q, k, (1, 1)), dot(p, k, k, (1, 1))
    if p.normalize:
        of_columns = as_row(k_factor)
        qk, kk = qk * q_factor * of_columns, kk * k_factor * of_columns
    scores = qk * decay.pairs * p.scale
    gram = jnp.where(order.before, kk * decay.pairs, 0.0)
    beta = as_column(beta)
    return Terms(
        (qk, kk),
        scores,
        gram,
        invert(beta * gram, p.reverse),
        times(q_factor * p.scale, decay.since),
        times(k_factor, decay.since),
        times(k_factor, decay.until),
        q_factor,
        k_factor,
        beta,
    )


def updates_of(
    p: Problem, terms: Terms, k: jax.Array, v: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the updates, and the values less what the state before the chunk returns."""
    error = v.astype(jnp.float32) - terms.k_since * dot(p, k, state)
    return dot(p, terms.inverse, terms.beta * error), error


def next_state(
    p: Problem, terms: Terms, decay: Decay, k: jax.Array, update: jax.Array, state: jax.Array
) -> jax.Array:
    """Returns the state after the chunk."""
    return times(state, decay.total) + dot(p, k, terms.k_until * update, (0, 0))

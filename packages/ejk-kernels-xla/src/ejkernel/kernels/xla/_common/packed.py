"""Packed sequences: cumulative lengths, and which sequence every row belongs to.

Lengths may be traced; nothing here reads a device array. Values that the host knows (numpy arrays)
are checked, others are made safe: lengths below 0 count as 0, rows past the end as padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.attention import invalid


def cumulative_lengths(cu_seqlens: Any, argument: str, total: int) -> jax.Array:
    """``cu_seqlens`` as int32 ``[n + 1]``, for ``total`` packed rows.

    InvalidArgument for another dtype, rank or length 0; ValueError when the values are known and
    do not start at 0, decrease, or end after ``total``.
    """
    known = isinstance(cu_seqlens, (np.ndarray, list, tuple))
    cu = np.asarray(cu_seqlens) if known else cu_seqlens
    if not hasattr(cu, "shape") or cu.ndim != 1 or cu.shape[0] < 1:
        raise invalid(argument, "integer[num_sequences + 1]", cu)
    if not jnp.issubdtype(cu.dtype, jnp.integer):
        raise invalid(argument, "integer[num_sequences + 1]", cu)
    if known:
        if cu[0] != 0:
            raise ValueError(f"{argument}: must start at 0, got {cu[0]}")
        if (np.diff(cu) < 0).any():
            raise ValueError(f"{argument}: must not decrease, got {cu.tolist()}")
        if cu[-1] > total:
            raise ValueError(f"{argument}: ends at {cu[-1]}, more than the {total} rows")
    return jnp.asarray(cu, jnp.int32)


def bucket_of(ends: jax.Array, count: int) -> jax.Array:
    """For i in 0..count-1 the number of ``ends`` <= i: the half-open bucket that holds i."""
    marks = jnp.zeros(count + 1, jnp.int32).at[jnp.clip(ends, 0, count)].add(1)
    return jnp.cumsum(marks)[:count]


class Packing(NamedTuple):
    """``sequence`` int32 [rows] (n for padding rows), ``start`` and ``length`` int32 [n]."""

    sequence: jax.Array
    start: jax.Array
    length: jax.Array


def packing(cu_seqlens: jax.Array, rows: int) -> Packing:
    start = cu_seqlens[:-1]
    length = jnp.maximum(cu_seqlens[1:] - start, 0)
    return Packing(bucket_of(cu_seqlens[1:], rows), start, length)

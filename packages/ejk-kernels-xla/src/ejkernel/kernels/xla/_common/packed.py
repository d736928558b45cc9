"""Packed sequences: cumulative lengths, and which sequence every row belongs to.

Lengths may be traced; nothing here reads a device array. Illegal ones are made safe: lengths below
0 count as 0, rows past the end as padding.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


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

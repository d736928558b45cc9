"""Sums over groups of consecutive rows, in two levels.

Rows are first summed in blocks, then the blocks: a sum of r rows has rounding errors of
block + r / block additions instead of r, and no sum is the difference of two others.
Bound: every row is read once, a stream.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.layout import cdiv, pad_axis
from ejkernel.kernels.xla._common.packed import packing
from ejkernel.types.arrays import at_most


def chunk_sums(x: jax.Array, chunk: int, block: int) -> jax.Array:
    """``[b, s, ...]`` -> ``[b, ceil(s / chunk), ...]``."""
    b, s, *rest = x.shape
    block = at_most(block, chunk)
    chunks, blocks = cdiv(s, chunk), cdiv(chunk, block)
    x = pad_axis(x, 1, chunks * chunk).reshape(b * chunks, chunk, *rest)
    x = pad_axis(x, 1, blocks * block).reshape(b, chunks, blocks, block, *rest)
    return jnp.sum(jnp.sum(x, axis=3), axis=2)


def groups_of_rows(cu_seqlens: jax.Array, rows: int, chunk: int | None) -> jax.Array:
    """Group of every row int32 ``[rows]``: its sequence, or its chunk of its sequence.

    Chunk j of sequence m is group ``m * ceil(rows / chunk) + j``; rows of padding get the number
    of groups.
    """
    sequence, start, _ = packing(cu_seqlens, rows)
    if chunk is None:
        return sequence
    per_sequence = cdiv(rows, chunk)
    inside = jnp.arange(rows, dtype=jnp.int32) - start[jnp.minimum(sequence, start.shape[0] - 1)]
    group = sequence * per_sequence + inside // chunk
    return jnp.where(sequence < start.shape[0], group, start.shape[0] * per_sequence)


def group_sums(
    x: jax.Array, groups: jax.Array, count: int, block: int, *, changes: int
) -> jax.Array:
    """``[rows, ...]`` -> ``[count, ...]``; ``groups`` ascend, with at most ``changes`` changes."""
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)
    new = (rows % block == 0) | (groups != jnp.roll(groups, 1))
    run = jnp.cumsum(new) - 1
    runs = at_most(cdiv(x.shape[0], block) + changes, x.shape[0])
    partial = jax.ops.segment_sum(x, run, runs, indices_are_sorted=True)
    group_of_run = jax.ops.segment_max(groups, run, runs, indices_are_sorted=True)
    return jax.ops.segment_sum(partial, group_of_run, count)

"""Mean pooling: rows are summed in two levels and divided by their count.

Rows are first summed in blocks, then the blocks: a sum of r rows has rounding errors of
block + r / block additions instead of r, and no sum is the difference of two others.
Bound: every row is read once, a stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._common.packed import packing
from ejkernel.kernels.xla._common.tiles import Steps
from ejkernel.kernels.xla.kernel import XlaKernel
from ejkernel.ops.call_kernel import CallKernel
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.arrays import at_most
from ejkernel.types.masks.blocks import cdiv, pad_to

# rows of the first level: few additions per level up to 64k rows, and one pass over them
BLOCK = 128


@dataclass(frozen=True)
class RowTile(Steps):
    """Number of rows summed first."""

    token_tile: int


class MeanPooling(XlaKernel):
    """Means over sequences or over chunks of them.

    ``cfg``: ``token_tile``, the number of rows summed first. Differentiable to every order.
    """

    by_rows = True

    call = calls.MeanPooling
    reads = frozenset({"x", "cu_seqlens", "chunk_size", "attention_mask"})
    # rows of a batch and their means, whatever the form of the call
    operands, results = CallKernel.operands, CallKernel.results
    empty_outputs = CallKernel.empty_outputs

    def forward_axes(self, a: Mapping[str, Any], count: int) -> tuple[str, ...]:
        return ("batch chunks channels_0" if a["cu_seqlens"] is None else "sequences channels_0",)

    def choose(self, problem: Any, target: Any) -> RowTile:
        return RowTile(BLOCK)

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        x, cu, mask = arrays["x"], arrays.get("cu_seqlens"), arrays.get("kept")
        rows, chunk, block = x.shape[1], work.problem.chunk_size, work.tiles.token_tile
        wide, ones = x.astype(accumulation_dtype(x)), jnp.ones((*x.shape[:2], 1), jnp.int32)
        if mask is not None:
            wide, ones = (jnp.where(mask[..., None] != 0, t, 0) for t in (wide, ones))
        if cu is None:
            sums, length = (chunk_sums(t, chunk or rows, block) for t in (wide, ones))
        else:
            owner, per_sequence = groups_of_rows(cu, rows, chunk), cdiv(rows, chunk or rows)
            count = (cu.shape[0] - 1) * per_sequence
            sums = group_sums(wide[0], owner, count, block, changes=cu.shape[0] + per_sequence)
            length = jax.ops.segment_sum(ones[0], owner, count)
        return ((sums / jnp.maximum(length, 1).astype(wide.dtype)).astype(x.dtype),), ()


def chunk_sums(x: jax.Array, chunk: int, block: int) -> jax.Array:
    """``[b, s, ...]`` -> ``[b, ceil(s / chunk), ...]``."""
    b, s, *dims = x.shape
    block = at_most(block, chunk)
    chunks, blocks = cdiv(s, chunk), cdiv(chunk, block)
    x = pad_to(x, 1, chunks * chunk).reshape(b * chunks, chunk, *dims)
    x = pad_to(x, 1, blocks * block).reshape(b, chunks, blocks, block, *dims)
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
    run_count = at_most(cdiv(x.shape[0], block) + changes, x.shape[0])
    partial = jax.ops.segment_sum(x, run, run_count, indices_are_sorted=True)
    group_of_run = jax.ops.segment_max(groups, run, run_count, indices_are_sorted=True)
    return jax.ops.segment_sum(partial, group_of_run, count)


mean_pooling = MeanPooling()

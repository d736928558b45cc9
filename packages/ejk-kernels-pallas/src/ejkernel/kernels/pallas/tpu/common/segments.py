"""Segments of consecutive rows, and the order in which kernels visit their blocks.

A segment is, say, the rows that share a matrix, or a sequence. A kernel visits each pair of a
segment and a block of rows that overlap; a block on a border is visited once for each of its
segments, one directly after the other. Index maps read the tables from scalar memory; the tables
hold only what scalar arithmetic cannot find: the segment of each visit, and one integer per
segment.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Visits(NamedTuple):
    """The visits of a kernel, in the order of rows.

    Attributes:
        segment: int32 ``[visits]``, the segment of each; past ``count`` it is the last segment.
        shift: int32 ``[segments]``; visit v of segment r reads the block of rows ``shift[r] + v``.
        bounds: int32 ``[segments + 1]``, first row of each segment and the end of the last.
        count: int32 ``[]``, how many visits there are.
    """

    segment: jax.Array
    shift: jax.Array
    bounds: jax.Array
    count: jax.Array

    @property
    def tables(self) -> tuple[jax.Array, ...]:
        """Returns the arrays that lie in scalar memory."""
        return self.segment, self.shift, self.bounds


def packed_bounds(cu_seqlens: jax.Array, rows: int) -> jax.Array:
    """Returns the bounds of packed sequences in ``rows`` rows, int32.

    Lengths known only at run time might decrease, or reach past the rows.
    """
    return jax.lax.cummax(jnp.clip(cu_seqlens, 0, rows).astype(jnp.int32))


def visits(bounds: jax.Array, rows: int, block: int, *, empty_segments: bool = False) -> Visits:
    """Returns the visits of blocks of ``block`` rows.

    With ``empty_segments`` a segment without rows is visited once.
    """
    count, blocks = bounds.shape[0] - 1, -(-rows // block)
    start, end = bounds[:-1], bounds[1:]
    first = jnp.minimum(start // block, blocks - 1)
    counts = jnp.where(end > start, (end - 1) // block - first + 1, int(empty_segments))
    ends = jnp.cumsum(counts)
    # one comparison for each visit and segment, in one fused operation, and no gather
    visit = jnp.arange(blocks + count, dtype=jnp.int32)
    segment = jnp.sum(visit[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    return Visits(jnp.minimum(segment, count - 1), first - (ends - counts), bounds, ends[-1])


def row_block(visit: Any, segment: Any, shift: Any) -> Any:
    """Returns the block of rows of a visit, from the tables in scalar memory."""
    return shift[segment[visit]] + visit


def is_first_visit(segment: Any, visit: Any, current: Any) -> Any:
    """Returns whether a visit is the first of its segment ``current``; ``segment``: the table."""
    return (visit == 0) | (segment[jnp.maximum(visit - 1, 0)] != current)


def is_last_visit(segment: Any, visit: Any, current: Any, last: Any) -> Any:
    """Returns whether a visit is the last of its segment; ``last``: the last visit of all."""
    return (visit == last) | (segment[jnp.minimum(visit + 1, last)] != current)


def rows_inside(first: Any, shape: tuple[int, ...], start: Any, end: Any) -> jax.Array:
    """Returns a mask of ``shape`` whose rows, the first of them ``first``, lie in the segment."""
    row = first + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= start) & (row < end)


def zero_outside(x: jax.Array, inside: jax.Array) -> jax.Array:
    """Returns ``x`` with zeros where it is not ``inside``: memory there may hold NaN.

    Selected in float32: a mask of 32-bit comparisons does not have the layout of bfloat16.
    """
    return jnp.where(inside, x.astype(jnp.float32), 0.0).astype(x.dtype)


def replace_inside(stored: jax.Array, x: jax.Array, inside: jax.Array) -> jax.Array:
    """Returns ``x`` where it is ``inside`` and ``stored`` elsewhere, in the dtype of ``stored``.

    A block on a border is visited once for each of its segments, of which each writes its rows.
    """
    return jnp.where(inside, x, stored.astype(jnp.float32)).astype(stored.dtype)

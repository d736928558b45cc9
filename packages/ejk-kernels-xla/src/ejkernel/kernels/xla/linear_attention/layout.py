"""Rows ``[batch, seq, heads, channels]`` to chunks ``[chunk, batch, head, row, channel]``.

Every sequence is padded to whole chunks with rows of zeros, which neither decay a state nor add
to it. Packed sequences are gathered, so that no chunk holds rows of two sequences; their number of
chunks is bounded by rows / chunk + sequences whatever the lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.packed import bucket_of, packing
from ejkernel.kernels.xla.linear_attention.core import Links
from ejkernel.types.masks.blocks import cdiv, pad_to


class Plain(NamedTuple):
    """The layout of a batch of sequences of one length."""

    rows: int
    chunk: int
    reverse: bool

    @property
    def chunks(self) -> int:
        return cdiv(self.rows, self.chunk)

    def links(self) -> Links:
        c = jnp.arange(self.chunks, dtype=jnp.int32)
        return Links(jnp.zeros_like(c), c == 0)

    def split(self, x: jax.Array) -> jax.Array:
        x = jnp.flip(x, axis=1) if self.reverse else x
        x = pad_to(x, 1, self.chunks * self.chunk)
        x = x.reshape(x.shape[0], self.chunks, self.chunk, *x.shape[2:])
        return x.transpose(1, 0, 3, 2, 4)

    def merge(self, x: jax.Array) -> jax.Array:
        x = x.transpose(1, 0, 3, 2, 4)
        x = x.reshape(x.shape[0], -1, *x.shape[3:])[:, : self.rows]
        return jnp.flip(x, axis=1) if self.reverse else x

    def initial(self, table: jax.Array) -> jax.Array:
        return table[None]

    def final(self, ends: jax.Array, table: jax.Array) -> jax.Array:
        return ends[-1]


class Packed(NamedTuple):
    """The layout of packed sequences: row indices both ways, and each sequence's last chunk."""

    chunk: int
    row_of_slot: jax.Array
    slot_of_row: jax.Array
    sequence: jax.Array
    opens: jax.Array
    last: jax.Array
    length: jax.Array

    def links(self) -> Links:
        return Links(self.sequence, self.opens)

    def split(self, x: jax.Array) -> jax.Array:
        x = jnp.take(x[0], self.row_of_slot, axis=0, mode="fill", fill_value=0)
        return x.reshape(-1, 1, self.chunk, *x.shape[1:]).swapaxes(2, 3)

    def merge(self, x: jax.Array) -> jax.Array:
        x = x.swapaxes(2, 3).reshape(-1, x.shape[2], x.shape[4])
        return jnp.take(x, self.slot_of_row, axis=0, mode="fill", fill_value=0)[None]

    def initial(self, table: jax.Array) -> jax.Array:
        return table[:, None]

    def final(self, ends: jax.Array, table: jax.Array) -> jax.Array:
        reached = ends[self.last, 0]
        return jnp.where((self.length > 0)[:, None, None, None], reached, table)


def packed(cu_seqlens: jax.Array, rows: int, chunk: int, reverse: bool) -> Packed:
    sequences = cu_seqlens.shape[0] - 1
    chunks = cdiv(rows, chunk) + sequences
    of_row, start, length = packing(cu_seqlens, rows)
    count = -(-length // chunk)
    end = jnp.cumsum(count)
    first = end - count

    sequence = jnp.minimum(bucket_of(end, chunks), sequences - 1)
    number = jnp.arange(chunks, dtype=jnp.int32)
    # chunk 0 opens even when every sequence is empty: no state flows into it
    opens = (number == first[sequence]) | (number == 0)
    position = (number - first[sequence])[:, None] * chunk + jnp.arange(chunk, dtype=jnp.int32)[
        None
    ]
    tokens = length[sequence][:, None]
    ahead = tokens - 1 - position if reverse else position
    row = start[sequence][:, None] + ahead
    row_of_slot = jnp.where((position >= 0) & (position < tokens), row, rows).reshape(-1)

    owner = jnp.minimum(of_row, sequences - 1)
    position = jnp.arange(rows, dtype=jnp.int32) - start[owner]
    position = length[owner] - 1 - position if reverse else position
    slot = first[owner] * chunk + position
    slot_of_row = jnp.where(of_row < sequences, slot, chunks * chunk)
    last = jnp.clip(end - 1, 0, chunks - 1)
    return Packed(chunk, row_of_slot, slot_of_row, sequence, opens, last, length)

"""Block layout: sequence-major arrays cut into blocks, query heads grouped by their kv head.

``[b, q, h, c]`` becomes ``[blocks, b, hk, rows, c]`` with ``rows = groups * block``, so that all
query heads of one kv head share one matmul with its keys and k, v are never repeated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.arrays import is_symbolic
from ejkernel.types.masks.blocks import cdiv, pad_to


def fit_block(block: int, length: int) -> int:
    """The block length that covers ``length`` in as many blocks with the least padding.

    One block is exactly ``length``; several are equal, in multiples of 16 (one row of vectors).
    A symbolic length takes blocks as they are.
    """
    if is_symbolic(length):
        return block
    count = cdiv(length, block)
    return max(length, 1) if count <= 1 else min(block, 16 * cdiv(cdiv(length, count), 16))


def reorder(x: jax.Array, *axes: int) -> jax.Array:
    """``x.transpose(axes)`` where axes of size 1 are moved by reshaping.

    XLA gives a transposed axis of size 1 a layout of its own and then copies to undo it.
    """
    shape = list(map(x.shape.__getitem__, axes))
    moved = [a for a in axes if x.shape[a] != 1]
    in_order = sorted(moved)
    if moved != in_order:
        x = x.reshape([x.shape[a] for a in in_order]).transpose([in_order.index(a) for a in moved])
    return x.reshape(shape)


@dataclass(frozen=True)
class Layout:
    """Sizes of one attention call and its blocks."""

    batch: int
    q_len: int
    kv_len: int
    kv_heads: int
    groups: int
    block_q: int
    block_kv: int

    @classmethod
    def from_shapes(cls, q: Any, k: Any, block_q: int, block_kv: int) -> Layout:
        b, q_len, h, _ = q.shape
        kv_len, hk = k.shape[1], k.shape[2]
        bq, bk = fit_block(block_q, q_len), fit_block(block_kv, kv_len)
        return cls(b, q_len, kv_len, hk, h // hk if hk else 0, bq, bk)

    @cached_property
    def nq(self) -> int:
        return cdiv(self.q_len, self.block_q)

    @cached_property
    def nk(self) -> int:
        return cdiv(self.kv_len, self.block_kv)

    @property
    def rows(self) -> int:
        return self.groups * self.block_q

    @property
    def empty(self) -> bool:
        return 0 in (self.batch, self.q_len, self.kv_len, self.kv_heads, self.groups)

    def split_q(self, x: jax.Array) -> jax.Array:
        """``[b, q, h, c]`` -> ``[nq, b, hk, rows, c]``."""
        x = pad_to(x, 1, self.nq * self.block_q)
        shape = (self.batch, self.nq, self.block_q, self.kv_heads, self.groups, x.shape[-1])
        x = reorder(x.reshape(shape), 1, 0, 3, 4, 2, 5)
        return x.reshape(self.nq, self.batch, self.kv_heads, self.rows, x.shape[-1])

    def join_q(self, x: jax.Array) -> jax.Array:
        """The inverse of ``split_q``, without the padding."""
        shape = (self.nq, self.batch, self.kv_heads, self.groups, self.block_q, x.shape[-1])
        x = reorder(x.reshape(shape), 1, 0, 4, 2, 3, 5)
        h = self.kv_heads * self.groups
        return x.reshape(self.batch, self.nq * self.block_q, h, x.shape[-1])[:, : self.q_len]

    def split_rows(self, x: jax.Array, fill: float) -> jax.Array:
        """``[b, q, h]`` -> ``[nq, b, hk, rows]``; padded rows hold ``fill``."""
        pad = self.nq * self.block_q - self.q_len
        x = jnp.pad(x, ((0, 0), (0, pad), (0, 0)), constant_values=fill) if pad else x
        return self.split_q(x[..., None])[..., 0]

    def join_rows(self, x: jax.Array) -> jax.Array:
        return self.join_q(x[..., None])[..., 0]

    def split_kv(self, x: jax.Array) -> jax.Array:
        """``[b, k, hk, c]`` -> ``[nk, b, hk, block_kv, c]``."""
        x = pad_to(x, 1, self.nk * self.block_kv)
        shape = (self.batch, self.nk, self.block_kv, self.kv_heads, x.shape[-1])
        return reorder(x.reshape(shape), 1, 0, 3, 2, 4)

    def join_kv(self, x: jax.Array) -> jax.Array:
        """The inverse of ``split_kv``, without the padding."""
        x = reorder(x, 1, 0, 3, 2, 4)
        shape = (self.batch, self.nk * self.block_kv, self.kv_heads, x.shape[-1])
        return x.reshape(shape)[:, : self.kv_len]

    def tile(self, x: jax.Array) -> jax.Array:
        """``[b, hk, rows, c]`` of an array that lacks axes of size 1 (free)."""
        rows = math.prod(x.shape[:-1]) // max(self.batch * self.kv_heads, 1)  # not -1: c may be 0
        return x.reshape(self.batch, self.kv_heads, rows, x.shape[-1])

    def pad_tiles(self, x: jax.Array) -> jax.Array:
        """``[#b, #h, #q, k]`` padded to whole tiles; one row stays one row."""
        rows = 1 if x.shape[2] == 1 else self.nq * self.block_q
        return pad_to(pad_to(x, 2, rows), 3, self.nk * self.block_kv)

    def grouped(self, tile: jax.Array) -> jax.Array:
        """``[#b, #h, #bq, bk]`` -> ``[#b, hk|1, g|1, #bq, bk]``."""
        b, h, bq, bk = tile.shape
        split = (1, 1) if h == 1 else (self.kv_heads, self.groups)
        return tile.reshape(b, *split, bq, bk)

    def by_head(self, x: jax.Array) -> jax.Array:
        """``[b, hk, rows, c]`` -> ``[b, hk, g, bq, c]`` (free)."""
        return x.reshape(*x.shape[:2], self.groups, self.block_q, x.shape[-1])

    def by_row(self, x: jax.Array) -> jax.Array:
        """``[b, hk, g, bq, c]`` -> ``[b, hk, rows, c]`` (free)."""
        return x.reshape(*x.shape[:2], self.rows, x.shape[-1])

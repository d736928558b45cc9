"""Layouts of keys and values in memory: reading a block of tokens and adding to it.

A layout is static; the arrays are passed next to it. ``fetch`` reads the tokens of block ``c`` of
every tile, ``accumulate`` adds gradients of such a block. Indices are clipped, never wrapped, so
that a table entry of any value is safe; the caller masks tokens out of range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.types.arrays import is_symbolic

Arrays = tuple[jax.Array, ...]


class Block(NamedTuple):
    """Tokens of one block: ``k [n, t, hk, d]``, ``v [n, t, hk, dv]``, ``position [t]``."""

    k: jax.Array
    v: jax.Array
    position: jax.Array


def _positions(c, tokens: int) -> jax.Array:
    """Returns the positions of the tokens of block ``c``."""
    return c * tokens + jnp.arange(tokens, dtype=jnp.int32)


@dataclass(frozen=True)
class Tables:
    """Page look-up shared by the paged layouts: ``tables [sequences, max_pages]``."""

    page_size: int
    num_pages: int
    max_pages: int

    @property
    def capacity(self) -> int:
        """Tokens one sequence can hold."""
        return self.page_size * self.max_pages if self.num_pages else 0

    def pages(self, tables: jax.Array, sequence: jax.Array, c, tokens: int) -> jax.Array:
        """Returns the pages ``[n, tokens // page_size]`` of block ``c``, clipped into the cache."""
        column = c * (tokens // self.page_size) + jnp.arange(
            tokens // self.page_size, dtype=jnp.int32
        )
        column = jnp.minimum(column, self.max_pages - 1)
        return jnp.clip(tables[sequence[:, None], column], 0, self.num_pages - 1)


@dataclass(frozen=True)
class Paged:
    """A layout whose last array, after ``num_caches`` caches, is the page table."""

    num_caches: ClassVar[int] = 1
    table: Tables

    @property
    def capacity(self) -> int:
        return self.table.capacity


@dataclass(frozen=True)
class SplitPages(Paged):
    """``(key_cache [P, ps, hk, d], value_cache [P, ps, hk, dv], tables)``."""

    num_caches: ClassVar[int] = 2

    def value_dim(self, arrays: Arrays) -> int:
        return arrays[1].shape[-1]

    def fetch(self, arrays: Arrays, sequence, c, tokens: int) -> Block:
        k, v, tables = arrays
        page = self.table.pages(tables, sequence, c, tokens)
        n = page.shape[0]
        k = k[page].reshape(n, tokens, *k.shape[2:])
        v = v[page].reshape(n, tokens, *v.shape[2:])
        return Block(k, v, _positions(c, tokens))

    def accumulate(self, grads: Arrays, tables, sequence, c, dk, dv) -> Arrays:
        page = self.table.pages(tables, sequence, c, dk.shape[1])
        ps = self.table.page_size
        dk = dk.reshape(*page.shape, ps, *dk.shape[2:])
        dv = dv.reshape(*page.shape, ps, *dv.shape[2:])
        return grads[0].at[page].add(dk), grads[1].at[page].add(dv)


@dataclass(frozen=True)
class CombinedPages(Paged):
    """``(cache, tables)`` with the heads of a page in the order K0 V0 K1 V1 ...

    The cache is ``[P, ps, 2 * hk, d]``, or packed ``[P, ps, groups, pack, padded d]``.
    """

    kv_heads: int
    head_dim: int

    def value_dim(self, arrays: Arrays) -> int:
        return self.head_dim

    def _plain(self, block: jax.Array) -> jax.Array:
        """``[..., 2 * hk, d]`` of either form."""
        if block.ndim == 6:  # [n, pages, ps, groups, pack, padded d]
            block = block.reshape(*block.shape[:3], -1, block.shape[-1])
        return block[..., : 2 * self.kv_heads, : self.head_dim]

    def fetch(self, arrays: Arrays, sequence, c, tokens: int) -> Block:
        cache, tables = arrays
        page = self.table.pages(tables, sequence, c, tokens)
        block = self._plain(cache[page])
        block = block.reshape(page.shape[0], tokens, self.kv_heads, 2, self.head_dim)
        return Block(block[..., 0, :], block[..., 1, :], _positions(c, tokens))

    def accumulate(self, grads: Arrays, tables, sequence, c, dk, dv) -> Arrays:
        page = self.table.pages(tables, sequence, c, dk.shape[1])
        both = jnp.stack([dk, dv], axis=3)
        both = both.reshape(*page.shape, self.table.page_size, 2 * self.kv_heads, self.head_dim)
        (grad,) = grads
        if grad.ndim == 5:
            groups, pack, padded = grad.shape[2:]
            room = groups * pack - 2 * self.kv_heads
            both = jnp.pad(both, [(0, 0)] * 3 + [(0, room), (0, padded - self.head_dim)])
            both = both.reshape(*both.shape[:3], groups, pack, padded)
        return (grad.at[page].add(both),)


@dataclass(frozen=True)
class LatentPages(Paged):
    """``(cache [P, ps, dc], tables)``: one head; the value is the row's first entries."""

    latent_dim: int

    def value_dim(self, arrays: Arrays) -> int:
        return self.latent_dim

    def fetch(self, arrays: Arrays, sequence, c, tokens: int) -> Block:
        cache, tables = arrays
        page = self.table.pages(tables, sequence, c, tokens)
        k = cache[page].reshape(page.shape[0], tokens, 1, cache.shape[-1])
        return Block(k, k[..., : self.latent_dim], _positions(c, tokens))

    def accumulate(self, grads: Arrays, tables, sequence, c, dk, dv) -> Arrays:
        page = self.table.pages(tables, sequence, c, dk.shape[1])
        row = dk.at[..., : self.latent_dim].add(dv)
        (grad,) = grads
        return (grad.at[page].add(row.reshape(*page.shape, self.table.page_size, -1)),)


@dataclass(frozen=True)
class Contiguous:
    """``(key [b, S, hk, d], value [b, S, hk, dv])``; tile ``n`` reads batch row ``n``."""

    num_caches: ClassVar[int] = 2
    length: int

    @property
    def capacity(self) -> int:
        return self.length

    def value_dim(self, arrays: Arrays) -> int:
        return arrays[1].shape[-1]

    def _start(self, c, tokens: int):
        # the last block is moved back to stay inside; its repeated head is masked by position
        return jnp.minimum(c * tokens, self.length - tokens)

    def fetch(self, arrays: Arrays, sequence, c, tokens: int) -> Block:
        if is_symbolic(self.length):  # it may be less than a block: keys are read one by one
            row = _positions(c, tokens)
            k, v = (jnp.take(x, row, axis=1, mode="clip") for x in arrays)
            return Block(k, v, jnp.where(row < self.length, row, -1))
        start = self._start(c, tokens)
        k, v = (jax.lax.dynamic_slice_in_dim(x, start, tokens, axis=1) for x in arrays)
        position = start + jnp.arange(tokens, dtype=jnp.int32)
        return Block(k, v, jnp.where(position >= c * tokens, position, -1))

    def accumulate(self, grads: Arrays, tables, sequence, c, dk, dv) -> Arrays:
        if is_symbolic(self.length):
            row = _positions(c, dk.shape[1])
            dk, dv = (
                grad.at[:, row].add(d, mode="drop") for grad, d in zip(grads, (dk, dv), strict=True)
            )
            return dk, dv
        zero = jnp.zeros((), c.dtype)
        at = (zero, self._start(c, dk.shape[1]).astype(c.dtype), zero, zero)

        def add(grad, d):
            old = jax.lax.dynamic_slice(grad, at, d.shape)
            return jax.lax.dynamic_update_slice(grad, old + d, at)

        return add(grads[0], dk), add(grads[1], dv)


Layout = SplitPages | CombinedPages | LatentPages | Contiguous

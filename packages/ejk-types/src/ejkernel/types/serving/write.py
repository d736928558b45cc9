"""Rows of packed sequences in a cache of pages: their positions, and their keys and values there.

The write is a scatter of ``T`` rows, which XLA does in place when the cache is donated.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def row_positions(
    kv_lens: Any, query_start_loc: Any, count: Any, tokens: int, capacity: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the sequence ``[T]`` of every packed row and its position there, -1 without one.

    Row m of a sequence of ``rows`` new tokens stands at ``kv_lens - rows + m``. Sequences past
    ``count`` have no rows; ``capacity``: tokens that a row of the table can name.
    """
    n = kv_lens.shape[0]
    starts = jnp.clip(jnp.asarray(query_start_loc, jnp.int32), 0, tokens)
    row = jnp.arange(tokens, dtype=jnp.int32)
    valid = jnp.arange(n, dtype=jnp.int32) < count
    ends = jnp.where(valid, starts[1:], tokens + 1)
    sequence = jnp.minimum(jnp.searchsorted(ends, row, side="right"), n - 1)
    first, last = starts[sequence], starts[sequence + 1]
    length = jnp.clip(jnp.asarray(kv_lens, jnp.int32), 0, capacity)[sequence]
    position = length - (last - first) + row - first
    inside = valid[sequence] & (row >= first) & (row < last)
    return sequence, jnp.where(inside, jnp.maximum(position, -1), -1)


def write_slots(
    kv_lens: Any, block_tables: Any, query_start_loc: Any, count: Any, tokens: int, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Page ``[T]`` and offset ``[T]`` of every packed row; page -1 for rows without a sequence."""
    columns = block_tables.shape[1]
    capacity = columns * page_size
    sequence, position = row_positions(kv_lens, query_start_loc, count, tokens, capacity)
    page = block_tables[sequence, jnp.clip(position // page_size, 0, max(columns - 1, 0))]
    return jnp.where(position >= 0, page, -1), position % page_size


def write_rows(cache: Any, keys: Any, values: Any, page: Any, offset: Any) -> jax.Array:
    """Returns the cache with ``keys``/``values [T, hk, d]`` in their slots; page -1 drops them."""
    t, hk, d = keys.shape
    both = jnp.stack([keys, values], axis=2).reshape(t, 2 * hk, d)
    outside = (page < 0) | (page >= cache.shape[0])
    page = jnp.where(outside, cache.shape[0], page)
    head = jnp.arange(2 * hk, dtype=jnp.int32)
    if cache.ndim == 4:
        return cache.at[page, offset].set(both, mode="drop")
    pack = cache.shape[3]
    at = cache.at[page[:, None], offset[:, None], head // pack, head % pack, :d]
    return at.set(both, mode="drop")


def read_rows(cache: Any, page: Any, offset: Any, heads: int, dim: int) -> list[jax.Array]:
    """Returns keys and values ``[T, heads, dim]`` of slots of a plain or packed cache."""
    rows = cache[jnp.clip(page, 0, cache.shape[0] - 1), offset]
    rows = rows.reshape(rows.shape[0], -1, rows.shape[-1])[:, : 2 * heads, :dim]
    return [rows[:, 0::2], rows[:, 1::2]]

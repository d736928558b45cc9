"""New keys and values into the pages.

The write is a scatter of ``T`` rows, which XLA does in place when the cache is donated.
"""

from __future__ import annotations

import jax.numpy as jnp


def write_slots(kv_lens, block_tables, query_start_loc, count, tokens: int, page_size: int):
    """Page ``[T]`` and offset ``[T]`` of every packed row; page -1 for rows without a sequence."""
    n, columns = block_tables.shape
    starts = jnp.clip(jnp.asarray(query_start_loc, jnp.int32), 0, tokens)
    row = jnp.arange(tokens, dtype=jnp.int32)
    valid = jnp.arange(n, dtype=jnp.int32) < count
    ends = jnp.where(valid, starts[1:], tokens + 1)
    sequence = jnp.minimum(jnp.searchsorted(ends, row, side="right"), n - 1)
    first, last = starts[sequence], starts[sequence + 1]
    length = jnp.clip(jnp.asarray(kv_lens, jnp.int32), 0, columns * page_size)[sequence]
    position = length - (last - first) + row - first
    is_written = valid[sequence] & (row >= first) & (row < last) & (position >= 0)
    page = block_tables[sequence, jnp.clip(position // page_size, 0, max(columns - 1, 0))]
    return jnp.where(is_written, page, -1), position % page_size


def write_rows(cache, keys, values, page, offset):
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

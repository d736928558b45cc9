"""Lists of the blocks that tokens select, and of the tokens that select a block."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.types.masks.token_blocks import TokenBlocks

INT32 = 2**31

MAX_SINGLE_ROWS = 16
"""Rows that are sorted one by one: XLA has a radix sort for a single row, four times as fast."""


def sort_lists(chosen: jax.Array) -> jax.Array:
    """Returns lists ``[b, s, hk, slots]`` with -1, no block, after all blocks."""
    return jnp.flip(jnp.sort(chosen, axis=-1), axis=-1)


def last_tokens(blocks: TokenBlocks) -> jax.Array:
    """Returns one past the last token of every block ``[n]``; unused blocks have 0."""
    length, count = blocks.sequence.shape[0], blocks.count
    number = jnp.where(blocks.sequence >= 0, block_index(blocks), count)
    token = jnp.arange(length, dtype=jnp.int32)
    ends = jnp.zeros((count,), jnp.int32)
    return ends.at[number].max(token + 1, mode="drop")


def block_index(blocks: TokenBlocks) -> jax.Array:
    """Returns the index of every token's block ``[s]`` among the blocks of all sequences."""
    return blocks.first_block + blocks.position // blocks.size


def transpose_lists(chosen: jax.Array, blocks: TokenBlocks) -> tuple[jax.Array, jax.Array]:
    """Returns the places ``[b, hk, s * slots]`` of all entries by their block, and the bounds.

    Bounds are ``[b, hk, n + 1]``. The place of slot i of token t is t * n + i, n the power of two
    that holds all slots. Places of a block rise; entries after the last bound have no block.
    ``chosen [b, s, hk, slots]`` has each block once in a list, -1 = none.
    """
    b, s, hk, slots = chosen.shape
    number = blocks.first_block[None, :, None, None] + chosen
    number = jnp.where(chosen >= 0, number, blocks.count)
    number = jnp.moveaxis(number, 2, 1).reshape(b, hk, s * slots)
    stride = power_of_two(slots)
    entry_index = (jnp.arange(s)[:, None] * stride + jnp.arange(slots)[None]).astype(jnp.int32)
    entry_index = jnp.broadcast_to(entry_index.reshape(-1), number.shape)
    if (blocks.count + 1) * s * stride < INT32:  # one key sorts faster than two
        number, entry_index = jnp.divmod(*_sort(number * (s * stride) + entry_index), s * stride)
    else:
        number, entry_index = _sort(number, entry_index)
    block = jnp.arange(blocks.count + 1, dtype=jnp.int32)
    find = jax.vmap(jax.vmap(lambda x: jnp.searchsorted(x, block, method="scan_unrolled")))
    return entry_index, find(number).astype(jnp.int32)


def _sort(*arrays: jax.Array) -> list[jax.Array]:
    """Returns arrays ``[b, hk, n]`` sorted by the first, stably."""
    shape = arrays[0].shape
    if shape[0] * shape[1] > MAX_SINGLE_ROWS:
        return list(jax.lax.sort(arrays, num_keys=1))
    flat = [x.reshape(-1, shape[2]) for x in arrays]
    rows = [jax.lax.sort([x[i] for x in flat], num_keys=1) for i in range(flat[0].shape[0])]
    return [jnp.stack(x).reshape(shape) for x in zip(*rows, strict=True)]

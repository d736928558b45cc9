"""A pattern of blocks, bool ``[#b, #h, q blocks, kv blocks]``, as kernels with tiles read it.

The last block of an axis may be shorter. Tiles need not fit the blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.blocks import cdiv

Blocks = tuple[int, int]


def inside_blocks(blocks: Blocks, q_len: int, kv_len: int, tile_q: int, tile_kv: int) -> bool:
    """Whether no tile holds pairs of two blocks."""
    axes = zip(blocks, (tile_q, tile_kv), (q_len, kv_len), strict=True)
    return all(block % tile == 0 or block >= length for block, tile, length in axes)


def in_tiles(
    pattern: jax.Array, blocks: Blocks, q_len: int, kv_len: int, tile_q: int, tile_kv: int
) -> tuple[jax.Array, jax.Array]:
    """Whether any and whether every block that a tile meets is set, ``[#b, #h, nq, nk]``."""
    some = every = pattern
    axes = zip((2, 3), blocks, (tile_q, tile_kv), (q_len, kv_len), strict=True)
    for axis, block, tile, length in axes:
        starts = np.arange(cdiv(length, tile)) * tile
        first, last = starts // block, (np.minimum(starts + tile, length) - 1) // block
        # as many for every tile: the last block again where there are fewer
        reach = np.arange((last - first).max(initial=0) + 1)
        met = np.minimum(first[:, None] + reach, last[:, None]).astype(np.int32)
        some = jnp.take(some, met, axis).any(axis + 1)
        every = jnp.take(every, met, axis).all(axis + 1)
    return some, every


def by_element(pattern: jax.Array, blocks: Blocks, q_len: int, kv_len: int) -> jax.Array:
    """The pattern pair by pair, ``[#b, #h, q, k]``."""
    for axis, block, length in zip((2, 3), blocks, (q_len, kv_len), strict=True):
        pattern = jnp.take(pattern, (np.arange(length) // block).astype(np.int32), axis)
    return pattern

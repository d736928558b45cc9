"""A pattern of blocks, bool ``[#b, #h, q blocks, kv blocks]``, as kernels with tiles read it.

The last block of an axis may be shorter. Tiles need not fit the blocks.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.arrays import is_symbolic, namespace
from ejkernel.types.masks.blocks import block_bounds
from ejkernel.types.masks.classify import classify_blocks
from ejkernel.types.masks.fields import MaskFields
from ejkernel.types.masks.rules import smallest

BlockSizes = tuple[int, int]
FEW = 8  # blocks of a tile that are joined one by one: XLA transposes to reduce such short axes


def inside_blocks(blocks: BlockSizes, q_len: int, kv_len: int, tile_q: int, tile_kv: int) -> bool:
    """Returns whether no tile holds pairs of two blocks."""
    axes = zip(blocks, (tile_q, tile_kv), (q_len, kv_len), strict=True)
    return all(
        block % tile == 0 or (not is_symbolic(length) and block >= length)
        for block, tile, length in axes
    )


def in_tiles(
    pattern: Any, blocks: BlockSizes, q_len: int, kv_len: int, tile_q: int, tile_kv: int
) -> tuple[Any, Any]:
    """Returns whether any and every block that a tile meets is set, ``[#b, #h, nq, nk]``."""
    xp = namespace(pattern)
    any_set = all_set = pattern
    axes = zip((2, 3), blocks, (tile_q, tile_kv), (q_len, kv_len), strict=True)
    for axis, block, tile, length in axes:
        start, end = block_bounds(length, tile)
        first, last = start // block, end // block
        most = (tile - 1) // block + 2 if is_symbolic(length) else (last - first).max(initial=0) + 1
        # the same count for every tile: the last block is repeated where there are fewer
        met = smallest(first[:, None] + np.arange(most), last[:, None]).astype(np.int32)
        if most <= FEW:
            any_set = functools.reduce(operator.or_, (xp.take(any_set, n, axis) for n in met.T))
            all_set = functools.reduce(operator.and_, (xp.take(all_set, n, axis) for n in met.T))
        else:
            any_set = xp.take(any_set, met, axis).any(axis + 1)
            all_set = xp.take(all_set, met, axis).all(axis + 1)
    return any_set, all_set


def mask_mod_tiles(
    states: Any, block: int, q_len: int, kv_len: int, tile_q: int, tile_kv: int
) -> tuple[Any, Any]:
    """Returns whether a tile may have a visible pair, and whether all of its pairs are visible.

    ``states``: of square blocks, 0 without a visible pair, 2 with no other, as ``Mod.blocks``.
    """
    sizes = (q_len, kv_len, tile_q, tile_kv)
    visible, _ = in_tiles(states > 0, (block, block), *sizes)
    return visible, in_tiles(states == 2, (block, block), *sizes)[1]


def visited_tiles(
    mask: MaskFields,
    pattern: Any,
    blocks: BlockSizes | None,
    q_len: int,
    kv_len: int,
    tile_q: int,
    tile_kv: int,
) -> tuple[Any, Any]:
    """Returns whether any and every pair of a tile is visible under the mask and the pattern.

    bool ``[#b, #h, nq, nk]``; both conservative. ``blocks``: of the pattern, None if there is none.
    numpy if every array is.
    """
    any_visible, all_visible = classify_blocks(mask.terms, q_len, kv_len, tile_q, tile_kv)
    if blocks is None:
        return any_visible, all_visible
    met, full = in_tiles(pattern, blocks, q_len, kv_len, tile_q, tile_kv)
    return met & any_visible, full & all_visible


def by_element(pattern: jax.Array, blocks: BlockSizes, q_len: int, kv_len: int) -> jax.Array:
    """The pattern pair by pair, ``[#b, #h, q, k]``."""
    for axis, block, length in zip((2, 3), blocks, (q_len, kv_len), strict=True):
        pattern = jnp.take(pattern, (np.arange(length) // block).astype(np.int32), axis)
    return pattern

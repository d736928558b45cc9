"""Lists of the tiles that a block pattern and a mask leave visible, built on the device.

The blocks of a pattern are part of its meaning, tiles are not. A tile inside one block has the
state of that block; a tile that covers several is visited if any of them is, and then the pattern
is applied as an element mask unless all are visible.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.flash_attention.launch import Block, last_first
from ejkernel.kernels.triton.flash_attention.lists_kernel import ListsLaunch, OrderLaunch
from ejkernel.kernels.triton.flash_attention.tiles import Tiles
from ejkernel.types.arrays import namespace
from ejkernel.types.attention.problem import Problem
from ejkernel.types.masks.classify import classify_blocks
from ejkernel.types.masks.mask_info import MaskInfo
from ejkernel.types.masks.pattern import (
    BlockSizes,
    by_element,
    in_tiles,
    inside_blocks,
    mask_mod_tiles,
)

BITS = 31  # usable bits of an int32 word


def list_operands(
    problem: Problem,
    mask: MaskInfo,
    pattern: jax.Array | None,
    tile: Tiles,
    *,
    by_key: bool,
    states: Any = None,
) -> dict[str, jax.Array]:
    """Returns lists of visible tiles and the program order; ``by_key``: lists of query blocks.

    ``states``: the blocks of a mask_mod, ``Mod.blocks``.
    """
    p, rules = problem, problem.rules
    sizes = (p.q_len, p.kv_len, tile.block_q, tile.block_kv)
    any_seen = all_seen = jnp.ones((), bool)
    if pattern is not None:
        any_seen, all_seen = in_tiles(jnp.asarray(pattern), _blocks(p), *sizes)
    if states is not None:
        seen, full = mask_mod_tiles(jnp.asarray(states), p.mask_mod_blocks, *sizes)
        any_seen, all_seen = any_seen & seen, all_seen & full
    if rules.arrays:
        seen, full = map(jnp.asarray, classify_blocks(mask.terms, *sizes))
        any_seen, all_seen = any_seen & seen, all_seen & full
    state = any_seen.astype(jnp.int8) + (any_seen & all_seen).astype(jnp.int8)
    lists = ListsLaunch(*state.shape[:2], sizes[:2], sizes[2:], rules.band, by_key)
    made = call(lists, state=state)
    rows, list_heads, blocks = made["counts"].shape
    heads, group = (p.kv_heads, p.group) if by_key else (p.heads, 1)
    order = OrderLaunch(rows, list_heads, heads, blocks, group, last_first(rules, by_key))
    return {"listed": made["listed"], **call(order, counts=made["counts"])}


def element_mask_for_lists(
    problem: Problem, pattern: jax.Array | None, dense: jax.Array | None, tile: Tiles
) -> tuple[dict[str, jax.Array], Block]:
    """Returns the mask that listed tiles need, as ``element_mask`` does or as words of bits."""
    sizes = (problem.q_len, problem.kv_len, tile.block_q, tile.block_kv)
    if pattern is None or inside_blocks(_blocks(problem), *sizes):
        return element_mask(problem, None, dense)
    rows, keys = _blocks(problem)
    first = np.arange(0, problem.kv_len, tile.block_kv)
    last = np.minimum(first + tile.block_kv, problem.kv_len) - 1
    spans = last // keys - first // keys  # blocks of a tile, less one
    if dense is not None or spans.max() >= BITS:
        return element_mask(problem, pattern, dense)
    xp = namespace(pattern)
    words: Any = 0
    for n in range(spans.max() + 1):
        seen = xp.take(pattern, np.minimum(first // keys + n, last // keys), axis=3)
        words = words | xp.where(seen & (spans >= n), np.int32(1 << n), np.int32(0))
    return {"mask": words}, (rows, keys, tile.block_kv)


def element_mask(
    problem: Problem, pattern: jax.Array | None, dense: jax.Array | None
) -> tuple[dict[str, jax.Array], Block]:
    """Returns the int8 mask operand, if there is one, and the rows and keys an element covers."""
    if pattern is None:
        return ({} if dense is None else {"mask": dense}), (1, 1, 0)
    blocks = _blocks(problem)
    if dense is None:
        return {"mask": pattern.astype(jnp.int8)}, (*blocks, 0)
    pairs = by_element(pattern, blocks, problem.q_len, problem.kv_len)
    return {"mask": dense * pairs.astype(jnp.int8)}, (1, 1, 0)


def _blocks(problem: Problem) -> BlockSizes:
    assert problem.pattern_blocks is not None
    return problem.pattern_blocks

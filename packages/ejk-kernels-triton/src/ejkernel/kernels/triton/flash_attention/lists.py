"""Sparse walks: a pattern of blocks and the mask as lists of tiles, made on the device.

The blocks of a pattern are part of its meaning, tiles are not. A tile inside one block is as the
block is; one that covers several is visited if any of them is, and then the pattern is an element
mask unless all are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.flash_attention.launch import Block, last_first
from ejkernel.kernels.triton.flash_attention.tiles import Tiles
from ejkernel.types.arrays import namespace
from ejkernel.types.attention.problem import Problem
from ejkernel.types.masks.classify import classify_blocks
from ejkernel.types.masks.mask_info import MaskInfo
from ejkernel.types.masks.pattern import Blocks, by_element, in_tiles, inside_blocks

BITS = 31  # of a word, without its sign


def walk_operands(
    problem: Problem, mask: MaskInfo, pattern: jax.Array | None, tile: Tiles, *, by_key: bool
) -> dict[str, jax.Array]:
    """The operands of a walk over the tiles that anybody sees. ``by_key``: over query blocks."""
    from ejkernel.kernels.triton.flash_attention.lists_kernel import ListsLaunch, OrderLaunch

    p, rules = problem, problem.rules
    sizes = (p.q_len, p.kv_len, tile.block_q, tile.block_kv)
    some = every = jnp.ones((), bool)
    if pattern is not None:
        some, every = in_tiles(jnp.asarray(pattern), _blocks(p), *sizes)
    if rules.arrays:
        seen, whole = map(jnp.asarray, classify_blocks(mask.terms, *sizes))
        some, every = some & seen, every & whole
    state = some.astype(jnp.int8) + (some & every).astype(jnp.int8)
    lists = ListsLaunch(*state.shape[:2], sizes[:2], sizes[2:], rules.band, by_key)
    made = call(lists, state=state)
    rows, list_heads, blocks = made["counts"].shape
    heads, group = (p.kv_heads, p.group) if by_key else (p.heads, 1)
    order = OrderLaunch(rows, list_heads, heads, blocks, group, last_first(rules, by_key))
    return {"listed": made["listed"], **call(order, counts=made["counts"])}


def mask_beside_walk(
    problem: Problem, pattern: jax.Array | None, dense: jax.Array | None, tile: Tiles
) -> tuple[dict[str, jax.Array], Block]:
    """What tiles of a walk need beside their list, as ``element_mask``, or as words of bits."""
    sizes = (problem.q_len, problem.kv_len, tile.block_q, tile.block_kv)
    if pattern is None or inside_blocks(_blocks(problem), *sizes):
        return element_mask(problem, None, dense)
    rows, keys = _blocks(problem)
    first = np.arange(0, problem.kv_len, tile.block_kv)
    last = np.minimum(first + tile.block_kv, problem.kv_len) - 1
    met = last // keys - first // keys  # blocks of a tile, less one
    if dense is not None or met.max() >= BITS:
        return element_mask(problem, pattern, dense)
    xp = namespace(pattern)
    words: Any = 0
    for n in range(met.max() + 1):
        seen = xp.take(pattern, np.minimum(first // keys + n, last // keys), axis=3)
        words = words | xp.where(seen & (met >= n), np.int32(1 << n), np.int32(0))
    return {"mask": words}, (rows, keys, tile.block_kv)


def element_mask(
    problem: Problem, pattern: jax.Array | None, dense: jax.Array | None
) -> tuple[dict[str, jax.Array], Block]:
    """The mask operand, int8, if there is one, and the rows and keys that an element covers."""
    if pattern is None:
        return ({} if dense is None else {"mask": dense}), (1, 1, 0)
    blocks = _blocks(problem)
    if dense is None:
        return {"mask": pattern.astype(jnp.int8)}, (*blocks, 0)
    pairs = by_element(pattern, blocks, problem.q_len, problem.kv_len)
    return {"mask": dense * pairs.astype(jnp.int8)}, (1, 1, 0)


def _blocks(problem: Problem) -> Blocks:
    assert problem.pattern_blocks is not None
    return problem.pattern_blocks

"""Sparse walks: a pattern of blocks and the mask as lists of tiles, made by XLA on the device.

A tile is visited if any block of the pattern that it meets is set and the mask shows a pair of it;
it needs an element mask unless all are. What a tile has of blocks smaller than itself is a word of
bits for 64 rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.types import MaskInfo
from ejkernel.types.arrays import namespace
from ejkernel.types.blocks import cdiv
from ejkernel.types.pattern import inside_blocks, visited_tiles
from ejkernel.types.problem import Problem

COUNTS = 2  # numbers before the blocks of a list: how many need no element mask, how many there are
GROUP = 16  # rows and keys of a bit
MASKED, TURN = 15, 16  # bits of a visit: needs an element mask; from here on, its turn
LIMIT = 2**15  # blocks of an axis that a visit can name


def refuse(problem: Problem) -> str | None:
    """Why a pattern of these blocks cannot be walked over, None if it can."""
    if problem.pattern_blocks is None:
        return None
    lengths = (problem.q_len, problem.kv_len)
    names = ("q_block_size", "kv_block_size")
    for name, block, length in zip(names, problem.pattern_blocks, lengths, strict=True):
        if block % GROUP and block < length:
            return f"{name}: blocks of {block} are not supported, only multiples of {GROUP}"
        if length >= LIMIT * 64:
            return f"{name}: an axis of {length} is too long, up to {LIMIT * 64 - 1} is supported"
    return None


def forward_lists(
    problem: Problem, mask: MaskInfo, pattern: Any, tile: tuple[int, int]
) -> dict[str, jax.Array]:
    """Operands of a walk over key blocks.

    lists int32 ``[#b, #h, query blocks, COUNTS + key blocks]``: blocks that need no element mask,
    then the others, either in rising order. A block of queries that sees nothing visits the block
    past the end. bits: see ``_bits``, with a column for the block past the end.
    """
    some, every = _tiles(problem, mask, pattern, tile)
    n = some.shape[-1]
    if problem.kv_len % tile[1]:
        every = every & (np.arange(n) < n - 1)
    xp = namespace(some, every)
    number = np.arange(n, dtype=np.int32)
    # a block's number, and n more for every reason to come later
    place = number + n * ((~every).astype(np.int32) + (~some).astype(np.int32))
    place = xp.sort(xp.where(some, place, np.int32(2 * n)), axis=-1)
    listed = xp.where(place >= 2 * n, np.int32(n), place % n)
    counts = [some & every, some]
    full, count = (x.sum(-1, keepdims=True, dtype=np.int32) for x in counts)
    lists = xp.concatenate([full, xp.maximum(count, 1), listed], axis=-1).astype(np.int32)
    operands = {"lists": jnp.asarray(lists)}
    if not _inside(problem, tile):
        bits = _bits(problem, pattern, tile[1], by_key=False)
        operands["bits"] = jnp.pad(bits, [(0, 0), (0, 0), (0, 0), (0, 1)])
    return operands


def backward_lists(
    problem: Problem, mask: MaskInfo, pattern: Any, tile: tuple[int, int], team: int | None
) -> dict[str, jax.Array]:
    """Operands of a walk over query blocks.

    lists int32 ``[#b, #h, key blocks, 1 + query blocks]``: how many visits, then the visits in
    their order: query block, ``MASKED``, turn. ``team``: see ``visit_times``. seen bool
    ``[#b, #h, query blocks]``: whether any key block visits. bits: see ``_bits``.
    """
    some, every = _tiles(problem, mask, pattern, tile)
    some, every = map(jnp.asarray, jnp.broadcast_arrays(some, every))
    n_q, n_kv = some.shape[-2:]
    time, order = visit_times(n_q, n_kv, team)
    back = np.argsort(order, axis=-1)
    lead = some.shape[:-2]
    at = lambda x: jnp.broadcast_to(x.astype(np.int32), (*lead, n_q, n_kv))  # noqa: E731
    ones = jnp.take_along_axis(some.astype(np.int32), at(order), axis=-1)
    turns = jnp.take_along_axis(jnp.cumsum(ones, axis=-1) - ones, at(back), axis=-1)
    visit = np.arange(n_q, dtype=np.int32)[:, None] + ((~every).astype(np.int32) << MASKED)
    visit = jnp.swapaxes(visit + (turns << TURN), -1, -2)
    some = jnp.swapaxes(some, -1, -2)
    time = jnp.where(some, time.T.astype(np.int32), np.int32(n_q))
    _, visits = lax.sort((time, visit), dimension=time.ndim - 1, num_keys=1)
    count = some.sum(-1, keepdims=True, dtype=np.int32)
    operands = {"lists": jnp.concatenate([count, visits], axis=-1), "seen": some.any(-2)}
    if not _inside(problem, tile):
        operands["bits"] = _bits(problem, pattern, tile[0], by_key=True)
    return operands


def visit_times(n_q: int, n_kv: int, team: int | None) -> tuple[np.ndarray, np.ndarray]:
    """When a key block meets a query block on its walk, int ``[n_q, n_kv]``, and the key blocks in
    their turns at each query block, likewise.

    ``team``: key blocks, from the first on, that walk round together; they start at different
    query blocks, so that few meet. None: all walk from the first query block to the last, and
    later key blocks come first.
    """
    i, j = np.arange(n_q)[:, None], np.arange(n_kv)[None]
    if team is None:
        time = np.broadcast_to(i, (n_q, n_kv))
        return time, np.broadcast_to(j[:, ::-1], (n_q, n_kv))
    time = (i - (j % team) * n_q // team) % n_q
    return time, np.argsort(j // team * n_q + time, axis=-1, kind="stable")


def _tiles(problem: Problem, mask: MaskInfo, pattern: Any, tile: tuple[int, int]) -> tuple:
    return visited_tiles(
        mask, pattern, problem.pattern_blocks, problem.q_len, problem.kv_len, *tile
    )


def _inside(problem: Problem, tile: tuple[int, int]) -> bool:
    assert problem.pattern_blocks is not None
    return inside_blocks(problem.pattern_blocks, problem.q_len, problem.kv_len, *tile)


def _bits(problem: Problem, pattern: Any, columns: int, *, by_key: bool) -> jax.Array:
    """What 64 rows have of the pattern in a tile of up to 128 columns, int32 ``[.., rows, tiles]``.

    A byte for 16 rows, a bit of it for 16 columns. Rows are queries; ``by_key``: keys.
    """
    assert problem.pattern_blocks is not None
    x = jnp.asarray(pattern)
    axes = zip((2, 3), problem.pattern_blocks, (problem.q_len, problem.kv_len), strict=True)
    for axis, block, length in axes:
        x = jnp.take(x, (np.arange(0, length, GROUP) // block).astype(np.int32), axis)
    if by_key:
        x = jnp.swapaxes(x, 2, 3)
    wide = columns // GROUP
    x = jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % 4), (0, -x.shape[3] % wide)])
    x = x.reshape(*x.shape[:2], x.shape[2] // 4, 4, cdiv(x.shape[3], wide), wide)
    place = 8 * np.arange(4)[:, None, None] + np.arange(wide)
    word = jnp.sum(x.astype(np.uint32) << place.astype(np.uint32), axis=(3, 5), dtype=np.uint32)
    return lax.bitcast_convert_type(word, np.int32)

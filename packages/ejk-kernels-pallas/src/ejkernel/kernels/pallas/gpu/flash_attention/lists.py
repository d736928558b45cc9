"""Lists of the tiles to visit, from a pattern of blocks and the mask.

A tile is visited if any block of the pattern that it meets is set and the mask shows a pair of it;
it needs an element mask unless all are. Blocks smaller than a tile are a word of bits for 64 rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.types import MaskInfo
from ejkernel.types.arrays import namespace
from ejkernel.types.attention.problem import Problem
from ejkernel.types.masks.blocks import cdiv
from ejkernel.types.masks.pattern import inside_blocks, visited_tiles

COUNTS = 2  # entries before the blocks of a list: count without an element mask, total count
BIT_ROWS = 16  # rows, and keys, that a bit of ``bits`` stands for
LIMIT = 2**15  # blocks of an axis that a visit can name; added where it needs an element mask
SOME, EVERY = 1, 2  # of a tile: any row sees it, every row sees all of it


def unsupported_reason(problem: Problem) -> str | None:
    """Returns the reason why a pattern of these blocks is not supported, None if it is."""
    if problem.pattern_blocks is None:
        return None
    lengths = (problem.q_len, problem.kv_len)
    names = ("q_block_size", "kv_block_size")
    for name, block, length in zip(names, problem.pattern_blocks, lengths, strict=True):
        if block % BIT_ROWS and block < length:
            return f"{name}: blocks of {block} are not supported, only multiples of {BIT_ROWS}"
        if length >= LIMIT * 64:
            return f"{name}: an axis of {length} is too long, up to {LIMIT * 64 - 1} is supported"
    return None


def forward_lists(
    problem: Problem, mask: MaskInfo, pattern: Any, tile: tuple[int, int]
) -> dict[str, Any]:
    """Returns the operands of a loop over key blocks.

    lists int32 ``[#b, #h, query blocks, COUNTS + key blocks]``: blocks that need no element mask,
    then the others, either in rising order. A block of queries that sees nothing visits the block
    past the end. bits: see ``_bits``, with a column for the block past the end.

    Where arrays are traced, tiles int8 ``[#b, #h, query blocks, key blocks]`` in place of lists,
    of which ``list_kernel`` makes them.
    """
    any_pair, all_pairs = _tiles(problem, mask, pattern, tile)
    n = any_pair.shape[-1]
    if problem.kv_len % tile[1]:
        all_pairs = all_pairs & (np.arange(n) < n - 1)
    operands: dict[str, Any] = {}
    if isinstance(any_pair, jax.Array) or isinstance(all_pairs, jax.Array):
        operands["tiles"] = _as_bits(any_pair, all_pairs)
    else:
        full, partial = any_pair & all_pairs, any_pair & ~all_pairs
        first, count = (x.sum(-1, keepdims=True, dtype=np.int32) for x in (full, any_pair))
        position = np.where(full, _count_before(full), first + _count_before(partial))
        empty = np.broadcast_to(np.int32(n), any_pair.shape)
        start = np.concatenate([first, np.maximum(count, 1), empty], axis=-1)
        operands["lists"] = _put(start, any_pair, position + COUNTS, np.arange(n, dtype=np.int32))
    if not _inside(problem, tile):
        bits = _bits(problem, pattern, *tile, by_key=False)
        operands["bits"] = namespace(bits).pad(bits, [(0, 0), (0, 0), (0, 0), (0, 1)])
    return operands


def backward_lists(
    problem: Problem, mask: MaskInfo, pattern: Any, tile: tuple[int, int]
) -> dict[str, Any]:
    """Returns the operands of a loop over query blocks.

    lists int32 ``[#b, #h, key blocks, 1 + query blocks]``: the number of visits, then the visits in
    rising order, the query block and LIMIT more if it needs an element mask. bits: see ``_bits``.
    Tiles in place of lists as there, ``[#b, #h, key blocks, query blocks]``.
    """
    any_pair, all_pairs = (x.swapaxes(-1, -2) for x in _tiles(problem, mask, pattern, tile))
    operands: dict[str, Any] = {}
    if isinstance(any_pair, jax.Array) or isinstance(all_pairs, jax.Array):
        operands["tiles"] = _as_bits(any_pair, all_pairs)
    else:
        visit = np.arange(any_pair.shape[-1], dtype=np.int32) + LIMIT * (~all_pairs).astype(
            np.int32
        )
        count = any_pair.sum(-1, keepdims=True, dtype=np.int32)
        start = np.concatenate([count, np.zeros(any_pair.shape, np.int32)], axis=-1)
        operands["lists"] = _put(start, any_pair, _count_before(any_pair) + 1, visit)
    if not _inside(problem, tile):
        operands["bits"] = _bits(problem, pattern, *tile[::-1], by_key=True)
    return operands


def _as_bits(any_pair: Any, all_pairs: Any) -> jax.Array:
    return jnp.where(any_pair, SOME + EVERY * jnp.asarray(all_pairs, jnp.int8), 0).astype(jnp.int8)


def _count_before(x: np.ndarray) -> np.ndarray:
    """Returns the number of set entries before each along the last axis, int32."""
    return np.cumsum(x, axis=-1, dtype=np.int32) - x


def _put(start: np.ndarray, is_set: np.ndarray, position: np.ndarray, values: Any) -> np.ndarray:
    """Returns ``start`` with values at their positions along the last axis where ``is_set``."""
    n = start.shape[-1]
    out = np.pad(start, [(0, 0)] * (start.ndim - 1) + [(0, 1)])
    values = np.broadcast_to(values, is_set.shape)
    np.put_along_axis(out, np.where(is_set, position, np.int32(n)), values, axis=-1)
    return out[..., :n]


def _tiles(problem: Problem, mask: MaskInfo, pattern: Any, tile: tuple[int, int]) -> tuple:
    if isinstance(pattern, jax.Array):
        # without this XLA would fold a constant pattern, and take seconds to sort it
        pattern = lax.optimization_barrier(pattern)
    return visited_tiles(
        mask, pattern, problem.pattern_blocks, problem.q_len, problem.kv_len, *tile
    )


def _inside(problem: Problem, tile: tuple[int, int]) -> bool:
    assert problem.pattern_blocks is not None
    return inside_blocks(problem.pattern_blocks, problem.q_len, problem.kv_len, *tile)


def _bits(problem: Problem, pattern: Any, rows: int, columns: int, *, by_key: bool) -> Any:
    """Returns the pattern of 64 rows in tiles of up to 128 columns, int32 ``[.., rows, tiles]``.

    A byte for 16 rows, a bit of it for 16 columns. Rows are queries; ``by_key``: keys. They are
    padded to full programs of ``rows`` each, because all warpgroups of a program read.
    """
    assert problem.pattern_blocks is not None
    xp, x = namespace(pattern), pattern
    axes = zip((2, 3), problem.pattern_blocks, (problem.q_len, problem.kv_len), strict=True)
    for axis, block, length in axes:
        x = xp.take(x, (np.arange(0, length, BIT_ROWS) // block).astype(np.int32), axis)
    if by_key:
        x = xp.swapaxes(x, 2, 3)
    wide = columns // BIT_ROWS
    x = xp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % (rows // BIT_ROWS)), (0, -x.shape[3] % wide)])
    x = x.reshape(*x.shape[:2], x.shape[2] // 4, 4, cdiv(x.shape[3], wide), wide)
    shift = 8 * np.arange(4)[:, None, None] + np.arange(wide)
    word = (x.astype(np.uint32) << shift.astype(np.uint32)).sum((3, 5), dtype=np.uint32)
    return lax.bitcast_convert_type(word, np.int32) if xp is jnp else word.view(np.int32)

"""Lists of a sparse walk whose pattern is known while tracing: what ``lists`` makes, in numpy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.triton.flash_attention.launch import last_first
from ejkernel.kernels.triton.flash_attention.tiles import Tiles
from ejkernel.types.attention.problem import Problem
from ejkernel.types.masks.mask_info import MaskInfo
from ejkernel.types.masks.pattern import visited_tiles


def walk_name(tile: Tiles, by_key: bool) -> str:
    """Walks over the same tiles along the same axis are one."""
    return f"{tile.block_q}x{tile.block_kv}" + (" by key" if by_key else "")


def known_walks(
    problem: Problem, mask: MaskInfo, pattern: np.ndarray, walks: Iterable[tuple[Tiles, bool]]
) -> dict[str, dict[str, jax.Array]]:
    """The operands of walks by their names; none where arrays of the mask are traced."""
    found = {}
    for tile, by_key in walks:
        walk = known_walk(problem, mask, pattern, tile, by_key=by_key)
        if walk is None:
            return {}
        found[walk_name(tile, by_key)] = {name: jnp.asarray(x) for name, x in walk.items()}
    return found


def known_walk(
    problem: Problem, mask: MaskInfo, pattern: np.ndarray, tile: Tiles, *, by_key: bool
) -> dict[str, np.ndarray] | None:
    """As ``walk_operands``; what the device leaves unwritten is 0."""
    p = problem
    sizes = (p.q_len, p.kv_len, tile.block_q, tile.block_kv)
    some, every = visited_tiles(mask, pattern, p.pattern_blocks, *sizes)
    if not (isinstance(some, np.ndarray) and isinstance(every, np.ndarray)):
        return None
    some, every = np.broadcast_arrays(some, every)
    if by_key:
        some, every = some.swapaxes(2, 3), every.swapaxes(2, 3)
    walked, block = (p.q_len, tile.block_q) if by_key else (p.kv_len, tile.block_kv)
    others = some.shape[-1]
    full = some & every & (np.arange(others) < walked // block)
    kind = some.astype(np.int32) + full  # a block that needs no mask comes first
    place = np.argsort(-kind, axis=-1, kind="stable")
    counts = some.sum(-1, dtype=np.int32)
    place = np.where(np.arange(others) < counts[..., None], place, 0)
    heads = np.stack([full.sum(-1), counts], axis=-1)
    rest = np.zeros((*counts.shape, 1))
    number = np.int16 if others < 2**15 else np.int32
    listed = np.concatenate([heads, place, rest], axis=-1).astype(number)
    return {"listed": listed, "order": _order(p, counts, by_key)}


def _order(problem: Problem, counts: np.ndarray, by_key: bool) -> np.ndarray:
    """As ``long_rows_first``."""
    p, (rows, list_heads, blocks) = problem, counts.shape
    heads = p.kv_heads if by_key else p.heads
    if list_heads > 1 and by_key:
        counts = counts.reshape(rows, heads, p.group, blocks).sum(2)
    steps: Any = np.broadcast_to(counts, (rows, heads, blocks))
    number = np.arange(heads * blocks).reshape(heads, blocks)
    if last_first(p.rules, by_key):
        steps, number = steps[..., ::-1], number[:, ::-1]
    steps = steps.reshape(rows, -1)
    limit = 2 * (steps.sum(1, keepdims=True) // (heads * blocks)) + 1
    return number.reshape(-1)[np.argsort(steps <= limit, axis=1, kind="stable")].astype(np.int32)

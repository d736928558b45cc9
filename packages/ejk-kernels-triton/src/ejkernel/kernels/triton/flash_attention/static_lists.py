"""Tile lists of a pattern that is known while tracing: the results of ``lists``, in numpy."""

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
from ejkernel.types.masks.pattern import mask_mod_tiles, visited_tiles


def list_key(tile: Tiles, by_key: bool) -> str:
    """Returns the key of the lists of a pass: passes with equal tiles and axis share them."""
    return f"{tile.block_q}x{tile.block_kv}" + (" by key" if by_key else "")


def build_static_lists(
    problem: Problem,
    mask: MaskInfo,
    pattern: np.ndarray | None,
    passes: Iterable[tuple[Tiles, bool]],
    states: np.ndarray | None = None,
) -> dict[str, dict[str, jax.Array]]:
    """Returns the list operands of every pass by key; empty if arrays of the mask are traced.

    ``states``: the blocks of a mask_mod.
    """
    operands = {}
    for tile, by_key in passes:
        arrays = build_static_list(problem, mask, pattern, tile, by_key=by_key, states=states)
        if arrays is None:
            return {}
        operands[list_key(tile, by_key)] = {name: jnp.asarray(x) for name, x in arrays.items()}
    return operands


def build_static_list(
    problem: Problem,
    mask: MaskInfo,
    pattern: np.ndarray | None,
    tile: Tiles,
    *,
    by_key: bool,
    states: np.ndarray | None = None,
) -> dict[str, np.ndarray] | None:
    """Returns the arrays of ``list_operands``, with 0 where the device writes nothing."""
    p = problem
    sizes = (p.q_len, p.kv_len, tile.block_q, tile.block_kv)
    any_seen, all_seen = visited_tiles(mask, pattern, p.pattern_blocks, *sizes)
    if not (isinstance(any_seen, np.ndarray) and isinstance(all_seen, np.ndarray)):
        return None
    if states is not None:
        met, full = mask_mod_tiles(states, p.mask_mod_blocks, *sizes)
        any_seen, all_seen = any_seen & met, all_seen & full
    any_seen, all_seen = np.broadcast_arrays(any_seen, all_seen)
    if by_key:
        any_seen, all_seen = any_seen.swapaxes(2, 3), all_seen.swapaxes(2, 3)
    length, block = (p.q_len, tile.block_q) if by_key else (p.kv_len, tile.block_kv)
    others = any_seen.shape[-1]
    full = any_seen & all_seen & (np.arange(others) < length // block)
    state = any_seen.astype(np.int32) + full  # blocks that need no mask come first
    indices = np.argsort(-state, axis=-1, kind="stable")
    counts = any_seen.sum(-1, dtype=np.int32)
    indices = np.where(np.arange(others) < counts[..., None], indices, 0)
    header = np.stack([full.sum(-1), counts], axis=-1)
    padding = np.zeros((*counts.shape, 1))
    dtype = np.int16 if others < 2**15 else np.int32
    listed = np.concatenate([header, indices, padding], axis=-1).astype(dtype)
    return {"listed": listed, "order": _order(p, counts, by_key)}


def _order(problem: Problem, counts: np.ndarray, by_key: bool) -> np.ndarray:
    """Returns the program order of ``long_rows_first``."""
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

"""Masks on a TPU: scalar arithmetic on blocks, vector masks of tiles.

A kernel loops over the blocks of one side that a block of the other side, the outer one, can see.
Values per token (segment ids, chunk indices, positions) come as pairs of rows
``[1, tokens]``; those along the sublanes of a tile are spread to columns of equal lanes first, so
that a comparison is one operation a register.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.pallas.tpu.common.chip import LANES
from ejkernel.types.masks.mask_info import MaskInfo
from ejkernel.types.masks.pattern import BlockSizes, visited_tiles
from ejkernel.types.masks.structure import (
    Band,
    Unsupported,
    operands,
    split_mask,
    static_block_ranges,
)

# Padding of the two sides of an equality: never equal to an id, nor to each other.
_NO_QUERY, _NO_KEY = -1, -2


@dataclass(frozen=True)
class TileRules:
    """The static part of a mask, as kernels read it.

    Attributes:
        band: bounds of key - query by index. position_band: by positions of the caller.
        pairs: names of the value pairs, in operand order: "ids", "padding", "chunks",
            "positions"; all but positions are compared for equality.
        q_len, kv_len: lengths; tokens past them are padding.
    """

    band: Band
    position_band: Band
    pairs: tuple[str, ...]
    q_len: int
    kv_len: int


def _chunk_indices(
    arrays: dict[str, Any], chunk: tuple[int, int], q_len: int, kv_len: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the chunks of queries and keys, of which a query sees its own, int32, at least 0."""
    size, offset = chunk
    q = arrays.get("q_positions", jnp.arange(q_len, dtype=jnp.int32)[None])
    kv = arrays.get("kv_positions", jnp.arange(kv_len, dtype=jnp.int32)[None])
    # indices may be negative; only equality counts, so they are moved above the padding
    q, kv = jnp.floor_divide(q + offset, size), jnp.floor_divide(kv, size)
    least = jnp.minimum(q.min(), kv.min())
    return q - least, kv - least


def tile_rules(
    mask: MaskInfo, q_len: int, kv_len: int
) -> tuple[TileRules, dict[str, tuple[jax.Array, jax.Array]]]:
    """Returns a canonical mask as rules and pairs of int32 ``[#b, q]``, ``[#b, k]`` by name.

    Raises:
        Unsupported: what ``split_mask`` refuses, and a dense mask.
    """
    rules, arrays = split_mask(mask)
    padding = arrays.pop("mask", None)
    if padding is not None and padding.shape[1:3] != (1, 1):
        raise Unsupported(
            "attention_mask: a dense [q, k] mask is not supported; give its structure (causal, "
            "window, segment ids) in mask_info"
        )
    token_values = operands(mask, arrays, q_len, kv_len)
    pairs: dict[str, tuple[jax.Array, jax.Array]] = {}
    if "q_ids" in token_values:
        q, kv = token_values["q_ids"], token_values["kv_ids"]
        pairs["ids"] = jnp.where(q < 0, _NO_QUERY, q), jnp.where(kv < 0, _NO_KEY, kv)
    if padding is not None:
        kv = jnp.where(jnp.asarray(padding)[:, 0, 0] != 0, 0, _NO_KEY)
        kv = jnp.broadcast_to(kv, (kv.shape[0], kv_len)).astype(jnp.int32)
        pairs["padding"] = jnp.zeros((kv.shape[0], q_len), jnp.int32), kv
    if rules.chunk is not None:
        pairs["chunks"] = _chunk_indices(token_values, rules.chunk, q_len, kv_len)
    if "q_positions" in token_values and not rules.position_band.empty:
        pairs["positions"] = token_values["q_positions"], token_values["kv_positions"]
    return TileRules(rules.band, rules.position_band, tuple(pairs), q_len, kv_len), pairs


@dataclass(frozen=True)
class VisitedBlocks:
    """Blocks that a kernel visits for each outer block.

    Attributes:
        table: int32 ``[#b * outer_blocks * 4]``: start, full_start, full_stop, stop of each; where
            blocks are listed ``[#b * #h * outer_blocks * (1 + steps)]``: their count, and twice the
            number of each, plus one where no element mask is needed.
        rows, heads: batch rows and query heads of the table, 1 or all.
        steps: most blocks visited for one outer block.
        has_full, has_partial: whether tiles without and with an element mask may occur.
        listed: whether the blocks are lists.
    """

    table: jax.Array | np.ndarray
    rows: int
    steps: int
    has_full: bool = True
    has_partial: bool = True
    heads: int = 1
    listed: bool = False

    @property
    def static_flags(self) -> tuple[int, int, bool, bool, int, bool]:
        """All but the table, in the order of the fields of ``Layout``."""
        flags = self.rows, self.steps, self.has_full, self.has_partial
        return (*flags, self.heads, self.listed)


def visited_blocks(
    mask: MaskInfo,
    rules: TileRules,
    block_q: int,
    block_kv: int,
    *,
    transposed: bool,
    masks_last_outer: bool = False,
) -> VisitedBlocks:
    """Returns the block ranges of a mask.

    Steps and flags are exact where the mask has no traced arrays, else upper bounds.

    ``transposed``: blocks of keys are the outer ones. ``masks_last_outer``: every tile of the last
    outer block needs an element mask.
    """
    q_len, kv_len = rules.q_len, rules.kv_len
    blocks = (block_q, block_kv)
    ranges = static_block_ranges(mask, q_len, kv_len, *blocks, transposed=transposed)[:, 0]
    if masks_last_outer:
        is_last = np.arange(ranges.shape[1])[:, None] == ranges.shape[1] - 1
        is_full_range = np.array([False, True, True, False])
        xp: Any = jnp if isinstance(ranges, jax.Array) else np
        ranges = xp.where(is_last & is_full_range, 0, ranges)
    table, rows = ranges.reshape(-1), ranges.shape[0]
    if isinstance(ranges, jax.Array):
        return VisitedBlocks(
            table, rows, -(-q_len // block_q) if transposed else -(-kv_len // block_kv)
        )
    start, full_start, full_stop, stop = np.moveaxis(ranges, -1, 0)
    full, steps = np.maximum(full_stop - full_start, 0), stop - start
    return VisitedBlocks(
        table, rows, max(int(steps.max()), 1), bool(full.any()), bool((steps > full).any())
    )


def block_lists(
    mask: MaskInfo,
    pattern: Any,
    blocks: BlockSizes | None,
    rules: TileRules,
    tiles: BlockSizes,
    *,
    transposed: bool,
    masks_last_outer: bool = False,
) -> Any:
    """Returns int32 ``[#b, #h, outer_blocks, 1 + steps]``, as ``VisitedBlocks`` has them.

    numpy, with as few steps as suffice, where the mask and the pattern are. Options as in
    ``visited_blocks``.
    """
    lengths = rules.q_len, rules.kv_len
    visible_tiles, full_tiles = visited_tiles(mask, pattern, blocks, *lengths, *tiles)
    if transposed:
        visible_tiles, full_tiles = visible_tiles.swapaxes(2, 3), full_tiles.swapaxes(2, 3)
    length, block = (rules.q_len, tiles[0]) if transposed else (rules.kv_len, tiles[1])
    # a last block may be cut
    is_whole = np.arange(visible_tiles.shape[-1]) < length // block
    full_tiles = full_tiles & is_whole.reshape((1,) * (full_tiles.ndim - 1) + (-1,))
    if masks_last_outer:
        outer_blocks = visible_tiles.shape[-2]
        is_before_last = np.arange(outer_blocks) < outer_blocks - 1
        full_tiles = full_tiles & is_before_last.reshape((1,) * (full_tiles.ndim - 2) + (-1, 1))
    is_known = isinstance(visible_tiles, np.ndarray) and isinstance(full_tiles, np.ndarray)
    xp: Any = np if is_known else jnp
    order = xp.argsort(~visible_tiles, axis=-1, stable=True)
    full_tiles = xp.broadcast_to(full_tiles, visible_tiles.shape)
    items = 2 * order + xp.take_along_axis(full_tiles, order, axis=-1).astype(order.dtype)
    count = visible_tiles.sum(axis=-1, keepdims=True)
    if is_known:
        items = items[..., : max(int(count.max(initial=0)), 1)]
    return xp.concatenate([count, items], axis=-1).astype(np.int32)


def visited_of_lists(lists: jax.Array | np.ndarray) -> VisitedBlocks:
    """Returns the visited blocks of ``block_lists``."""
    rows, heads, _, entries = lists.shape
    return VisitedBlocks(lists.reshape(-1), rows, entries - 1, heads=heads, listed=True)


def column(row: jax.Array) -> jax.Array:
    """Returns a row ``[1, n]`` as ``[n, 128]``, each value along all lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def spread_columns(rows: Sequence[Any], columns: Sequence[Any]) -> None:
    """Stores rows ``[1, 1, n]`` as columns ``[n, 128]``: once for a block, not for each tile."""
    for row, spread in zip(rows, columns, strict=True):
        spread[...] = column(row[0])


def fit(x: jax.Array, width: int) -> jax.Array:
    """Returns ``[n, 128]`` of equal lanes as ``[n, width]``: registers are reused, nothing moves.

    ``width`` is below 128 or a multiple of it.
    """
    if width < LANES:
        return x[:, :width]
    return x if width == LANES else jnp.concatenate([x] * (width // LANES), axis=1)


def finite(x: jax.Array) -> jax.Array:
    """Returns ``x``, float32, with zeros for infinities and NaN."""
    return jnp.where(jnp.abs(x) < jnp.inf, x, 0.0)


def touches(rules: TileRules, first_q: Any, first_kv: Any, q: int, kv: int) -> Any:
    """Returns whether a tile meets the band and the lengths; scalar.

    The tile has ``q`` queries starting at ``first_q`` and ``kv`` keys starting at ``first_kv``.
    """
    meets = (first_q < rules.q_len) & (first_kv < rules.kv_len)
    distance = first_kv - first_q
    if rules.band.lo is not None:
        meets &= distance + kv - 1 >= rules.band.lo
    if rules.band.hi is not None:
        meets &= distance - q + 1 <= rules.band.hi
    return meets


def visible(
    rules: TileRules,
    shape: tuple[int, int],
    first_q: Any,
    first_kv: Any,
    columns: tuple[jax.Array, ...],
    rows: tuple[jax.Array, ...],
    *,
    queries_on_lanes: bool,
    check_queries: bool,
    check_keys: bool,
) -> jax.Array:
    """Returns the element mask of a tile.

    Queries lie along sublanes and keys along lanes, or the reverse (``queries_on_lanes``).
    ``columns`` ``[n, 128]`` are the pairs' values along sublanes, ``rows`` ``[1, m]`` those along
    lanes. ``check_queries``, ``check_keys``: whether tokens past this length are hidden.
    """
    sublane, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    i, j = (lane, sublane) if queries_on_lanes else (sublane, lane)
    seen: list[jax.Array] = []
    if not rules.band.empty:
        distance, shift = j - i, first_kv - first_q
        if rules.band.lo is not None:
            seen.append(distance >= rules.band.lo - shift)
        if rules.band.hi is not None:
            seen.append(distance <= rules.band.hi - shift)
    if check_queries:
        seen.append(i < rules.q_len - first_q)
    if check_keys:
        seen.append(j < rules.kv_len - first_kv)
    for name, along_sublanes, along_lanes in zip(rules.pairs, columns, rows, strict=True):
        along_sublanes = fit(along_sublanes, shape[1])
        if name != "positions":
            seen.append(along_sublanes == along_lanes)
            continue
        distance = along_lanes - along_sublanes  # key - query
        if queries_on_lanes:
            distance = along_sublanes - along_lanes
        if rules.position_band.lo is not None:
            seen.append(distance >= rules.position_band.lo)
        if rules.position_band.hi is not None:
            seen.append(distance <= rules.position_band.hi)
    result = seen[0]
    for test in seen[1:]:
        result &= test
    return result

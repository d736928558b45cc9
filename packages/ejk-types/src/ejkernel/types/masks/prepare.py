"""Masks for blockwise kernels: tiles, and ranges of blocks to visit."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ejkernel.types.arrays import arange, as_bool, length, namespace
from ejkernel.types.masks.blocks import (
    BlockRange,
    cdiv,
    dynamic_block,
    matrix_range,
    pad_to,
    structural_ranges,
)
from ejkernel.types.masks.classify import classify_blocks
from ejkernel.types.masks.fields import M, MaskFields, check_sizes, per_head, with_private
from ejkernel.types.masks.hidden import seen_keys
from ejkernel.types.masks.rules import both


class _Static:
    """Numpy arrays as hashable static data, so that ranges survive a jit boundary."""

    __slots__ = ("arrays", "key")

    def __init__(self, *arrays: np.ndarray) -> None:
        self.arrays = arrays
        self.key = tuple((a.shape, a.tobytes()) for a in arrays)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class Tiling(NamedTuple):
    """Lengths of the two axes and of their blocks."""

    q_len: int
    kv_len: int
    block_q: int
    block_kv: int

    @property
    def num_q(self) -> int:
        return cdiv(self.q_len, self.block_q)

    @property
    def num_kv(self) -> int:
        return cdiv(self.kv_len, self.block_kv)


def entry_at(values: Any, number: Any) -> Any:
    """Returns the entry of a block: an int where both are known, else int32 ``[]``."""
    if isinstance(values, np.ndarray):
        if isinstance(number, (int, np.integer)):
            return int(values[number])
        values = jnp.asarray(values)
    return values[number]


class PreparedMask:
    """A mask cut into blocks of ``block_q`` queries and ``block_kv`` keys. Made by prepare_mask.

    A pytree: arrays (padded to whole blocks) are leaves, ranges that depend on static structure
    alone are static data. Block indices may be Python ints or traced; with Python ints and a
    static structure the ranges are Python ints.
    """

    __slots__ = ("by_key", "by_query", "terms", "tiling")

    def __init__(
        self,
        tiling: Tiling,
        terms: tuple[MaskFields, ...],
        by_query: BlockRange,
        by_key: BlockRange,
    ) -> None:
        self.tiling, self.terms, self.by_query, self.by_key = tiling, terms, by_query, by_key

    @property
    def has_tail(self) -> bool:
        """True if a length is not a multiple of its block."""
        t = self.tiling
        return t.q_len % t.block_q != 0 or t.kv_len % t.block_kv != 0

    @property
    def needs_tile(self) -> bool:
        """False if every pair of every block is visible, so that ``tile`` is always None."""
        return bool(self.terms) or self.has_tail

    @property
    def is_static(self) -> bool:
        """True if the ranges are numpy arrays."""
        return isinstance(self.by_query.start, np.ndarray)

    def kv_range(self, qi: Any) -> tuple[Any, Any]:
        """Half-open range of key blocks that query block ``qi`` must visit, for any batch row.

        Python ints or int32 ``[]``; an empty range has start == stop.
        """
        return entry_at(self.by_query.start, qi), entry_at(self.by_query.stop, qi)

    def q_range(self, ki: Any) -> tuple[Any, Any]:
        """Half-open range of query blocks that key block ``ki`` must visit."""
        return entry_at(self.by_key.start, ki), entry_at(self.by_key.stop, ki)

    def kv_full_range(self, qi: Any) -> tuple[Any, Any]:
        """Part of ``kv_range`` whose tiles are visible as a whole: they need no element mask."""
        return entry_at(self.by_query.full_start, qi), entry_at(self.by_query.full_stop, qi)

    def q_full_range(self, ki: Any) -> tuple[Any, Any]:
        """Part of ``q_range`` whose tiles are visible as a whole: they need no element mask."""
        return entry_at(self.by_key.full_start, ki), entry_at(self.by_key.full_stop, ki)

    def tile_needed(self, qi: Any, ki: Any) -> Any:
        """False if the tile is known to be visible as a whole; bool or traced bool."""
        if not self.needs_tile:
            return False
        start, stop = self.kv_full_range(qi)
        if isinstance(start, int) and isinstance(ki, (int, np.integer)):
            return not start <= ki < stop
        return (ki < start) | (ki >= stop)

    def seen_keys(self) -> Any:
        """Keys that some query may see, bool ``[#b, #kv_len]``; None if all are."""
        return seen_keys(self.terms, self.tiling.q_len, self.tiling.kv_len)

    def _tail(self, qi: Any, ki: Any) -> Any:
        t, tail, xp = self.tiling, None, namespace(qi, ki, self.tiling.q_len, self.tiling.kv_len)
        if t.q_len % t.block_q:
            rows = qi * t.block_q + xp.arange(t.block_q, dtype=np.int32)
            tail = (rows < t.q_len)[None, None, :, None]
        if t.kv_len % t.block_kv:
            keys = ki * t.block_kv + xp.arange(t.block_kv, dtype=np.int32)
            tail = both(tail, (keys < t.kv_len)[None, None, None, :])
        return tail

    def tile(self, qi: Any, ki: Any) -> Any:
        """Visibility bool ``[#b, #h, block_q, block_kv]`` of one tile, or None.

        None only where no tile of this mask can need masking. Rows and keys past the lengths are
        invisible.
        """
        t, result = self.tiling, self._tail(qi, ki)
        for term in self.terms:
            result = both(result, _tile_of(term, t, qi, ki))
        if result is None:
            return None
        xp = namespace(result)
        return xp.broadcast_to(result, (*result.shape[:2], t.block_q, t.block_kv))


def _tile_of(term: MaskFields, t: Tiling, qi: Any, ki: Any) -> Any:
    result, xp = None, namespace(qi, ki, t.block_q, t.block_kv)

    def rows(x: Any) -> Any:
        return dynamic_block(per_head(x), 2, qi, t.block_q)[..., :, None]

    def keys(x: Any) -> Any:
        return dynamic_block(per_head(x), 2, ki, t.block_kv)[..., None, :]

    if term.attention_mask is not None:
        result = term.attention_mask
        if result.shape[2] != 1 or t.q_len == 1:
            result = dynamic_block(result, 2, qi, t.block_q)
        if result.shape[3] != 1 or t.kv_len == 1:
            result = dynamic_block(result, 3, ki, t.block_kv)
    if term.q_segment_ids is not None:
        ids = rows(term.q_segment_ids)
        result = both(result, (ids == keys(term.kv_segment_ids)) & (ids >= 0))
    if not term.rule.trivial:
        index_q = xp.arange(t.block_q, dtype=np.int32)[None, None, :, None]
        index_kv = xp.arange(t.block_kv, dtype=np.int32)[None, None, None, :]
        p = qi * t.block_q + index_q if term.q_positions is None else rows(term.q_positions)
        r = ki * t.block_kv + index_kv if term.kv_positions is None else keys(term.kv_positions)
        result = both(result, term.rule.visible(p, r))
    return result


def _flatten(mask: PreparedMask):
    if mask.is_static:
        return (mask.terms, None, None), (mask.tiling, _Static(*mask.by_query, *mask.by_key))
    return (mask.terms, mask.by_query, mask.by_key), (mask.tiling, None)


def _unflatten(static: Any, children: Any) -> PreparedMask:
    tiling, ranges = static
    terms, by_query, by_key = children
    if ranges is not None:
        by_query, by_key = BlockRange(*ranges.arrays[:4]), BlockRange(*ranges.arrays[4:])
    new = object.__new__(PreparedMask)
    PreparedMask.__init__(new, tiling, terms, by_query, by_key)
    return new


def _flatten_with_keys(mask: PreparedMask):
    children, static = _flatten(mask)
    names = ("terms", "by_query", "by_key")
    return tuple((jtu.GetAttrKey(n), c) for n, c in zip(names, children, strict=True)), static


jtu.register_pytree_with_keys(PreparedMask, _flatten_with_keys, _unflatten, _flatten)


def _padded(term: M, t: Tiling) -> M:
    q, kv = t.num_q * t.block_q, t.num_kv * t.block_kv
    dense = term.attention_mask
    if dense is not None:
        dense = as_bool(dense)
        if dense.shape[2] == t.q_len:
            dense = pad_to(dense, 2, q, False)
        if dense.shape[3] == t.kv_len:
            dense = pad_to(dense, 3, kv, False)

    def pad(x: Any, length: int, value: int) -> Any:
        return None if x is None else pad_to(x, x.ndim - 1, length, value)

    return with_private(
        term,
        attention_mask=dense,
        q_segment_ids=pad(term.q_segment_ids, q, -1),
        kv_segment_ids=pad(term.kv_segment_ids, kv, -1),
        q_positions=None if term.rule.trivial else pad(term.q_positions, q, 0),
        kv_positions=None if term.rule.trivial else pad(term.kv_positions, kv, 0),
        _broadcast=True,
    )


def _constrains(term: MaskFields) -> bool:
    return not (term.rule.trivial and term.attention_mask is None and term.q_segment_ids is None)


def _index_only(term: MaskFields) -> bool:
    arrays = (term.attention_mask, term.q_segment_ids, term.q_positions, term.kv_positions)
    return all(x is None for x in arrays)


def prepare_mask(
    mask: MaskFields, *, q_len: int, kv_len: int, block_q: int, block_kv: int
) -> PreparedMask:
    """``mask`` for a kernel that works on tiles of ``block_q`` queries and ``block_kv`` keys.

    Purely structural masks and masks over numpy arrays give numpy ranges (usable as static loop
    bounds); masks over traced arrays give traced ranges. Ranges are conservative: a block outside
    them holds no visible pair in any batch row or head. O(nq*nk) work on blocks for masks that
    depend on arrays, O(nq + nk) for purely structural ones.

    Args:
        mask: of the call.
        q_len, kv_len: lengths of the call, zero allowed.
        block_q, block_kv: at least 1.

    Raises:
        InvalidArgument: an array of ``mask_info`` has another length.
    """
    tiling = Tiling(
        length(q_len, "q_len"),
        length(kv_len, "kv_len"),
        length(block_q, "block_q", low=1),
        length(block_kv, "block_kv", low=1),
    )
    check_sizes(mask, None, q_len, kv_len, None, "mask_info")
    terms = tuple(term for term in mask.terms if _constrains(term))
    structural = [term.rule for term in terms if _index_only(term)]
    by_query, by_key = structural_ranges(structural, *tiling)
    if len(structural) < len(terms):
        valued = tuple(term for term in terms if not _index_only(term))
        any_, all_ = classify_blocks(valued, *tiling)
        by_query, by_key = _intersected(tiling, any_, all_, by_query, by_key)
    return PreparedMask(tiling, tuple(_padded(term, tiling) for term in terms), by_query, by_key)


def _inside(index: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    index = index[None, :]
    return (index >= start[:, None]) & (index < stop[:, None])


def _intersected(
    tiling: Tiling, any_: Any, all_: Any, by_query: BlockRange, by_key: BlockRange
) -> tuple[BlockRange, BlockRange]:
    """Ranges where the block matrices and the structural ranges both allow."""
    xp = namespace(any_, tiling.num_q, tiling.num_kv)
    any_, all_ = any_.any(axis=(0, 1)), all_.all(axis=(0, 1))
    keys = arange(tiling.num_kv)
    any_ = any_ & _inside(keys, by_query.start, by_query.stop)
    all_ = all_ & _inside(keys, by_query.full_start, by_query.full_stop)
    return matrix_range(xp, any_, all_), matrix_range(xp, any_.T, all_.T)

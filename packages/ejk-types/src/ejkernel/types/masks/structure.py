"""A MaskInfo as kernels read it: bands, ids, positions, a dense mask, block ranges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.arrays import as_bool
from ejkernel.types.masks.blocks import matrix_range
from ejkernel.types.masks.classify import classify_blocks
from ejkernel.types.masks.fields import has_positions
from ejkernel.types.masks.mask_info import MaskInfo

LISTED = (
    "tiles that nobody sees are skipped, wherever they are: the mask is made into lists of tiles, "
    "on the device"
)
HULL = (
    "tiles before the first and after the last that a block of rows sees are skipped, those "
    "between are computed: the mask is made into ranges of tiles, on the device"
)


class Unsupported(NotImplementedError):
    """Raised where a kernel cannot do a call; the message says why."""


@dataclass(frozen=True)
class Band:
    """lo <= key - query <= hi; None is no bound."""

    lo: int | None = None
    hi: int | None = None

    @property
    def empty(self) -> bool:
        return self.lo is None and self.hi is None

    def key_bounds(self, query: Any) -> tuple[Any, Any]:
        """The first and the last key that a query sees, as ``Rule.key_bounds``."""
        lo, hi = (x if x is None else query + x for x in (self.lo, self.hi))
        return lo, hi

    def query_bounds(self, key: Any) -> tuple[Any, Any]:
        """The first and the last query that sees a key."""
        lo, hi = (x if x is None else key - x for x in (self.hi, self.lo))
        return lo, hi

    def narrowed(self, lo: int | None, hi: int | None) -> Band:
        """The intersection with another band."""
        los = [x for x in (self.lo, lo) if x is not None]
        his = [x for x in (self.hi, hi) if x is not None]
        return Band(max(los) if los else None, min(his) if his else None)


@dataclass(frozen=True)
class Rules:
    """The static part of a mask.

    Attributes:
        band: by array index. position_band: by given positions.
        chunk: (size, offset); on positions when those are given.
        arrays: whether anything depends on values (then block ranges are an operand).
        names: the arrays, as ``split_mask`` names them.
    """

    band: Band = field(default_factory=Band)
    position_band: Band = field(default_factory=Band)
    chunk: tuple[int, int] | None = None
    arrays: bool = False
    names: tuple[str, ...] = ()


def split_mask(mask: MaskInfo) -> tuple[Rules, dict[str, Any]]:
    """The rules and the arrays of a canonical mask.

    Raises:
        Unsupported: more than one set of segment ids, of positions, or of dense masks; ids that
            differ between heads.
    """
    band, position_band = Band(), Band()
    arrays: dict[str, Any] = {}

    def add(kind: str, **new: Any) -> None:
        if new.keys() & arrays.keys():
            raise Unsupported(f"mask_info: more than one {kind}")
        arrays.update(new)

    for term in mask.terms:
        if term.q_segment_ids is not None:
            add("set of segment ids", q_ids=term.q_segment_ids, kv_ids=term.kv_segment_ids)
        if term.attention_mask is not None:
            add("dense mask", mask=term.attention_mask)
        rule = term.rule
        if rule.trivial:
            continue
        lo, hi = rule.low_distance, rule.high_distance
        if has_positions(term):
            add("set of positions", q_positions=term.q_positions, kv_positions=term.kv_positions)
            position_band = Band(lo, hi)
        else:
            band = band.narrowed(lo, hi)
    chunked = [term for term in mask.terms if term.chunk_size is not None]
    by_index = bool(chunked) and chunked[0].q_positions is None
    if len(chunked) > 1 or (by_index and "q_positions" in arrays):
        raise Unsupported("mask_info: chunks of two kinds, or chunks beside other positions")
    if any(getattr(a, "ndim", 2) == 3 for a in arrays.values()):
        raise Unsupported("mask_info: segment ids or positions that differ between heads")
    chunk = (chunked[0].chunk_size, chunked[0].causal_offset) if chunked else None
    # a chunk by index is static, but its blocks are found with the arrays
    reads_arrays = bool(arrays) or bool(chunked)
    return Rules(band, position_band, chunk, reads_arrays, tuple(arrays)), arrays


def operands(
    mask: MaskInfo, arrays: dict[str, Any], q_len: int, kv_len: int
) -> dict[str, jax.Array]:
    """The arrays of ``split_mask`` as kernels read them.

    ids and positions int32 ``[#b, len]``; a dense mask int8 ``[#b, #h, q, k]``.
    """
    out: dict[str, jax.Array] = {}
    for name, value in arrays.items():
        if name == "mask":
            full = (*value.shape[:2], q_len, kv_len)
            out[name] = jnp.broadcast_to(as_bool(jnp.asarray(value)), full).astype(jnp.int8)
            continue
        length = q_len if name.startswith("q_") else kv_len
        if value is None:
            value = np.arange(length, dtype=np.int32)[None]
        out[name] = jnp.asarray(value, jnp.int32)
    for pair in (("q_ids", "kv_ids"), ("q_positions", "kv_positions")):
        if pair[0] in out:
            rows = max(out[name].shape[0] for name in pair)
            for name in pair:
                out[name] = jnp.broadcast_to(out[name], (rows, out[name].shape[1]))
    return out


def block_ranges(
    mask: MaskInfo, q_len: int, kv_len: int, block_q: int, block_kv: int, *, transposed: bool
) -> jax.Array:
    """Blocks to visit, int32 ``[#b, #h, blocks, 4]``: start, full_start, full_stop, stop.

    Key blocks for each query block; ``transposed``: query blocks for each key block. A last block
    that is cut is never full along the axis of the ranges.
    """
    return jnp.asarray(
        static_block_ranges(mask, q_len, kv_len, block_q, block_kv, transposed=transposed)
    )


def static_block_ranges(
    mask: MaskInfo, q_len: int, kv_len: int, block_q: int, block_kv: int, *, transposed: bool
) -> Any:
    """Returns ``block_ranges`` in numpy where the mask has no traced arrays."""
    any_, all_ = classify_blocks(mask.terms, q_len, kv_len, block_q, block_kv)
    traced = isinstance(any_, jax.Array) or isinstance(all_, jax.Array)
    xp = jnp if traced else np
    if transposed:
        any_, all_ = xp.swapaxes(any_, -1, -2), xp.swapaxes(all_, -1, -2)
    length, block = (q_len, block_q) if transposed else (kv_len, block_kv)
    if length % block:
        inside = np.arange(any_.shape[-1]) < length // block
        all_ = all_ & xp.broadcast_to(inside, all_.shape)
    any_, all_ = xp.broadcast_arrays(any_, all_)
    return matrix_range(xp, any_, all_ & any_).table(xp)

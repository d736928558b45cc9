"""Block arithmetic: which key blocks a query block must visit, and which need no element mask.

``Rule``s over array indices are solved in closed form by ``structural_ranges``, on numpy. Rules
that depend on values (ids, positions, dense masks) are decided per pair of blocks from the least
and the largest value in each block, on numpy or traced arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.arrays import arange, is_numpy, is_symbolic, namespace
from ejkernel.types.masks.rules import largest, smallest

INT_MAX = 2**31 - 1


def cdiv(a: Any, b: int) -> Any:
    """``a / b`` rounded up."""
    return -(-a // b)


class Bounds(Protocol):
    """Interface of a rule over array indices: a ``Rule`` or a ``Band``."""

    def key_bounds(self, p: Any, /) -> tuple[Any, Any]: ...

    def query_bounds(self, r: Any, /) -> tuple[Any, Any]: ...


class BlockRange(NamedTuple):
    """Half-open ranges of block indices for each block of the other axis, each ``[blocks]``.

    ``start <= full_start <= full_stop <= stop``. Blocks outside ``[start, stop)`` are invisible,
    blocks in ``[full_start, full_stop)`` hold visible pairs only and lie wholly inside the arrays.
    """

    start: Any
    stop: Any
    full_start: Any
    full_stop: Any

    def table(self, xp: ModuleType) -> Any:
        """int32 ``[..., blocks, 4]``: start, full_start, full_stop, stop."""
        ends = (self.start, self.full_start, self.full_stop, self.stop)
        return xp.stack([xp.asarray(x) for x in ends], axis=-1).astype(np.int32)


def block_bounds(length: Any, block: int) -> tuple[Any, Any]:
    """First and last existing index of every block."""
    count = cdiv(length, block)
    if is_symbolic(length):
        first = jnp.arange(count, dtype=np.int32) * block
        return first, jnp.minimum(first + block, length) - 1
    first = np.arange(count, dtype=np.int64) * block
    return first, np.minimum(first + block, length) - 1


def _range_of(rules: Sequence[Bounds], transposed: bool, rows, cols) -> BlockRange:
    (length, block), (other, other_block) = rows, cols
    first, last = block_bounds(length, block)
    xp = namespace(first, other)
    lo = full_lo = xp.zeros_like(first)
    hi = full_hi = xp.zeros_like(first) + (other - 1)
    for rule in rules:
        bounds = rule.query_bounds if transposed else rule.key_bounds
        (lo_first, hi_first), (lo_last, hi_last) = bounds(first), bounds(last)
        lo, full_lo = largest(lo, lo_first), largest(full_lo, lo_last)
        hi, full_hi = smallest(hi, hi_last), smallest(full_hi, hi_first)
    count = cdiv(other, other_block)
    start = xp.clip(lo // other_block, 0, count)
    stop = xp.where(lo > hi, start, xp.maximum(hi // other_block + 1, start))
    full_start = cdiv(full_lo, other_block)
    full_stop = (full_hi + 1) // other_block
    any_full = (full_start < full_stop) & (first + block <= length)
    return BlockRange(
        *(
            a.astype(np.int32)
            for a in (
                start,
                stop,
                xp.where(any_full, full_start, stop),
                xp.where(any_full, full_stop, stop),
            )
        )
    )


def structural_ranges(
    rules: Sequence[Bounds], q_len: int, kv_len: int, block_q: int, block_kv: int
) -> tuple[BlockRange, BlockRange]:
    """Ranges of key blocks per query block and of query blocks per key block.

    For rules over array indices. Exact for one rule; for several with different offsets the
    intersection of the bands, which may keep a block that holds no visible pair.
    """
    q, k = (q_len, block_q), (kv_len, block_kv)
    return _range_of(rules, False, q, k), _range_of(rules, True, k, q)


def matrix_range(xp: ModuleType, any_: Any, all_: Any) -> BlockRange:
    """Ranges along the last axis of block matrices ``any_`` and ``all_`` ``[..., n, m]``."""
    count = any_.shape[-1]
    if 0 in any_.shape:
        zero = xp.zeros(any_.shape[:-1], np.int32)
        return BlockRange(zero, zero, zero, zero)
    index = arange(count)
    start = xp.min(xp.where(any_, index, count), axis=-1)
    stop = xp.max(xp.where(any_, index + 1, 0), axis=-1)
    start = xp.minimum(start, stop)
    full_start = xp.minimum(xp.min(xp.where(all_, index, count), axis=-1), stop)
    broken = ~all_ & (xp.broadcast_to(index, any_.shape) > full_start[..., None])
    full_stop = xp.minimum(xp.min(xp.where(broken, index, count), axis=-1), stop)
    return BlockRange(*(a.astype(np.int32) for a in (start, stop, full_start, full_stop)))


def pad_to(x: Any, axis: int, length: int, value: Any = 0) -> Any:
    """``x`` with ``value`` appended along ``axis`` up to ``length``."""
    missing = length - x.shape[axis]
    if not is_symbolic(missing) and missing <= 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    xp = np if is_numpy(x) else jnp
    return xp.pad(x, widths, constant_values=value)


def in_blocks(x: Any, block: int, value: Any) -> Any:
    """``[..., n]`` -> ``[..., blocks, block]``, the tail filled with ``value``."""
    count = cdiv(x.shape[-1], block)
    return pad_to(x, x.ndim - 1, count * block, value).reshape(*x.shape[:-1], count, block)


def block_min_max(xp: ModuleType, x: Any, valid: Any, block: int) -> tuple[Any, Any]:
    """Least and largest entry of ``x`` ``[..., n]`` per block among the valid ones.

    ``valid`` is bool ``[..., n]`` or None. A block without valid entries gives (INT_MAX, -INT_MAX),
    an interval that meets nothing.
    """
    low = x if valid is None else xp.where(valid, x, np.int32(INT_MAX))
    high = x if valid is None else xp.where(valid, x, np.int32(-INT_MAX))
    return in_blocks(low, block, INT_MAX).min(-1), in_blocks(high, block, -INT_MAX).max(-1)


def dynamic_block(x: Any, axis: int, number: Any, block: int) -> Any:
    """Block ``number`` (int or traced) of ``x`` along ``axis``."""
    if isinstance(number, (int, np.integer)):
        cut = [slice(None)] * x.ndim
        cut[axis] = slice(int(number) * block, (int(number) + 1) * block)
        return x[tuple(cut)]
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(x), number * block, block, axis)

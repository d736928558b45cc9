"""Packed sequences: cumulative lengths, segment ids and positions inside a sequence.

Standard cumulative lengths ``[n+1]`` or ``[b, n+1]``: first entry 0, non-decreasing. Token t
belongs to sequence m iff cu[m] <= t < cu[m+1]; tokens from cu[n] on are padding.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ejkernel.types.arrays import int_array, is_numpy, namespace
from ejkernel.types.blocks import INT_MAX
from ejkernel.types.errors import invalid

CU_AXES = "[n+1] or [batch, n+1]"


def _cu(cu: Any, argument: str, ranks: tuple[int, ...] = (1, 2)) -> Any:
    cu = int_array(cu, argument, CU_AXES if 2 in ranks else "[n+1]", ranks)
    if cu.shape[-1] < 1:
        raise invalid(argument, "at least one entry", cu)
    return cu


def _rows(function: Any, x: Any) -> Any:
    """``function`` over the leading axis of a rank 2 array, or on a rank 1 array."""
    if x.ndim == 1:
        return function(x)
    if is_numpy(x):
        rows = [function(row) for row in x]
        return np.stack(rows) if rows else function(np.zeros(1, x.dtype))[None][:0]
    return jax.vmap(function)(x)


def _owner(cu: Any, total: int) -> Any:
    """Sequence of each token, -1 for padding, ``[total]``."""
    xp = namespace(cu)
    token = xp.arange(total, dtype=np.int32)
    owner = xp.searchsorted(cu, token, side="right").astype(np.int32) - 1
    return xp.where(token < cu[-1], owner, np.int32(-1))


def segment_ids_of_cu(cu: Any, total: int) -> Any:
    return _rows(lambda row: _owner(row, total), cu)


def positions_of_cu(cu: Any, total: int, padding: int = -1) -> Any:
    def one(row: Any) -> Any:
        xp = namespace(row)
        owner = _owner(row, total)
        start = row[xp.maximum(owner, 0)]
        position = xp.arange(total, dtype=np.int32) - start
        return xp.where(owner >= 0, position, np.int32(padding))

    return _rows(one, cu)


def cu_seqlens_mask_fields(
    cu_q: Any,
    cu_kv: Any,
    q_len: int,
    kv_len: int,
    *,
    names: tuple[str, str] = ("cu_seqlens_q", "cu_seqlens_kv"),
    ranks: tuple[int, ...] = (1, 2),
) -> dict[str, Any]:
    """Segment ids and positions ``[b, len]`` of packed queries and keys, as MaskInfo fields."""
    cu_q = _cu(cu_q, names[0], ranks)
    cu_kv = cu_q if cu_kv is None else _cu(cu_kv, names[1], ranks)
    if cu_q.shape[-1] != cu_kv.shape[-1]:
        raise invalid(names[1], f"as many entries as {names[0]} ({cu_q.shape[-1]})", cu_kv)
    q, kv = (cu[None] if cu.ndim == 1 else cu for cu in (cu_q, cu_kv))
    ids_q = segment_ids_of_cu(q, q_len)
    same = cu_kv is cu_q and q_len == kv_len
    return {
        "q_segment_ids": ids_q,
        "kv_segment_ids": ids_q if same else segment_ids_of_cu(kv, kv_len),
        "q_positions": positions_of_cu(q, q_len),
        "kv_positions": positions_of_cu(kv, kv_len, INT_MAX),
    }

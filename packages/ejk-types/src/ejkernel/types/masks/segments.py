"""Packed sequences: cumulative lengths, segment ids and positions inside a sequence.

Standard cumulative lengths ``[n+1]`` or ``[b, n+1]``: first entry 0, non-decreasing. Token t
belongs to sequence m iff cu[m] <= t < cu[m+1]; tokens at or after cu[n] are padding.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ejkernel.types.arrays import (
    Array,
    concrete_values,
    int_array,
    is_numpy,
    namespace,
    static_int,
    static_length,
)
from ejkernel.types.errors import describe, invalid
from ejkernel.types.masks.blocks import INT_MAX

CU_AXES = "[n+1] or [batch, n+1]"


def _cu(cu: Any, argument: str, ranks: tuple[int, ...] = (1, 2)) -> Any:
    cu = int_array(cu, argument, CU_AXES if 2 in ranks else "[n+1]", ranks)
    if cu.shape[-1] < 1:
        raise invalid(argument, "at least one entry", cu)
    if is_numpy(cu):
        check_starts(cu, argument)
    return cu


def check_starts(cu: np.ndarray, argument: str) -> None:
    """ValueError unless cumulative lengths ``[n+1]`` or ``[b, n+1]`` start at 0 and never fall."""
    rows = cu.reshape(-1, cu.shape[-1]).astype(np.int64)
    nonzero = np.flatnonzero(rows[:, 0])
    falls = np.argwhere(np.diff(rows) < 0)
    if nonzero.size:
        r = int(nonzero[0])
        where, value, legal = "0", int(rows[r, 0]), "start at 0"
    elif falls.size:
        r, at = map(int, falls[0])
        pair = tuple(rows[r, at : at + 2].tolist())
        where, value, legal = f"{at}:{at + 2}", pair, "never decrease"
    else:
        return
    entry = f"{argument}[{where}]" if cu.ndim == 1 else f"{argument}[{r}, {where}]"
    raise ValueError(f"{entry}: given {value}, expected cumulative lengths that {legal}")


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
    # unrolled, the search is one kernel on a GPU; a loop would be several launches per step
    method = {} if is_numpy(cu) else {"method": "scan_unrolled"}
    owner = xp.searchsorted(cu, token, side="right", **method).astype(np.int32) - 1
    return xp.where(token < cu[-1], owner, np.int32(-1))


def segment_ids_of_cu(cu: Any, total: int) -> Any:
    return _rows(lambda row: _owner(row, total), cu)


def positions_of_cu(cu: Any, total: int, padding: int = -1) -> Any:
    def positions_in_row(row: Any) -> Any:
        xp = namespace(row)
        owner = _owner(row, total)
        start = row[xp.maximum(owner, 0)]
        position = xp.arange(total, dtype=np.int32) - start
        return xp.where(owner >= 0, position, np.int32(padding))

    return _rows(positions_in_row, cu)


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
    positions_q = positions_of_cu(q, q_len)
    return {
        "q_segment_ids": ids_q,
        "kv_segment_ids": ids_q if same else segment_ids_of_cu(kv, kv_len),
        "q_positions": positions_q,
        "kv_positions": positions_q if same else positions_of_cu(kv, kv_len, INT_MAX),
    }


def cu_seqlens_to_lengths(cu: Array) -> Array:
    """``lengths[m] = cu[m+1] - cu[m]``: int32 ``[n]`` or ``[b, n]``."""
    cu = _cu(cu, "cu")
    return cu[..., 1:] - cu[..., :-1]


def lengths_to_cu_seqlens(lengths: Array) -> Array:
    """``cu[m] = sum(lengths[:m])``: int32 ``[n+1]`` from ``[n]``, ``[b, n+1]`` from ``[b, n]``."""
    lengths = int_array(lengths, "lengths", "[n] or [batch, n]", (1, 2))
    xp = namespace(lengths)
    zero = xp.zeros((*lengths.shape[:-1], 1), np.int32)
    return xp.concatenate([zero, xp.cumsum(lengths, axis=-1, dtype=np.int32)], axis=-1)


def cu_seqlens_to_segment_ids(cu: Array, total: int) -> Array:
    """Sequence of each of ``total`` tokens: int32 ``[total]`` or ``[b, total]``, padding -1."""
    return segment_ids_of_cu(_cu(cu, "cu"), static_length(total, "total"))


def cu_seqlens_to_positions(cu: Array, total: int) -> Array:
    """Place of each token in its sequence: int32 ``[total]`` or ``[b, total]``, padding -1."""
    return positions_of_cu(_cu(cu, "cu"), static_length(total, "total"))


def run_starts(ids: Any) -> Any:
    """Returns where a maximal run of equal ids starts, bool, in the shape of ``ids``."""
    changes = ids[..., 1:] != ids[..., :-1]
    width = [(0, 0)] * (ids.ndim - 1) + [(min(1, ids.shape[-1]), 0)]
    return namespace(ids).pad(changes, width, constant_values=True)  # sharded as ids is


def positions_in_segments(ids: Any, padding: int = -1) -> Any:
    """Positions that restart with every run of equal ids, int32; ``padding`` where ids < 0."""
    xp = namespace(ids)
    if ids.shape[-1] == 0:
        return ids
    index = np.arange(ids.shape[-1], dtype=np.int32).reshape((1,) * (ids.ndim - 1) + (-1,))
    start = xp.where(run_starts(ids), index, np.int32(0))
    if xp is np:
        start = np.maximum.accumulate(start, axis=-1)
    else:
        start = jax.lax.cummax(start, axis=ids.ndim - 1)
    return xp.where(ids >= 0, index - start, np.int32(padding)).astype(np.int32)


def _check_contiguous(ids: Any, max_segments: int) -> None:
    """ValueError if the known ``ids`` have no cumulative form of ``max_segments`` entries."""
    values = concrete_values(ids)
    if values is None or values.size == 0:
        return
    valid = values >= 0
    if (valid[..., 1:] & ~valid[..., :-1]).any():
        raise ValueError(
            "segment_ids: padding before or between runs has no cu_seqlens form, "
            f"got {values.tolist() if values.size <= 32 else describe(values)}"
        )
    most = int((run_starts(values) & valid).sum(-1).max())
    if most > max_segments:
        raise ValueError(f"max_segments: must be at least the {most} runs, got {max_segments}")


def segment_ids_to_cu_seqlens(ids: Array, max_segments: int | None = None) -> Array:
    """Cumulative lengths of the maximal runs of equal ids >= 0.

    ids ``[s]`` or ``[b, s]``; result int32 ``[max_segments+1]`` or ``[b, max_segments+1]``, the
    tail repeating the end; ``max_segments=None`` means s, which is always enough. Padding may
    only follow the runs: otherwise, or with more runs than ``max_segments``, ValueError if the
    ids are known and an unspecified result if they are traced.
    """
    ids = int_array(ids, "ids", "[s] or [batch, s]", (1, 2))
    count = ids.shape[-1]
    if max_segments is not None:
        count = static_int(max_segments, "max_segments", low=0)
    _check_contiguous(ids, count)

    def cu_of_row(row: Any) -> Any:
        xp = namespace(row)
        starts = run_starts(row) & (row >= 0)
        number = xp.where(starts, xp.cumsum(starts) - 1, count).astype(np.int32)
        end = (row >= 0).sum().astype(np.int32)
        index = xp.arange(row.shape[0], dtype=np.int32)
        # one extra entry receives tokens that start no sequence, and then repeats the end
        if xp is np:
            cu = np.full(count + 1, end, np.int32)
            cu[np.minimum(number, count)] = index
            cu[count] = end
            return cu
        cu = xp.full(count + 1, end, np.int32).at[number].set(index, mode="drop")
        return cu.at[count].set(end)

    return _rows(cu_of_row, ids)

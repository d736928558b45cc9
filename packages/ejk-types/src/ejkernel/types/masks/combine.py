"""The one canonical mask of a call, from its ``mask_info`` and its mask arguments."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ejkernel.types.arrays import mask_array, namespace
from ejkernel.types.errors import invalid
from ejkernel.types.masks.apply import NO_POSITIONS, intersect
from ejkernel.types.masks.fields import (
    AXES,
    check_sizes,
    checked_rule,
    positions_of_rules,
    rule_fields,
    with_private,
)
from ejkernel.types.masks.mask_info import MaskInfo
from ejkernel.types.masks.rules import Rule
from ejkernel.types.masks.segments import cu_seqlens_mask_fields

EVERYTHING = MaskInfo()
"""The mask that hides nothing."""


@functools.lru_cache(maxsize=256)
def mask_of_rule(rule: Rule) -> MaskInfo:
    """The mask of a rule by index, one object for all calls that have it."""
    return EVERYTHING if rule.trivial else with_private(EVERYTHING, **rule_fields(rule))


def _check_one_reading(mask: Any, sizes: Mapping[str, int | None]) -> None:
    """InvalidArgument for a mask of rank 2 or 3 whose first axis need not be the batch."""
    first = mask.shape[0]
    if first in (0, 1) or first != sizes["batch"]:  # one row is the same mask in both readings
        return
    if mask.ndim == 2 and mask.shape == (sizes["q_len"], sizes["kv_len"]):
        readings = {"[batch, kv_len]": "[:, None, None, :]", "[q_len, kv_len]": "[None, None]"}
    elif mask.ndim == 3 and first == sizes["heads"]:
        readings = {"[batch, q_len, kv_len]": "[:, None]", "[heads, q_len, kv_len]": "[None]"}
    else:
        return
    legal = ", ".join(f"attention_mask{i} if its axes are {axes}" for axes, i in readings.items())
    raise invalid("attention_mask", f"a mask that has one reading ({legal})", mask)


def _padding_mask(mask: Any, q_len: int, kv_len: int) -> MaskInfo:
    """The mask ``[#b, #q_len, #kv_len]`` of one axis; the tokens of the other all have id 0."""
    xp, (batch, rows, keys) = namespace(mask), mask.shape
    hides_keys = keys != 1 or (rows == 1 and kv_len == 1)
    name, length = ("kv_segment_ids", kv_len) if hides_keys else ("q_segment_ids", q_len)
    ids = {
        "q_segment_ids": xp.zeros((1, q_len), np.int32),
        "kv_segment_ids": xp.zeros((1, kv_len), np.int32),
    }
    keep = xp.broadcast_to(mask[:, 0, :] if hides_keys else mask[:, :, 0], (batch, length))
    ids[name] = xp.where(keep, np.int32(0), np.int32(-1))
    return MaskInfo(**ids)


def _from_mask_argument(mask: Any, sizes: Mapping[str, Any]) -> MaskInfo:
    """A function's ``attention_mask`` as a mask: padding stays structural."""
    q_len, kv_len = sizes["q_len"], sizes["kv_len"]
    axes = "[#batch, #heads, #q_len, #kv_len], [#batch, q_len, kv_len] or [#batch, kv_len]"
    mask = mask_array(mask, "attention_mask", axes, (2, 3, 4))
    _check_one_reading(mask, sizes)
    if mask.ndim == 3:
        mask = mask[:, None]
    if mask.ndim == 2:
        mask = mask[:, None, None, :]
    for axis, size in ((2, q_len), (3, kv_len)):
        if mask.shape[axis] not in (1, size):
            name = ("q_len", "kv_len")[axis - 2]
            raise invalid("attention_mask", f"an array with {name} {size} (or 1)", mask)
    if mask.shape[1] == 1 and 1 in mask.shape[2:]:
        return _padding_mask(mask[:, 0], q_len, kv_len)
    broadcast = mask.shape[2:] != (q_len, kv_len)
    return with_private(EVERYTHING, attention_mask=mask, _broadcast=broadcast)


def _hide_padding(mask: MaskInfo, padding: MaskInfo) -> MaskInfo:
    """``padding`` (ids 0 / -1) folded into the segment ids that ``mask`` already has."""
    fields = {}
    for name in ("q_segment_ids", "kv_segment_ids"):
        ids, keep = getattr(mask, name), getattr(padding, name)
        xp = namespace(ids, keep)
        keep = keep[:, None] if ids.ndim == 3 else keep
        fields[name] = xp.where(keep < 0, np.int32(-1), ids)
    return with_private(mask, **fields)


def _packed_mask(cu_q: Any, cu_k: Any, q_len: int, kv_len: int, rule: Rule) -> MaskInfo:
    """The mask of packed sequences, inside which ``rule`` holds."""
    if cu_k is None and q_len != kv_len:
        expected = f"cum_seqlens_k as well when q_len {q_len} differs from kv_len {kv_len}"
        raise invalid("cum_seqlens_q", expected, cu_q)
    names = ("cum_seqlens_q", "cum_seqlens_k")
    fields = cu_seqlens_mask_fields(cu_q, cu_k, q_len, kv_len, names=names, ranks=(1,))
    packed = with_private(MaskInfo(**fields), **rule_fields(rule))
    same = cu_k is None or cu_k is cu_q
    if same and rule.chunk is None:
        # within a sequence positions differ as indices do; kernels skip more by index
        return with_private(packed, **NO_POSITIONS)
    return packed


def combine_masks(
    mask_info: MaskInfo | None = None,
    *,
    attention_mask: Any = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    chunk_size: int | None = None,
    cum_seqlens_q: Any = None,
    cum_seqlens_k: Any = None,
    q_len: int,
    kv_len: int,
    batch: int | None = None,
    heads: int | None = None,
) -> MaskInfo:
    """The one mask of a call: the AND of ``mask_info`` and of every mask argument.

    The result is canonical: given back without further arguments it is returned unchanged.
    ``causal``, ``sliding_window`` and ``chunk_size`` use positions: from ``cum_seqlens_*`` if
    given, else from ``mask_info``, else the array index; each argument keeps its own offset.

    Args:
        mask_info: the mask that the others are joined to; None allows all.
        attention_mask: bool or integer ``[#b, #h, #q, #k]``, ``[#b, q, k]`` or, as a key padding
            mask, ``[#b, k]``. Padding masks become segment ids and cost O(length) memory. Where
            the sizes of a call also let it be ``[q, k]`` or ``[h, q, k]``, the missing axes must
            be given.
        causal, causal_offset, sliding_window, chunk_size: as in :class:`MaskInfo`.
        cum_seqlens_q, cum_seqlens_k: ``[n+1]``; need batch 1; k defaults to q (then equal
            lengths).
        q_len, kv_len, batch, heads: sizes of the call; None: not checked.

    Raises:
        InvalidArgument: ``mask_info`` or ``attention_mask`` does not fit the sizes.
        ValueError: a negative window, or ``cum_seqlens_k`` alone.
    """
    if mask_info is not None and not isinstance(mask_info, MaskInfo):
        raise invalid("mask_info", "a MaskInfo or None", mask_info)
    rule = checked_rule(causal, causal_offset, sliding_window, chunk_size)
    result = EVERYTHING
    if mask_info is not None:
        result = mask_info
        check_sizes(result, batch, q_len, kv_len, heads, "mask_info")
    if cum_seqlens_q is None and cum_seqlens_k is not None:
        raise ValueError("cum_seqlens_k: needs cum_seqlens_q, got None for it")
    if cum_seqlens_q is not None:
        if batch not in (None, 1):
            raise invalid("cum_seqlens_q", "a query of batch 1", f"batch {batch}")
        packed = _packed_mask(cum_seqlens_q, cum_seqlens_k, q_len, kv_len, rule)
        packed = with_private(packed, **{name: getattr(result, name) for name in AXES})
        result = packed if mask_info is None else intersect(packed, result)
    elif not rule.trivial:
        rule_mask = mask_of_rule(rule)
        if mask_info is None:
            result = rule_mask
        else:
            result = intersect(result, with_private(rule_mask, **positions_of_rules(result)))
    if attention_mask is not None:
        sizes = {"batch": batch, "heads": heads, "q_len": q_len, "kv_len": kv_len}
        extra = _from_mask_argument(attention_mask, sizes)
        check_sizes(extra, batch, q_len, kv_len, heads, None)
        if extra.q_segment_ids is not None and result.q_segment_ids is not None:
            result = _hide_padding(result, extra)
        else:
            result = intersect(result, extra)
    return result


_COMBINED = (
    *("mask_info", "attention_mask", "cum_seqlens_q", "cum_seqlens_k"),
    *("causal", "causal_offset", "sliding_window", "chunk_size"),
)


def mask_of(a: Mapping[str, Any]) -> MaskInfo:
    """The one mask of a call of attention, from its arguments by name."""
    q, k = a["query"], a["key" if "key" in a else "key_value"]
    arguments = {name: a[name] for name in _COMBINED if name in a}
    return combine_masks(
        **arguments, q_len=q.shape[1], kv_len=k.shape[1], batch=q.shape[0], heads=q.shape[2]
    )

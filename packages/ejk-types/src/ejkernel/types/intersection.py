"""The AND of two masks, one set of fields where that is exact."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ejkernel.types.arrays import as_bool
from ejkernel.types.fields import NO_RULE, check_sizes, is_placed, rule_fields, with_private
from ejkernel.types.rules import both

if TYPE_CHECKING:
    from ejkernel.types.mask_info import MaskInfo

NO_POSITIONS = {"q_positions": None, "kv_positions": None}
_NO_SEGMENTS = {"q_segment_ids": None, "kv_segment_ids": None}


def _try_dense(mask: MaskInfo, new: MaskInfo) -> MaskInfo | None:
    if new.attention_mask is None:
        return mask
    if mask.attention_mask is None:
        return with_private(mask, attention_mask=new.attention_mask, _broadcast=new._broadcast)
    a, b = as_bool(mask.attention_mask), as_bool(new.attention_mask)
    if mask.attention_mask is new.attention_mask:
        return mask
    shape = np.broadcast_shapes(a.shape, b.shape)
    if math.prod(shape) > max(a.size, b.size):
        return None  # an outer product would cost more memory than the two masks
    dense = both(a, b)
    return with_private(mask, attention_mask=dense, _broadcast=mask._broadcast and new._broadcast)


def _try_segments(mask: MaskInfo, new: MaskInfo) -> MaskInfo | None:
    if new.q_segment_ids is None:
        return mask
    if mask.q_segment_ids is None:
        return with_private(
            mask, q_segment_ids=new.q_segment_ids, kv_segment_ids=new.kv_segment_ids
        )
    same = mask.q_segment_ids is new.q_segment_ids and mask.kv_segment_ids is new.kv_segment_ids
    return mask if same else None


def _try_rule(mask: MaskInfo, new: MaskInfo) -> MaskInfo | None:
    # positions without a rule are kept: a function's own rules count by them
    positions = {"q_positions": new.q_positions, "kv_positions": new.kv_positions}
    if new.rule.trivial and not is_placed(new):
        return mask
    if mask.rule.trivial and not is_placed(mask):
        return with_private(mask, **positions, **rule_fields(new.rule))
    if not all(getattr(mask, name) is value for name, value in positions.items()):
        return None
    merged = mask.rule.merge(new.rule)
    return None if merged is None else with_private(mask, **rule_fields(merged))


def _join(parts: list[MaskInfo], new: MaskInfo) -> list[MaskInfo]:
    """Each of the three constraints of ``new`` goes where it fits exactly, else stands alone."""
    for attempt, empty in (
        (_try_dense, {"attention_mask": None, "_broadcast": False}),
        (_try_segments, _NO_SEGMENTS),
        (_try_rule, NO_RULE | NO_POSITIONS),
    ):
        others = {k: v for e in (NO_RULE, NO_POSITIONS, _NO_SEGMENTS) for k, v in e.items()}
        others |= {"attention_mask": None, "_broadcast": False}
        only = with_private(new, **{k: v for k, v in others.items() if k not in empty})
        for i, part in enumerate(parts):
            joined = attempt(part, only)
            if joined is not None:
                parts = [*parts[:i], joined, *parts[i + 1 :]]
                break
        else:
            parts = [*parts, only]
    return parts


def intersect(a: MaskInfo, b: MaskInfo) -> MaskInfo:
    """The mask that is visible where both are; stays structural.

    Constraints are merged into one set of fields where that is exact (same positions, same
    offset...); otherwise the result also carries ``b``'s constraint as a conjunct. Axis names
    are those of ``a``.
    """
    if a is b:
        return a
    parts = list(a.conjuncts)
    for new in b.conjuncts:
        parts = _join(parts, new)
    result = with_private(parts[0], _and=tuple(parts[1:]))
    check_sizes(result, None, None, None)
    return result

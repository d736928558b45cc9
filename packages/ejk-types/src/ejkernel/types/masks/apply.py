"""Functions that add a constraint to a mask; each returns a new mask."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ejkernel.types.arrays import as_bool, int_array, namespace, static_int, static_length
from ejkernel.types.errors import invalid
from ejkernel.types.masks.convert import dense_mask, dense_term, id_pair, resolve_lengths
from ejkernel.types.masks.fields import (
    NO_RULE,
    M,
    check_sizes,
    has_positions,
    join_terms,
    lengths_of,
    per_head,
    rule_fields,
    with_private,
)
from ejkernel.types.masks.rules import Rule, both

NO_POSITIONS = {"q_positions": None, "kv_positions": None}
_NO_SEGMENTS = {"q_segment_ids": None, "kv_segment_ids": None}
_NO_DENSE = {"attention_mask": None, "_broadcast": False}


def apply_rule(mask: M, rule: Rule) -> M:
    """AND ``rule`` over the mask's positions; dense if its offset is not the stored one."""
    terms = list(mask.terms)
    i = next((i for i, term in enumerate(terms) if has_positions(term)), 0)
    terms[i] = _with_rule(terms[i], rule, mask)
    return join_terms(terms)


def _with_rule(term: M, rule: Rule, mask: M) -> M:
    stored = term.rule
    same_offset = stored.trivial or stored.offset == rule.offset
    merged = stored.merge(rule) if same_offset else None
    if merged is not None:
        return with_private(term, **rule_fields(merged))
    q_len, kv_len = resolve_lengths(mask, None, None)
    only = with_private(term, attention_mask=None, q_segment_ids=None, kv_segment_ids=None)
    new = dense_term(with_private(only, **rule_fields(rule)), q_len, kv_len)
    if term.attention_mask is not None:
        new = as_bool(term.attention_mask) & new
    return with_private(term, attention_mask=new, _broadcast=False)


def _select_rows(term: M, rows: Any, inside: Any, total: int | None) -> M:
    """Returns rows ``rows`` ``[b, q]`` of one term; rows not ``inside`` see nothing."""
    fields: dict[str, Any] = {"q_positions": rows}
    batch = rows.shape[0]
    if term.q_positions is not None:
        positions = term.q_positions
        xp = namespace(positions, rows)
        positions = xp.broadcast_to(positions, (batch, positions.shape[1]))
        fields["q_positions"] = xp.take_along_axis(positions, rows, axis=1)
    if term.q_segment_ids is not None:
        ids = per_head(term.q_segment_ids)
        xp = namespace(ids, rows)
        ids = xp.broadcast_to(ids, (batch, *ids.shape[1:]))
        ids = xp.where(inside[:, None], xp.take_along_axis(ids, rows[:, None], axis=2), -1)
        fields["q_segment_ids"] = ids[:, 0] if term.q_segment_ids.ndim == 2 else ids
    if term.attention_mask is not None and term.attention_mask.shape[2] == total:
        dense = term.attention_mask
        xp = namespace(dense, rows)
        dense = xp.broadcast_to(dense, (batch, *dense.shape[1:]))
        fields["attention_mask"] = xp.take_along_axis(dense, rows[:, None, :, None], axis=2)
    return with_private(term, **fields)


def _int_vector(x: Any, argument: str) -> Any:
    if isinstance(x, (int, np.integer)) and not isinstance(x, bool):
        x = np.asarray([x])
    x = int_array(x, argument, "[batch] or a scalar", (0, 1))
    return x[None] if x.ndim == 0 else x


def apply_kv_lengths(mask: M, kv_lengths: Any, q_len: int | None, end_index: Any) -> M:
    """Hide keys ``j >= kv_lengths[b]``; with ``q_len`` keep the rows that end at ``end_index``."""
    lengths = _int_vector(kv_lengths, "kv_lengths")
    mask_lengths = lengths_of(mask)
    if mask_lengths.kv is None:
        raise ValueError("kv_len: a purely structural mask has no length to cut keys from")
    batch = max(mask_lengths.batch or 1, lengths.shape[0])
    if {mask_lengths.batch or 1, lengths.shape[0]} - {1, batch}:
        raise invalid("kv_lengths", f"an array with batch {mask_lengths.batch} (or 1)", lengths)
    if q_len is not None:
        end = lengths if end_index is None else _int_vector(end_index, "end_index")
        q_len = static_length(q_len, "q_len")
        mask, inside = _select_last_rows(mask, q_len, end, batch, mask_lengths.q)
        return _hide_keys(mask, lengths, inside, q_len, mask_lengths.kv)
    if end_index is not None:
        raise ValueError("end_index: needs q_len, got None for it")
    if mask_lengths.q is None:
        raise ValueError("q_len: a purely structural mask has no query length; give q_len=")
    return _hide_keys(mask, lengths, None, mask_lengths.q, mask_lengths.kv)


def _select_last_rows(
    mask: M, q_len: int, end: Any, batch: int, total: int | None
) -> tuple[M, Any]:
    """Returns the ``q_len`` rows that end at ``end``, and which of them the mask has."""
    rows = end[:, None] - q_len + np.arange(q_len, dtype=np.int32)
    xp = namespace(rows, *(term.attention_mask for term in mask.terms))
    rows = xp.broadcast_to(rows, (max(batch, end.shape[0]), q_len))
    inside = rows >= 0 if total is None else (rows >= 0) & (rows < total)
    rows = rows if total is None else xp.clip(rows, 0, max(total - 1, 0))
    return join_terms([_select_rows(term, rows, inside, total) for term in mask.terms]), inside


def _hide_keys(mask: M, lengths: Any, inside: Any, q_len: int, kv_len: int) -> M:
    keep = np.arange(kv_len, dtype=np.int32)[None] < lengths[:, None]
    ids = mask.kv_segment_ids
    if ids is not None:
        xp = namespace(ids, keep)
        keep = keep if ids.ndim == 2 else keep[:, None]
        return with_private(mask, kv_segment_ids=xp.where(keep, ids, np.int32(-1)))
    xp = namespace(keep)
    q_ids = np.zeros((1, q_len), np.int32)
    if inside is not None:
        q_ids = namespace(inside).where(inside, np.int32(0), np.int32(-1))
    kv_ids = xp.where(keep, np.int32(0), np.int32(-1))
    return with_private(mask, q_segment_ids=q_ids, kv_segment_ids=kv_ids)


def apply_token_type_ids(mask: M, token_type_ids: Any, combine: str, zero_policy: str) -> M:
    """Join the mask with "same type" pairs; dense, other constraints are folded in."""
    if combine not in ("union", "intersect", "replace"):
        raise ValueError(f"combine: must be union, intersect or replace, got {combine!r}")
    if zero_policy not in ("q", "kv", "both", "none"):
        raise ValueError(f"zero_policy: must be q, kv, both or none, got {zero_policy!r}")
    q, kv = id_pair(token_type_ids)
    types_q, types_kv = q[:, None, :, None], kv[:, None, None, :]
    same = types_q == types_kv
    if zero_policy in ("q", "both"):
        same = same & (types_q != 0)
    if zero_policy in ("kv", "both"):
        same = same & (types_kv != 0)
    if combine != "replace":
        dense = dense_mask(mask, q.shape[1], kv.shape[1])
        same = dense | same if combine == "union" else dense & same
    cleared = {**NO_RULE, **_NO_SEGMENTS, "_and": (), "_broadcast": False}
    result = with_private(mask, attention_mask=same, **cleared)
    check_sizes(result, None, None, None)
    return result


def chunked_attention_mask(
    chunk_size: int, q_len: int, kv_len: int | None, offset: int, dtype: Any
) -> np.ndarray:
    """Dense ``[q, k]``: same chunk around ``i + offset`` and causal."""
    q_len = static_length(q_len, "q_len")
    kv_len = q_len if kv_len is None else static_length(kv_len, "kv_len")
    rule = Rule(
        True, static_int(offset, "offset"), None, static_int(chunk_size, "chunk_size", low=1)
    )
    q, kv = np.arange(q_len, dtype=np.int64)[:, None], np.arange(kv_len, dtype=np.int64)[None]
    return rule.visible(q, kv).astype(dtype)


def _merge_dense(mask: M, new: M) -> M | None:
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


def _merge_segments(mask: M, new: M) -> M | None:
    if new.q_segment_ids is None:
        return mask
    if mask.q_segment_ids is None:
        return with_private(
            mask, q_segment_ids=new.q_segment_ids, kv_segment_ids=new.kv_segment_ids
        )
    same = mask.q_segment_ids is new.q_segment_ids and mask.kv_segment_ids is new.kv_segment_ids
    return mask if same else None


def _merge_rule(mask: M, new: M) -> M | None:
    # positions without a rule are kept: a function's own rules count by them
    positions = {"q_positions": new.q_positions, "kv_positions": new.kv_positions}
    if new.rule.trivial and not has_positions(new):
        return mask
    if mask.rule.trivial and not has_positions(mask):
        return with_private(mask, **positions, **rule_fields(new.rule))
    if not all(getattr(mask, name) is value for name, value in positions.items()):
        return None
    merged = mask.rule.merge(new.rule)
    return None if merged is None else with_private(mask, **rule_fields(merged))


def _join(terms: list[M], new: M) -> list[M]:
    """Merges each constraint of ``new`` into a term where that is exact, else adds a term."""
    for merge, other_constraints in (
        (_merge_dense, _NO_SEGMENTS | NO_RULE | NO_POSITIONS),
        (_merge_segments, _NO_DENSE | NO_RULE | NO_POSITIONS),
        (_merge_rule, _NO_DENSE | _NO_SEGMENTS),
    ):
        constraint = with_private(new, **other_constraints)
        for i, term in enumerate(terms):
            merged = merge(term, constraint)
            if merged is not None:
                terms = [*terms[:i], merged, *terms[i + 1 :]]
                break
        else:
            terms = [*terms, constraint]
    return terms


def intersect(a: M, b: M) -> M:
    """The mask that is visible where both are; stays structural.

    Constraints are merged into one set of fields where that is exact (same positions, same
    offset...); otherwise the result also carries ``b``'s constraint as a term. The result
    has the axis names of ``a``.
    """
    if a is b:
        return a
    terms = list(a.terms)
    for new in b.terms:
        terms = _join(terms, new)
    result = join_terms(terms)
    check_sizes(result, None, None, None)
    return result

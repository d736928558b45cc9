"""Classification of every pair of blocks: whether any pair, and whether all pairs are visible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ejkernel.types.arrays import as_bool, namespace
from ejkernel.types.masks.blocks import block_bounds, block_min_max, cdiv, in_blocks
from ejkernel.types.masks.fields import ARRAYS, MaskFields, per_head
from ejkernel.types.masks.rules import Rule, both

Pair = tuple[Any, Any]


def _valid_tokens(terms: Sequence[MaskFields], name: str) -> Any:
    """Tokens that no segment rule makes padding, bool ``[#b, #h, len]``; None = all."""
    valid = None
    for term in terms:
        ids = per_head(getattr(term, name))
        valid = both(valid, None if ids is None else ids >= 0)
    return valid


def _bounds(xp: Any, x: Any, valid: Any, length: int, block: int) -> tuple[Any, Any]:
    """Least and largest value per block ``[#b, #h, n]``; the array index where ``x`` is None."""
    if x is None:
        first, last = block_bounds(length, block)
        return first.astype(np.int32)[None, None], last.astype(np.int32)[None, None]
    return block_min_max(xp, x, valid, block)


def _outer(q: Pair, k: Pair) -> tuple[Any, Any, Any, Any]:
    """Two values per block of each axis, as they broadcast to ``[#b, #h, nq, nk]``."""
    return *(x[..., :, None] for x in q), *(x[..., None, :] for x in k)


def _classify_padding(valid_q: Any, valid_k: Any, block_q: int, block_kv: int) -> Pair:
    def any_and_all(valid: Any, block: int) -> Pair:
        return in_blocks(valid, block, False).any(-1), in_blocks(valid, block, True).all(-1)

    any_q, all_q, any_k, all_k = _outer(
        any_and_all(valid_q, block_q), any_and_all(valid_k, block_kv)
    )
    return any_q & any_k, all_q & all_k


def _classify_ids(q: Pair, k: Pair) -> Pair:
    """``q``, ``k``: the least and the largest id of each block."""
    q_lo, q_hi, k_lo, k_hi = _outer(q, k)
    return (q_lo <= k_hi) & (k_lo <= q_hi), (q_lo == q_hi) & (k_lo == k_hi) & (q_lo == k_lo)


def _classify_rule(rule: Rule, q: Pair, k: Pair) -> Pair:
    """``q``, ``k``: the least and the largest position of each block."""
    q_lo, q_hi, k_lo, k_hi = _outer(q, k)
    (lo_first, hi_first), (lo_last, hi_last) = rule.key_bounds(q_lo), rule.key_bounds(q_hi)
    any_ = both(
        None if lo_first is None else k_hi >= lo_first,
        None if hi_last is None else k_lo <= hi_last,
    )
    all_ = both(
        None if lo_last is None else k_lo >= lo_last,
        None if hi_first is None else k_hi <= hi_first,
    )
    return any_, all_


def _classify_dense(mask: Any, q_len: int, kv_len: int, block_q: int, block_kv: int) -> Pair:
    mask = as_bool(mask)
    q_block = block_q if mask.shape[2] == q_len else 1
    kv_block = block_kv if mask.shape[3] == kv_len else 1
    result = []
    for fill, reduce in ((False, "any"), (True, "all")):
        m = getattr(in_blocks(mask, kv_block, fill), reduce)(-1)
        m = getattr(in_blocks(m.swapaxes(-1, -2), q_block, fill), reduce)(-1)
        result.append(m.swapaxes(-1, -2))
    return result[0], result[1]


def classify_blocks(
    terms: Sequence[MaskFields], q_len: int, kv_len: int, block_q: int, block_kv: int
) -> tuple[Any, Any]:
    """``(any, all)`` bool ``[#b, #h, nq, nk]`` for the AND of ``terms``.

    ``any`` False: no visible pair. ``all`` True: every existing pair is visible (what lies past
    the lengths does not count). Both are conservative. numpy if every array is numpy.
    """
    arrays = [getattr(term, name) for term in terms for name in ARRAYS]
    xp = namespace(*arrays, q_len, kv_len)
    valid_q = _valid_tokens(terms, "q_segment_ids")
    valid_k = _valid_tokens(terms, "kv_segment_ids")
    constraints: list[Pair] = []
    if valid_q is not None:
        constraints.append(_classify_padding(valid_q, valid_k, block_q, block_kv))
    for term in terms:
        if term.attention_mask is not None:
            sizes = (q_len, kv_len, block_q, block_kv)
            constraints.append(_classify_dense(term.attention_mask, *sizes))
        if term.q_segment_ids is not None:
            q = block_min_max(xp, per_head(term.q_segment_ids), valid_q, block_q)
            k = block_min_max(xp, per_head(term.kv_segment_ids), valid_k, block_kv)
            constraints.append(_classify_ids(q, k))
        if not term.rule.trivial:
            q = _bounds(xp, per_head(term.q_positions), valid_q, q_len, block_q)
            k = _bounds(xp, per_head(term.kv_positions), valid_k, kv_len, block_kv)
            constraints.append(_classify_rule(term.rule, q, k))
    nq, nk = cdiv(q_len, block_q), cdiv(kv_len, block_kv)
    any_ = all_ = namespace(nq, nk).ones((1, 1, nq, nk), bool)
    for any_visible, all_visible in constraints:
        any_, all_ = any_ & any_visible, all_ & all_visible
    return any_, all_

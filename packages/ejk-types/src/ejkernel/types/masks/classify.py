"""Classification of every pair of blocks: whether any pair, and whether all pairs are visible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ejkernel.types.arrays import as_bool, namespace
from ejkernel.types.masks.blocks import block_bounds, block_min_max, in_blocks
from ejkernel.types.masks.fields import ARRAYS, MaskFields, per_head
from ejkernel.types.masks.rules import both


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


def _outer(q: Any, k: Any) -> tuple[Any, Any]:
    """Block values ``[#b, #h, n]`` ready to broadcast to ``[#b, #h, nq, nk]``."""
    return q[..., :, None], k[..., None, :]


def _any_and_all(xp: Any, valid: Any, block: int) -> tuple[Any, Any]:
    """Returns whether any and all existing tokens of each block are valid, ``[#b, #h, n]``."""
    return in_blocks(valid, block, False).any(-1), in_blocks(valid, block, True).all(-1)


def _dense(mask: Any, t: tuple[int, int, int, int]) -> tuple[Any, Any]:
    q_len, kv_len, block_q, block_kv = t
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
    t = (q_len, kv_len, block_q, block_kv)
    arrays = [getattr(term, name) for term in terms for name in ARRAYS]
    xp = namespace(*arrays, q_len, kv_len)
    nq, nk = -(-q_len // block_q), -(-kv_len // block_kv)
    any_ = all_ = namespace(nq, nk).ones((1, 1, nq, nk), bool)
    valid_q = _valid_tokens(terms, "q_segment_ids")
    valid_k = _valid_tokens(terms, "kv_segment_ids")
    if valid_q is not None:
        (any_q, all_q) = _any_and_all(xp, valid_q, block_q)
        (any_k, all_k) = _any_and_all(xp, valid_k, block_kv)
        q, k = _outer(any_q, any_k)
        any_ = any_ & q & k
        q, k = _outer(all_q, all_k)
        all_ = all_ & q & k
    for term in terms:
        if term.attention_mask is not None:
            any_dense, all_dense = _dense(term.attention_mask, t)
            any_, all_ = any_ & any_dense, all_ & all_dense
        if term.q_segment_ids is not None:
            q_min, q_max = block_min_max(xp, per_head(term.q_segment_ids), valid_q, block_q)
            k_min, k_max = block_min_max(xp, per_head(term.kv_segment_ids), valid_k, block_kv)
            (q_lo, k_lo), (q_hi, k_hi) = _outer(q_min, k_min), _outer(q_max, k_max)
            any_ = any_ & (q_lo <= k_hi) & (k_lo <= q_hi)
            all_ = all_ & (q_lo == q_hi) & (k_lo == k_hi) & (q_lo == k_lo)
        if not term.rule.trivial:
            q_min, q_max = _bounds(xp, per_head(term.q_positions), valid_q, q_len, block_q)
            k_min, k_max = _bounds(xp, per_head(term.kv_positions), valid_k, kv_len, block_kv)
            (q_lo, k_lo), (q_hi, k_hi) = _outer(q_min, k_min), _outer(q_max, k_max)
            lo_first, hi_first = term.rule.key_bounds(q_lo)
            lo_last, hi_last = term.rule.key_bounds(q_hi)
            if lo_first is not None:
                any_, all_ = any_ & (k_hi >= lo_first), all_ & (k_lo >= lo_last)
            if hi_first is not None:
                any_, all_ = any_ & (k_lo <= hi_last), all_ & (k_hi <= hi_first)
    return any_, all_

"""Random masks for hypothesis, and their dense meaning."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from ejkernel.types import MaskInfo
from ejktest.oracles.attention import visible

FIELDS = ("causal", "causal_offset", "sliding_window", "chunk_size")
ARRAYS = ("attention_mask", "q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")


def dense_of(mask, q_len, kv_len):
    """bool [b, h, q, k] of a mask and everything it is joined with."""
    result = np.ones((1, 1, q_len, kv_len), bool)
    for part in mask.terms:
        fields = {name: getattr(part, name) for name in ARRAYS if getattr(part, name) is not None}
        batch = max((x.shape[0] for x in fields.values()), default=1)
        fields |= {name: getattr(part, name) for name in FIELDS}
        result = result & visible(batch, q_len, kv_len, **fields)
    return result


@st.composite
def rules(draw):
    window = st.tuples(st.integers(0, 9), st.integers(0, 9))
    return {
        "causal": draw(st.booleans()),
        "causal_offset": draw(st.one_of(st.just(0), st.integers(-15, 15))),
        "sliding_window": draw(st.one_of(st.none(), window)),
        "chunk_size": draw(st.one_of(st.none(), st.integers(1, 9))),
    }


def _array(draw, shape, low, high):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return rng.integers(low, high, shape).astype(np.int32)


@st.composite
def segments(draw, batch, q_len, kv_len):
    """Packed (sorted), padding only, or arbitrary ids."""
    kind = draw(st.sampled_from(["packed", "any", "padding", "self"]))
    q, k = _array(draw, (batch, q_len), -1, 4), _array(draw, (batch, kv_len), -1, 4)
    if kind in ("packed", "self"):
        q, k = (np.sort(np.where(x < 0, 99, x), 1) for x in (q, k))
        q, k = (np.where(x == 99, -1, x).astype(np.int32) for x in (q, k))
    if kind == "padding":
        q, k = np.minimum(q, 0), np.minimum(k, 0)
    if kind == "self" and q_len == kv_len:
        k = q
    return {"q_segment_ids": q, "kv_segment_ids": k}


@st.composite
def positions(draw, batch, q_len, kv_len):
    start = draw(st.integers(0, 12))
    contiguous = np.arange(start, start + q_len, dtype=np.int32)[None]
    q = draw(st.sampled_from([None, contiguous, _array(draw, (batch, q_len), -1, 20)]))
    return {
        "q_positions": q,
        "kv_positions": draw(st.sampled_from([None, _array(draw, (batch, kv_len), 0, 20)])),
    }


@st.composite
def single_masks(draw, batch, q_len, kv_len):
    fields = draw(rules())
    if draw(st.booleans()):
        fields |= draw(segments(batch, q_len, kv_len))
    if draw(st.integers(0, 3)) == 0:
        fields |= draw(positions(batch, q_len, kv_len))
    if draw(st.integers(0, 3)) == 0:
        heads = draw(st.sampled_from([1, 2]))
        fields["attention_mask"] = _array(draw, (batch, heads, q_len, kv_len), 0, 3)
    return MaskInfo(**fields)


@st.composite
def drawn_masks(draw, lengths=None):
    """``(mask, q_len, kv_len)``: the AND of one or two masks of random fields."""
    q_len = draw(st.integers(1, 13))
    kv_len = draw(st.one_of(st.just(q_len), st.integers(1, 13)))
    q_len, kv_len = lengths or (q_len, kv_len)
    batch = draw(st.sampled_from([1, 2]))
    mask = draw(single_masks(batch, q_len, kv_len))
    if draw(st.booleans()):
        mask = mask & draw(single_masks(draw(st.sampled_from([1, batch])), q_len, kv_len))
    return mask, q_len, kv_len

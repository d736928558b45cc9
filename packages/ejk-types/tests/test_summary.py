"""Block summaries make exact claims, and make them where they can."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.types import MaskInfo
from ejkernel.types.masks.summary import EMPTY, FULL, PARTIAL
from ejktest.masks import dense_of, drawn_masks


def kinds(dense, q_block, kv_block):
    """The exact kind of every block, [b, h, nq, nk]."""
    nq, nk = -(-dense.shape[2] // q_block), -(-dense.shape[3] // kv_block)
    result = np.empty((*dense.shape[:2], nq, nk), np.int8)
    for qi, ki in np.ndindex(nq, nk):
        block = dense[..., qi * q_block :, ki * kv_block :][..., :q_block, :kv_block]
        any_, all_ = block.any((2, 3)), block.all((2, 3))
        result[..., qi, ki] = np.where(any_, np.where(all_, FULL, PARTIAL), EMPTY)
    return result


def check_ranges(summary):
    for kind, start, stop in (
        (summary.kind, summary.kv_start, summary.kv_stop),
        (np.swapaxes(summary.kind, 2, 3), summary.q_start, summary.q_stop),
    ):
        start, stop = np.asarray(start), np.asarray(stop)
        assert start.dtype == stop.dtype == np.int32 and start.shape == kind.shape[:3]
        for index in np.ndindex(kind.shape[:3]):
            found = np.flatnonzero(kind[index])
            want = (found[0], found[-1] + 1) if found.size else (start[index], start[index])
            assert (start[index], stop[index]) == want


@settings(max_examples=120, deadline=None)
@given(drawn_masks(), st.integers(1, 6), st.integers(1, 6))
def test_known_masks_are_summarised_exactly(case, q_block, kv_block):
    mask, q_len, kv_len = case
    summary = mask.block_summary(q_block, kv_block, q_len=q_len, kv_len=kv_len)
    assert isinstance(summary.kind, np.ndarray) and summary.kind.dtype == np.int8
    want = kinds(dense_of(mask, q_len, kv_len), q_block, kv_block)
    np.testing.assert_array_equal(np.broadcast_to(summary.kind, want.shape), want)
    check_ranges(summary)


@settings(max_examples=12, deadline=None)
@given(drawn_masks(lengths=(10, 7)))
def test_traced_masks_claim_nothing_wrong(case):
    mask, q_len, kv_len = case
    summary = jax.jit(lambda m: m.block_summary(4, 3, q_len=q_len, kv_len=kv_len))(mask)
    want = kinds(dense_of(mask, q_len, kv_len), 4, 3)
    kind = np.broadcast_to(summary.kind, want.shape)
    assert (want[kind == EMPTY] == EMPTY).all() and (want[kind == FULL] == FULL).all()
    check_ranges(summary)


def test_traced_packed_documents_are_exact():
    ids = np.repeat(np.arange(4), 4)[None]
    summary = jax.jit(lambda m: m.block_summary(2, 2))(MaskInfo.from_segments(ids))
    want = np.kron(np.eye(4), np.ones((2, 2))) * FULL
    np.testing.assert_array_equal(summary.kind[0, 0], want)


def test_structural_summary_needs_no_arrays():
    summary = MaskInfo.from_causal().block_summary(4, 4, q_len=10, kv_len=10)
    assert summary.kind[0, 0].tolist() == [[1, 0, 0], [2, 1, 0], [2, 2, 1]]
    assert summary.kv_stop[0, 0].tolist() == [1, 2, 3]
    assert summary.q_start[0, 0].tolist() == [0, 1, 2]
    full = MaskInfo().block_summary(4, 4, q_len=5, kv_len=6)
    assert (full.kind == FULL).all()
    empty = MaskInfo(causal=True).block_summary(4, 4, q_len=0, kv_len=6)
    assert empty.kind.shape == (1, 1, 0, 2) and empty.q_start.tolist() == [[[0, 0]]]
    with pytest.raises(ValueError, match="kv_len"):
        MaskInfo.from_causal().block_summary(4, 4, q_len=8)
    with pytest.raises(ValueError, match="q_block"):
        MaskInfo.from_causal().block_summary(0, 4, q_len=8, kv_len=8)


def test_large_structural_summary_is_cheap():
    summary = MaskInfo.from_sliding_window(100, causal=True).block_summary(
        512, 512, q_len=2**20, kv_len=2**20
    )
    assert summary.kind.shape == (1, 1, 2048, 2048)
    assert (summary.kv_stop - summary.kv_start).max() == 2

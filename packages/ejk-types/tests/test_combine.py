"""Joining masks keeps their meaning and stays structural."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.types import InvalidArgument, MaskInfo, combine_masks
from ejktest.masks import dense_of, single_masks

IDS = np.array([[0, 0, 0, 1, 1, -1]], np.int32)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_and_is_the_intersection(data):
    q_len, kv_len = data.draw(st.sampled_from([(5, 5), (4, 7)]))
    a, b, c = (data.draw(single_masks(1, q_len, kv_len)) for _ in range(3))
    joined = a & b & c
    want = np.ones((1, 1, q_len, kv_len), bool)
    for mask in (a, b, c):
        want = want & dense_of(mask, q_len, kv_len)
    got = joined.get_or_compute_attention_mask(q_len=q_len, kv_len=kv_len)
    np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))
    assert joined.is_structural == all(m.attention_mask is None for m in (a, b, c))
    assert combine_masks(joined, q_len=q_len, kv_len=kv_len) is joined
    assert all(part.terms == (part,) for part in joined.terms)


def test_exact_merges_need_no_second_term():
    a = MaskInfo(causal=True, sliding_window=(4, 2), chunk_size=8)
    merged = a & MaskInfo(sliding_window=(2, 5), chunk_size=4)
    assert len(merged.terms) == 1
    assert (merged.sliding_window, merged.chunk_size, merged.causal) == ((2, 2), 4, True)
    low = MaskInfo(causal=True, causal_offset=5) & MaskInfo(causal=True, causal_offset=-1)
    assert low.causal_offset == -1 and len(low.terms) == 1
    chunks = MaskInfo(chunk_size=4) & MaskInfo(chunk_size=6)
    assert len(chunks.terms) == 2
    blocks = np.arange(12) // 4 * 2 + np.arange(12) // 6
    np.testing.assert_array_equal(dense_of(chunks, 12, 12)[0, 0], blocks[:, None] == blocks)
    other = MaskInfo(causal=True) & MaskInfo(sliding_window=3, causal_offset=1)
    assert len(other.terms) == 2
    segments = MaskInfo.from_segments(IDS)
    assert len((segments & MaskInfo(causal=True) & segments).terms) == 1
    assert (segments & MaskInfo()).q_segment_ids is segments.q_segment_ids
    with pytest.raises(TypeError):
        segments & 3
    with pytest.raises(InvalidArgument, match="q_len 6"):
        segments & MaskInfo.from_segments(IDS[:, :4])


def test_function_arguments_have_their_own_offset():
    mask = combine_masks(
        MaskInfo(sliding_window=(1, 1), causal_offset=2),
        causal=True,
        causal_offset=1,
        q_len=6,
        kv_len=7,
    )
    i, j = np.arange(6)[:, None], np.arange(7)
    want = (abs(i + 2 - j) <= 1) & (j <= i + 1)
    np.testing.assert_array_equal(dense_of(mask, 6, 7)[0, 0], want)


def test_function_rules_use_the_positions_of_mask_info():
    mask = MaskInfo(q_positions=np.array([[4, 5]]))
    combined = combine_masks(mask, causal=True, sliding_window=1, q_len=2, kv_len=6)
    assert len(combined.terms) == 1
    want = [[0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1]]
    assert dense_of(combined, 2, 6)[0, 0].astype(int).tolist() == want


def test_padding_masks_stay_structural():
    keys = np.array([[1, 1, 0, 1], [0, 0, 0, 0]])
    for given_mask in (keys, keys[:, None, None, :], keys.astype(bool)):
        mask = combine_masks(attention_mask=given_mask, q_len=3, kv_len=4, batch=2)
        assert mask.is_structural
        want = np.broadcast_to(keys[:, None, None].astype(bool), (2, 1, 3, 4))
        np.testing.assert_array_equal(dense_of(mask, 3, 4), want)
    rows = np.array([1, 0, 1]).reshape(1, 1, 3, 1)
    mask = combine_masks(attention_mask=rows, q_len=3, kv_len=4)
    assert mask.is_structural and mask.q_lens.tolist() == [2]
    packed = combine_masks(
        MaskInfo.from_segments(IDS),
        attention_mask=np.array([[1, 0, 1, 1, 1, 1]]),
        q_len=6,
        kv_len=6,
    )
    assert len(packed.terms) == 1 and packed.kv_segment_ids.tolist() == [[0, -1, 0, 1, 1, -1]]
    assert packed.q_segment_ids.tolist() == IDS.tolist()


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 3, 1, 4), (2, 3, 5, 1)])
@pytest.mark.parametrize("lengths", [(5, 4), (1, 4), (5, 1), (1, 1)])
def test_broadcast_masks(shape, lengths):
    shape = (*shape[:2], *(min(s, n) for s, n in zip(shape[2:], lengths, strict=True)))
    dense = np.random.default_rng(1).integers(0, 2, shape)
    mask = combine_masks(attention_mask=dense, q_len=lengths[0], kv_len=lengths[1], heads=3)
    got = mask.get_or_compute_attention_mask(q_len=lengths[0], kv_len=lengths[1])
    want = np.broadcast_to(dense.astype(bool), (*got.shape[:2], *lengths))
    np.testing.assert_array_equal(got, want)
    assert combine_masks(mask, q_len=lengths[0], kv_len=lengths[1]) is mask


def test_rank_three_inserts_a_head_axis():
    dense = np.tril(np.ones((2, 4, 4), int))
    mask = combine_masks(attention_mask=dense, q_len=4, kv_len=4, batch=2)
    assert mask.attention_mask.shape == (2, 1, 4, 4)


def test_chunks_of_packed_sequences_begin_with_each_sequence():
    cu = np.array([0, 3, 8])
    mask = combine_masks(cum_seqlens_q=cu, chunk_size=2, q_len=8, kv_len=8, batch=1)
    of = np.repeat([0, 1], np.diff(cu))
    chunk = (np.arange(8) - cu[of]) // 2
    want = (of[:, None] == of) & (chunk[:, None] == chunk)
    np.testing.assert_array_equal(dense_of(mask, 8, 8)[0, 0], want)


def test_cum_seqlens_beside_a_mask_with_its_own_positions():
    own = MaskInfo(causal=True, q_positions=np.array([[9, 8, 7, 6, 5]]))
    mask = combine_masks(
        own, cum_seqlens_q=np.array([0, 2, 5]), causal=True, q_len=5, kv_len=5, batch=1
    )
    assert mask.is_structural and len(mask.terms) == 2
    ids = np.array([0, 0, 1, 1, 1])
    i, j = np.arange(5)[:, None], np.arange(5)
    want = (ids[:, None] == ids) & (j <= i) & (j <= own.q_positions[0][:, None])
    np.testing.assert_array_equal(dense_of(mask, 5, 5)[0, 0], want)
    traced = jax.jit(
        lambda cu: combine_masks(
            own, cum_seqlens_q=cu, causal=True, q_len=5, kv_len=5
        ).get_or_compute_attention_mask()
    )(np.array([0, 2, 5]))
    np.testing.assert_array_equal(traced[0, 0], want)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"mask_info": 3}, InvalidArgument, "mask_info: expected a MaskInfo"),
        ({"mask_info": MaskInfo.from_segments(IDS)}, InvalidArgument, "mask_info.*q_len 4"),
        (
            {"mask_info": MaskInfo(q_positions=np.zeros((3, 4), int)), "batch": 2},
            InvalidArgument,
            "mask_info.*batch 2",
        ),
        ({"attention_mask": np.ones((1, 5))}, InvalidArgument, "attention_mask.*float64"),
        ({"attention_mask": np.ones((1, 6), bool)}, InvalidArgument, "attention_mask.*kv_len 5"),
        ({"attention_mask": np.ones((1, 2, 4, 5), int), "heads": 3}, InvalidArgument, "heads 3"),
        ({"sliding_window": -2}, ValueError, "sliding_window"),
        ({"cum_seqlens_k": np.array([0, 5])}, ValueError, "cum_seqlens_k"),
        ({"cum_seqlens_q": np.array([0, 4])}, InvalidArgument, "cum_seqlens_q"),
        ({"cum_seqlens_q": np.array([[0, 4]]), "batch": 1}, InvalidArgument, "cum_seqlens_q"),
        (
            {"cum_seqlens_q": np.array([0, 4]), "cum_seqlens_k": np.array([0, 5]), "batch": 2},
            InvalidArgument,
            "batch",
        ),
    ],
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        combine_masks(**arguments, q_len=4, kv_len=5)


def test_positions_are_found_in_either_order():
    placed = MaskInfo(q_positions=IDS[:, ::-1] * 2 + 1, kv_positions=IDS * 2)
    others = (
        MaskInfo(sliding_window=(2, 1)),
        MaskInfo(causal=True, causal_offset=1),
        MaskInfo.from_segments(IDS),
        MaskInfo(attention_mask=np.ones((1, 1, 6, 6), bool)),
    )
    for a in (placed, placed.replace(sliding_window=(3, 3)), placed.replace(causal=True)):
        for b in others:
            masks = [a & b, b & a]
            for call in ({}, {"causal": True}, {"sliding_window": 1}, {"chunk_size": 2}):
                sizes = {"q_len": 6, "kv_len": 6}
                one, two = (combine_masks(m, **call, **sizes) for m in masks)
                want = combine_masks(a, **call, **sizes) & b
                for mask in (one, two):
                    np.testing.assert_array_equal(dense_of(mask, 6, 6), dense_of(want, 6, 6))
            one, two = (dense_of(m.apply_causal(), 6, 6) for m in masks)
            np.testing.assert_array_equal(one, two)

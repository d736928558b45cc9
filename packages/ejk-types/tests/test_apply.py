"""One more constraint: apply_* against the dense meaning."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.types import MaskInfo
from ejktest.masks import dense_of, single_masks

IDS = np.array([[0, 0, 0, 1, 1, -1]], np.int32)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_apply_is_and(data):
    mask = data.draw(single_masks(2, 6, 5))
    offset = data.draw(st.integers(-4, 4))
    window = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
    chunk = data.draw(st.integers(1, 5))
    if jax.tree.leaves(mask) and mask.q_len is None:
        return
    cases = (
        (lambda: mask.apply_causal(offset), {"causal": True}),
        (lambda: mask.apply_sliding_window(window, offset=offset), {"sliding_window": window}),
        (lambda: mask.apply_chunked(chunk, offset), {"causal": True, "chunk_size": chunk}),
    )
    for apply, fields in cases:
        same_offset = mask.rule.trivial or mask.causal_offset == offset
        if mask.q_len is None or mask.kv_len is None:
            if not same_offset:
                with pytest.raises(ValueError, match=r"q_len|kv_len"):
                    apply()
            continue
        got = apply()
        only = MaskInfo(
            **fields,
            causal_offset=offset,
            q_positions=mask.q_positions,
            kv_positions=mask.kv_positions,
        )
        np.testing.assert_array_equal(
            dense_of(got, 6, 5), dense_of(mask, 6, 5) & dense_of(only, 6, 5)
        )
        assert got.q_segment_ids is mask.q_segment_ids
        if same_offset and fields.get("chunk_size") is None:
            assert got.attention_mask is mask.attention_mask


def test_apply_stays_structural_where_it_can():
    mask = MaskInfo.from_segments(IDS).apply_causal(2).apply_sliding_window((3, 5), offset=2)
    mask = mask.apply_sliding_window((4, 1), offset=2)
    assert mask.is_structural and mask.sliding_window == (3, 1) and mask.causal_offset == 2
    dense = mask.apply_causal(0)
    assert not dense.is_structural and dense.causal_offset == 2
    chunked = MaskInfo().apply_chunked(4)
    assert chunked.causal and chunked.chunk_size == 4
    with pytest.raises(ValueError, match="q_len"):
        MaskInfo.from_causal().apply_causal(1)
    with pytest.raises(ValueError, match="chunk_size"):
        MaskInfo().apply_chunked(0)
    with pytest.raises(ValueError, match="window"):
        MaskInfo().apply_sliding_window((-1, 0))


@pytest.mark.parametrize("traced", [False, True])
def test_apply_kv_lengths(traced):
    mask = MaskInfo.from_segments(np.repeat(IDS, 2, 0)) & MaskInfo.from_random(2, 6, 6, seed=1)
    run = jax.jit(MaskInfo.apply_kv_lengths) if traced else MaskInfo.apply_kv_lengths
    lengths = np.array([2, 5])
    got = run(mask, lengths)
    want = dense_of(mask, 6, 6) & (np.arange(6) < lengths[:, None])[:, None, None]
    np.testing.assert_array_equal(dense_of(got, 6, 6), want)
    np.testing.assert_array_equal(got.q_segment_ids, mask.q_segment_ids)


def test_apply_kv_lengths_keeps_query_rows_and_their_positions():
    dense = MaskInfo.from_random(2, 6, 6, seed=2)
    mask = dense.apply_causal().apply_sliding_window((3, 0))
    full, lengths = dense_of(mask, 6, 6), np.array([3, 5])
    got = mask.apply_kv_lengths(lengths, q_len=2)
    assert got.q_len == 2 and got.q_positions.tolist() == [[1, 2], [3, 4]]
    want = np.stack([full[b, :, n - 2 : n] for b, n in enumerate(lengths)])
    want = want & (np.arange(6) < lengths[:, None])[:, None, None]
    np.testing.assert_array_equal(dense_of(got, 2, 6), want)
    ended = mask.apply_kv_lengths(lengths, q_len=2, end_index=np.array([6, 1]))
    assert ended.q_positions[0].tolist() == [4, 5]
    assert not dense_of(ended, 2, 6)[1, :, 0].any()
    packed = MaskInfo.from_segments(IDS, q_positions=np.array([[2, 3, 4, 0, 1, 9]]))
    last = packed.apply_causal().apply_kv_lengths(6, q_len=3, end_index=7)
    assert last.q_positions.tolist() == [[1, 9, 9]]
    assert last.q_segment_ids.tolist() == [[1, -1, -1]]
    beyond = dense.apply_kv_lengths(6, q_len=2, end_index=7)
    assert dense_of(beyond, 2, 6)[0, 0, 0].any() and not dense_of(beyond, 2, 6)[0, 0, 1].any()
    one = MaskInfo.from_segments(np.zeros((1, 6), int)).apply_causal().apply_kv_lengths(4, q_len=1)
    assert dense_of(one, 1, 6).astype(int).tolist() == [[[[1, 1, 1, 1, 0, 0]]]]
    with pytest.raises(ValueError, match="kv_len"):
        MaskInfo.from_causal().apply_kv_lengths(np.array([3]))
    with pytest.raises(ValueError, match="end_index"):
        mask.apply_kv_lengths(lengths, end_index=lengths)
    with pytest.raises(TypeError, match="kv_lengths"):
        mask.apply_kv_lengths(np.array([1, 2, 3]))


@pytest.mark.parametrize("combine", ["union", "intersect", "replace"])
@pytest.mark.parametrize("zero_policy", ["q", "kv", "both", "none"])
def test_apply_token_type_ids(combine, zero_policy):
    types = np.array([[0, 0, 1, 1, 2, 2]])
    mask = MaskInfo.from_segments(IDS).apply_causal()
    same = types[0][:, None] == types[0]
    if zero_policy != "none":
        same = same & (types[0] != 0)
    own = dense_of(mask, 6, 6)[0, 0]
    want = {"union": own | same, "intersect": own & same, "replace": same}[combine]
    got = mask.apply_token_type_ids(types, combine=combine, zero_policy=zero_policy)
    np.testing.assert_array_equal(dense_of(got, 6, 6)[0, 0], want)
    pair = mask.apply_token_type_ids((types, types), combine=combine, zero_policy=zero_policy)
    np.testing.assert_array_equal(pair.attention_mask, got.attention_mask)


def test_apply_token_type_ids_refuses_unknown_words():
    mask = MaskInfo.from_segments(IDS)
    with pytest.raises(ValueError, match="combine"):
        mask.apply_token_type_ids(IDS, combine="xor")
    with pytest.raises(ValueError, match="zero_policy"):
        mask.apply_token_type_ids(IDS, zero_policy="all")
    with pytest.raises(TypeError, match="q_len"):
        mask.apply_token_type_ids(IDS[:, :3])


@pytest.mark.parametrize("offset", [0, 3, -2])
def test_create_chunked_attention_mask(offset):
    got = MaskInfo.create_chunked_attention_mask(3, 5, 8, offset, dtype=np.int32)
    i, j = np.arange(5)[:, None] + offset, np.arange(8)
    np.testing.assert_array_equal(got, (i // 3 == j // 3) & (j <= i))
    assert got.dtype == np.int32
    assert MaskInfo.create_chunked_attention_mask(3, 5).shape == (5, 5)

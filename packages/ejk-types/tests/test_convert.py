"""Conversions between masks, segment ids, cumulative lengths and positions."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ejkernel import types
from ejkernel.types import MaskInfo
from ejktest.masks import dense_of, drawn_masks

IDS = np.array([[0, 0, 2, 2, 2, -1], [5, 1, 1, -1, -1, -1]], np.int32)


def both_ways(function, *args):
    """The result on numpy, checked to equal the jitted one."""
    plain, jitted = function(*args), jax.jit(function)(*args)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(jitted), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    return plain


@settings(max_examples=150, deadline=None)
@given(drawn_masks())
def test_dense_forms(case):
    mask, q_len, kv_len = case
    want = dense_of(mask, q_len, kv_len)
    got = mask.get_or_compute_attention_mask(q_len=q_len, kv_len=kv_len)
    np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))
    whole = mask.materialize_attention_mask(q_len=q_len, kv_len=kv_len)
    assert whole.rule.trivial and len(whole.terms) == 1
    assert whole.q_segment_ids is mask.q_segment_ids
    np.testing.assert_array_equal(dense_of(whole, q_len, kv_len), got)


def test_dtypes_and_bias():
    mask = MaskInfo.from_segments(IDS).apply_causal()
    dense = dense_of(mask, 6, 6)
    assert mask.get_or_compute_attention_mask(jnp.bfloat16).dtype == jnp.bfloat16
    bias = mask.create_bias(jnp.float16)
    assert bias.dtype == np.float16
    np.testing.assert_array_equal(bias == 0, dense)
    assert (bias[~dense] == np.finfo(np.float16).min).all()
    assert mask.bias.dtype == np.float32
    with pytest.raises(TypeError, match="dtype"):
        mask.create_bias(np.int32)
    recast = mask.materialize_attention_mask(np.float32).to_dtype(np.int8)
    assert recast.attention_mask.dtype == np.int8
    np.testing.assert_array_equal(dense_of(recast, 6, 6), dense)
    assert recast.replace(causal=True).attention_mask.dtype == np.int8
    with pytest.raises(TypeError, match="q_len"):
        mask.get_or_compute_attention_mask(q_len=7)


def test_padding_masks_and_lengths():
    mask = MaskInfo.from_segments(IDS, IDS[:, :4])
    assert mask.q_lens.tolist() == [5, 3] and mask.kv_lens.tolist() == [4, 3]
    np.testing.assert_array_equal(mask.q_attention_mask, IDS >= 0)
    q, kv, dense = mask.get_qkv_masks(np.int32)
    assert (q.dtype, kv.shape, dense.shape) == (np.int32, (2, 4), (2, 1, 6, 4))
    dense = MaskInfo(attention_mask=np.array([[[[1, 0, 0], [0, 0, 0]]]]))
    assert dense.q_lens.tolist() == [1] and dense.kv_lens.tolist() == [1]


def test_positions_count_from_the_segment_start():
    mask = MaskInfo.from_segments(IDS)
    q, kv = both_ways(lambda m: m.get_or_compute_positions(), mask)
    assert q.tolist() == [[0, 1, 0, 1, 2, -1], [0, 0, 1, -1, -1, -1]]
    assert kv[1].tolist() == [0, 0, 1] + [2**31 - 1] * 3
    assert mask.q_position_ids.tolist() == q.tolist()
    index = MaskInfo(attention_mask=np.ones((2, 1, 3, 4), bool)).get_or_compute_positions()
    assert [x.tolist() for x in index] == [[[0, 1, 2]] * 2, [[0, 1, 2, 3]] * 2]
    given_positions = MaskInfo(q_positions=np.array([[7, 8]])).q_position_ids
    assert given_positions.tolist() == [[7, 8]]


def test_cu_seqlens_round_trip():
    cu = np.array([0, 2, 2, 5])
    ids = both_ways(lambda c: types.cu_seqlens_to_segment_ids(c, 7), cu)
    assert ids.tolist() == [0, 0, 2, 2, 2, -1, -1]
    assert both_ways(lambda c: types.cu_seqlens_to_positions(c, 7), cu).tolist() == [
        *(0, 1, 0, 1, 2, -1, -1)
    ]
    assert both_ways(types.cu_seqlens_to_lengths, cu).tolist() == [2, 0, 3]
    assert both_ways(types.lengths_to_cu_seqlens, np.array([2, 0, 3])).tolist() == cu.tolist()
    back = both_ways(lambda i: types.segment_ids_to_cu_seqlens(i, 3), ids)
    assert back.tolist() == [0, 2, 5, 5]
    assert types.segment_ids_to_cu_seqlens(ids).tolist() == [0, 2] + [5] * 6
    batch = np.stack([cu, [0, 1, 4, 4]])
    assert both_ways(lambda c: types.cu_seqlens_to_segment_ids(c, 5), batch).tolist() == [
        [0, 0, 2, 2, 2],
        [0, 1, 1, 1, -1],
    ]
    assert types.cu_seqlens_to_lengths(batch).shape == (2, 3)
    np.testing.assert_array_equal(types.lengths_to_cu_seqlens(np.diff(batch)), batch)
    mask = both_ways(lambda c: types.cu_seqlens_to_mask(c, max_q_len=6), cu)
    assert mask.shape == (1, 1, 6, 6) and mask.sum() == 4 + 9
    assert (
        types.cu_seqlens_to_mask(cu, np.array([0, 1, 1, 2]), max_q_len=5, max_kv_len=3).sum() == 5
    )


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ([0, 3, 2], r"cu\[1:3\]: given \(3, 2\), expected cumulative lengths that never decrease"),
        ([[0, 1, 2], [0, 5, 4]], r"cu\[1, 1:3\]: given \(5, 4\), .*never decrease"),
        ([1, 2], r"cu\[0\]: given 1, expected cumulative lengths that start at 0"),
        ([[0, 1], [2, 3]], r"cu\[1, 0\]: given 2, .*start at 0"),
    ],
)
def test_decreasing_cu_seqlens_of_numpy_are_refused(cu, message):
    with pytest.raises(ValueError, match=message):
        types.cu_seqlens_to_segment_ids(np.array(cu), 8)
    types.cu_seqlens_to_segment_ids(jnp.array(cu), 8)  # not read


def test_cu_seqlens_of_a_mask():
    mask = MaskInfo.from_segments(IDS)
    assert mask.cu_seqlens_q.shape == (2, 7)
    q, kv = both_ways(lambda m: m.get_or_compute_qkv_cu_seqlens(max_segments=2), mask)
    assert q.tolist() == [[0, 2, 5], [0, 1, 3]] == kv.tolist()
    assert mask.cu_seqlens_kv[0].tolist() == [0, 2, 5, 5, 5, 5, 5]
    with pytest.raises(ValueError, match="max_segments"):
        types.segment_ids_to_cu_seqlens(IDS, 1)
    for ids in ([0, -1, 1], [-1, 0]):
        for xp in (np, jnp):
            with pytest.raises(ValueError, match="padding"):
                types.segment_ids_to_cu_seqlens(xp.array(ids))
    jax.jit(types.segment_ids_to_cu_seqlens)(np.array([0, -1, 1]))
    assert types.segment_ids_to_cu_seqlens(np.zeros(0, np.int32)).tolist() == [0]


def test_segment_masks():
    mask = both_ways(types.segment_ids_to_mask, IDS)
    np.testing.assert_array_equal(mask, dense_of(MaskInfo.from_segments(IDS), 6, 6))
    q, kv, pair = types.segment_ids_to_mask(
        (IDS, IDS[:, :4]), dtype=np.int32, return_separate_masks=True
    )
    assert (q.shape, kv.shape, pair.shape, pair.dtype) == ((2, 6), (2, 4), (2, 1, 6, 4), np.int32)
    for a, b in zip(types.segment_ids_to_qkv_masks(IDS, IDS[:, :4]), (q, kv, pair), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(TypeError, match=r"kv_ids.*batch 2"):
        types.segment_ids_to_mask((IDS, np.zeros((3, 4), int)))


def reference_ids(mask):
    """Ids of one mask [q, k] by the definition."""
    seen, q_ids = {}, []
    for row in mask:
        q_ids.append(seen.setdefault(row.tobytes(), len(seen)) if row.any() else -1)
    kv_ids = [
        next((q_ids[i] for i in range(len(mask)) if mask[i, j]), -1) for j in range(mask.shape[1])
    ]
    return q_ids, kv_ids


@settings(max_examples=80, deadline=None)
@given(arrays(bool, st.tuples(*[st.integers(1, 2)] * 2, st.integers(1, 6), st.integers(1, 6))))
def test_mask_to_segment_ids(mask):
    q, kv = types.mask_to_segment_ids(mask, per_head=True)
    for b, h in np.ndindex(mask.shape[:2]):
        want = reference_ids(mask[b, h])
        assert (q[b, h].tolist(), kv[b, h].tolist()) == want
    q, kv = types.mask_to_segment_ids(mask)
    for b in range(mask.shape[0]):
        assert (q[b].tolist(), kv[b].tolist()) == reference_ids(mask[b].any(0))


def test_mask_to_segment_ids_inverts_segment_masks():
    q, kv = both_ways(types.mask_to_segment_ids, types.segment_ids_to_mask(IDS))
    assert q.tolist() == [[0, 0, 1, 1, 1, -1], [0, 1, 1, -1, -1, -1]] == kv.tolist()
    assert types.mask_to_segment_ids(np.zeros((2, 0, 3), bool))[1].tolist() == [[-1] * 3] * 2


def test_materialize_segment_ids():
    dense = types.segment_ids_to_mask(IDS)
    mask = MaskInfo(attention_mask=dense)
    filled = mask.materialize_segment_ids()
    assert filled.attention_mask is mask.attention_mask and mask.q_segment_ids is None
    np.testing.assert_array_equal(dense_of(filled, 6, 6), dense)
    heads = MaskInfo(attention_mask=np.concatenate([dense, dense & False], 1))
    per_head = heads.materialize_segment_ids(per_head=True)
    assert per_head.q_segment_ids.shape == (2, 2, 6) and per_head.shape == (2, 2, 6, 6)
    np.testing.assert_array_equal(per_head.get_or_compute_attention_mask(), heads.attention_mask)
    assert per_head.q_lens.tolist() == [5, 3]
    shapes = [x.shape for x in heads.get_or_compute_segment_ids(per_head=True)]
    assert shapes == [(2, 2, 6), (2, 2, 6)]
    assert filled.materialize_segment_ids() is filled


def test_results_under_jit_equal_numpy():
    mask = MaskInfo.from_segments(IDS).apply_causal().apply_sliding_window((1, 0))
    both_ways(
        lambda m: (
            m.bias,
            m.get_qkv_masks(),
            m.q_lens,
            m.materialize_attention_mask().get_or_compute_segment_ids(),
        ),
        mask,
    )


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_positions_of_rows_on_an_explicit_mesh():
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Explicit,))
    placed = MaskInfo.from_segments(jax.device_put(IDS, NamedSharding(mesh, PartitionSpec("dp"))))
    expected = MaskInfo.from_segments(IDS).q_position_ids
    for outer in contextlib.nullcontext(), jax.set_mesh(mesh):
        with outer:
            ours = placed.q_position_ids
        np.testing.assert_array_equal(ours, expected)
        assert ours.sharding.spec[0] == "dp"

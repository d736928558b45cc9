"""Masks and arguments of attention as kernels receive them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types import InvalidArgument, MaskInfo, calls, combine_masks
from ejkernel.types.attention import operands as arg
from ejkernel.types.masks.structure import Band, Unsupported, block_ranges, operands, split_mask


def test_bands_narrow():
    assert Band(-3, 5).narrowed(-2, None) == Band(-2, 5)
    assert Band().empty and not Band(hi=0).empty


def test_a_mask_becomes_rules_and_arrays():
    mask = combine_masks(causal=True, sliding_window=(4, 2), q_len=8, kv_len=8)
    rules, arrays = split_mask(mask)
    assert rules.band == Band(-4, 0) and not arrays and not rules.arrays
    ids = np.array([[0, 0, 1, -1]], np.int32)
    rules, arrays = split_mask(MaskInfo.from_segments(ids))
    assert rules.arrays and set(operands(MaskInfo(), arrays, 4, 4)) == {"q_ids", "kv_ids"}


def test_equal_packings_need_no_positions():
    ends = jnp.array([0, 3, 8])
    for k in (None, ends):
        mask = combine_masks(cum_seqlens_q=ends, cum_seqlens_k=k, causal=True, q_len=8, kv_len=8)
        rules, arrays = split_mask(mask)
        assert set(arrays) == {"q_ids", "kv_ids"} and rules.band == Band(None, 0)
        i, j = np.arange(8)[:, None], np.arange(8)[None]
        want = ((i < 3) == (j < 3)) & (j <= i)
        assert (
            np.asarray(mask.get_or_compute_attention_mask(q_len=8, kv_len=8))[0, 0] == want
        ).all()
    other = combine_masks(
        cum_seqlens_q=ends, cum_seqlens_k=jnp.array([0, 3, 8]), causal=True, q_len=8, kv_len=8
    )
    assert "q_positions" in split_mask(other)[1]


def test_two_dense_masks_are_refused():
    dense = MaskInfo.from_attention_mask(np.ones((1, 1, 4, 4), bool))
    other = combine_masks(
        dense, attention_mask=np.tri(4, dtype=bool)[None, None], q_len=4, kv_len=4
    )
    if len(other.terms) > 1:
        with pytest.raises(Unsupported, match="dense"):
            split_mask(other)


def test_ranges_of_a_causal_mask():
    mask = combine_masks(causal=True, q_len=10, kv_len=10)
    found = np.asarray(block_ranges(mask, 10, 10, 4, 4, transposed=False))[0, 0]
    assert found[:, 0].tolist() == [0, 0, 0] and found[:, 3].tolist() == [1, 2, 3]
    turned = np.asarray(block_ranges(mask, 10, 10, 4, 4, transposed=True))[0, 0]
    assert turned[:, 0].tolist() == [0, 1, 2] and turned[:, 3].tolist() == [3, 3, 3]


def bound(k, **options):
    given = dict(query=jnp.zeros((1, 4, 6, 8)), key=k, value=k, **options)
    return calls.FlashAttention.bind(calls.FlashAttention.prepare((), given))


def test_arguments_are_named():
    k = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(InvalidArgument, match="key"):
        bound(jnp.zeros((1, 4, 2, 16)))
    with pytest.raises(InvalidArgument, match=r"key: .*divide the 6 query heads .4 do not"):
        bound(jnp.zeros((1, 4, 4, 8)))
    with pytest.raises(InvalidArgument, match="softmax_aux"):
        bound(k, softmax_aux=jnp.zeros((5, 1)))
    with pytest.raises(ValueError, match="logits_soft_cap"):
        bound(k, logits_soft_cap=0.0)
    assert bound(k)["softmax_scale"] == 8**-0.5


def test_sinks_of_a_head_are_one_logit():
    sinks = jnp.array([[0.0, 1.0], [2.0, -1.0]])
    want = np.log(np.exp(np.asarray(sinks)).sum(-1))[None]
    np.testing.assert_allclose(arg.sink_logit(sinks), want, rtol=1e-6)
    assert arg.sink_logit(jnp.zeros((2, 0))) is None


def test_a_seed_becomes_five_words():
    assert arg.seed_words(-1).tolist() == [[-1, 0, 0, 0, 0]]
    assert arg.seed_words(jnp.array([5, 2, 3])).tolist() == [[5, 2, 3, 0, 0]]
    assert arg.seed_words(jnp.array([5, 2, 3, 7, 9])).tolist() == [[5, 2, 3, 7, 9]]

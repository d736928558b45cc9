"""prepare_mask: tiles and ranges against the dense mask the constraints mean."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.types import MaskInfo, combine_masks, prepare_mask
from ejktest.masks import dense_of, drawn_masks

BLOCKS = st.sampled_from([1, 2, 3, 4, 16])


def check_prepared(dense, prepared):
    """``dense`` bool [b, h, q, k] against every tile and range of ``prepared``."""
    t = prepared.tiling
    padded = np.zeros((*dense.shape[:2], t.num_q * t.block_q, t.num_kv * t.block_kv), bool)
    padded[..., : t.q_len, : t.kv_len] = dense
    seen_q = [[] for _ in range(t.num_kv)]
    q_ranges = [tuple(map(int, prepared.q_range(k))) for k in range(t.num_kv)]
    for qi in range(t.num_q):
        start, stop = map(int, prepared.kv_range(qi))
        full_start, full_stop = map(int, prepared.kv_full_range(qi))
        assert 0 <= start <= full_start <= full_stop <= stop <= t.num_kv
        for ki in range(t.num_kv):
            want = padded[..., qi * t.block_q :, ki * t.block_kv :]
            want = want[..., : t.block_q, : t.block_kv]
            tile = prepared.tile(qi, ki)
            if tile is None:
                assert not prepared.needs_tile and want.all()
            else:
                assert tile.dtype == bool
                np.testing.assert_array_equal(np.broadcast_to(tile, want.shape), want)
            if not start <= ki < stop:
                assert not want.any()
            if full_start <= ki < full_stop or not prepared.tile_needed(qi, ki):
                assert want.all()
            if want.any():
                seen_q[ki].append(qi)
    for ki, (start, stop) in enumerate(q_ranges):
        full_start, full_stop = map(int, prepared.q_full_range(ki))
        assert 0 <= start <= full_start <= full_stop <= stop <= t.num_q
        assert all(start <= qi < stop for qi in seen_q[ki])
        for qi in range(full_start, full_stop):
            block = padded[..., qi * t.block_q :, ki * t.block_kv :]
            assert block[..., : t.block_q, : t.block_kv].all()


@settings(max_examples=150, deadline=None)
@given(drawn_masks(), BLOCKS, BLOCKS)
def test_tiles_and_ranges_mean_the_dense_mask(case, block_q, block_kv):
    mask, q_len, kv_len = case
    sizes = {"q_len": q_len, "kv_len": kv_len, "block_q": block_q, "block_kv": block_kv}
    prepared = prepare_mask(mask, **sizes)
    assert prepared.is_static
    check_prepared(dense_of(mask, q_len, kv_len), prepared)


# rules are drawn anew each time, and each rule compiles: few examples, every kind of array
@settings(max_examples=12, deadline=None)
@given(drawn_masks(lengths=(9, 7)))
def test_traced_masks_prepare_to_the_same(case):
    mask, q_len, kv_len = case
    sizes = {"q_len": q_len, "kv_len": kv_len, "block_q": 4, "block_kv": 2}

    @jax.jit
    def tiles(m):
        p = prepare_mask(m, **sizes)
        qi, ki = (x.ravel() for x in np.mgrid[:3, :4])
        return p, jax.vmap(p.tile)(qi, ki)

    prepared, tile = tiles(mask)
    host = jax.tree.map(np.asarray, prepared)
    check_prepared(dense_of(mask, q_len, kv_len), host)
    for n in range(12):
        np.testing.assert_array_equal(tile[n], host.tile(n // 4, n % 4))


@pytest.mark.parametrize(
    ("fields", "q_len", "kv_len"),
    [
        ({"causal": True}, 9, 9),
        ({"causal": True, "causal_offset": 5}, 4, 9),
        ({"causal": True, "causal_offset": -3}, 9, 7),
        ({"causal": True, "causal_offset": -20}, 9, 7),
        ({"causal": True, "causal_offset": 2**30}, 9, 7),
        ({"sliding_window": (2, 1)}, 16, 12),
        ({"sliding_window": (0, 0)}, 8, 8),
        ({"sliding_window": (2**31, 10**12)}, 8, 8),
        ({"causal": True, "sliding_window": 3}, 1, 13),
        ({"chunk_size": 5}, 13, 11),
        ({"chunk_size": 5, "causal": True, "causal_offset": -4}, 13, 11),
        ({"chunk_size": 2**40, "causal": True}, 5, 5),
    ],
)
@pytest.mark.parametrize("blocks", [(1, 1), (4, 4), (4, 3), (16, 16)])
def test_static_ranges_are_exact(fields, q_len, kv_len, blocks):
    mask = MaskInfo(**fields)
    prepared = prepare_mask(mask, q_len=q_len, kv_len=kv_len, block_q=blocks[0], block_kv=blocks[1])
    dense = dense_of(mask, q_len, kv_len)
    check_prepared(dense, prepared)
    assert prepared.is_static
    for qi in range(prepared.tiling.num_q):
        rows = dense[0, 0, qi * blocks[0] : (qi + 1) * blocks[0]].any(0)
        keys = np.flatnonzero(rows)
        start, stop = prepared.kv_range(qi)
        assert isinstance(start, int)
        if keys.size:
            assert (start, stop) == (keys[0] // blocks[1], keys[-1] // blocks[1] + 1)
        else:
            assert start == stop


def test_packed_documents_skip_blocks():
    ids = np.repeat(np.arange(4, dtype=np.int32), 8)[None]
    mask = MaskInfo(q_segment_ids=ids, kv_segment_ids=ids, causal=True)
    sizes = {"q_len": 32, "kv_len": 32, "block_q": 4, "block_kv": 4}
    expected = [(0, 1), (0, 2), (2, 3), (2, 4), (4, 5), (4, 6), (6, 7), (6, 8)]
    static = prepare_mask(mask, **sizes)
    assert static.is_static
    assert [static.kv_range(i) for i in range(8)] == expected
    assert static.kv_full_range(1) == (0, 1)
    traced = jax.jit(lambda m: prepare_mask(m, **sizes))(mask)
    assert not traced.is_static
    assert [tuple(map(int, traced.kv_range(i))) for i in range(8)] == expected


def test_ring_positions_give_tight_ranges():
    positions = np.arange(8, 16, dtype=np.int32)[None]
    mask = MaskInfo(q_positions=positions, causal=True, sliding_window=(3, 0))
    prepared = prepare_mask(mask, q_len=8, kv_len=16, block_q=4, block_kv=4)
    assert [prepared.kv_range(i) for i in range(2)] == [(1, 3), (2, 4)]


def test_all_padding_and_zero_lengths():
    pad = np.full((2, 6), -1, np.int32)
    mask = MaskInfo(q_segment_ids=pad, kv_segment_ids=pad)
    prepared = prepare_mask(mask, q_len=6, kv_len=6, block_q=4, block_kv=4)
    assert all(prepared.kv_range(i) == (0, 0) for i in range(2))
    for q_len, kv_len in ((0, 5), (5, 0), (0, 0)):
        empty = prepare_mask(
            MaskInfo(causal=True), q_len=q_len, kv_len=kv_len, block_q=4, block_kv=4
        )
        assert all(start == stop for start, stop in zip(*empty.by_query[:2], strict=True))
        ids = MaskInfo(
            q_segment_ids=np.zeros((1, q_len), np.int32),
            kv_segment_ids=np.zeros((1, kv_len), np.int32),
        )
        prepare_mask(ids, q_len=q_len, kv_len=kv_len, block_q=4, block_kv=4)


def test_no_constraint_needs_no_tile():
    sizes = {"q_len": 8, "kv_len": 12, "block_q": 4, "block_kv": 4}
    prepared = prepare_mask(MaskInfo(), **sizes)
    assert not prepared.needs_tile and prepared.tile(0, 0) is None
    assert prepared.tile_needed(0, 0) is False
    assert prepared.kv_full_range(1) == (0, 3)
    tail = prepare_mask(MaskInfo(), **(sizes | {"kv_len": 11}))
    assert np.asarray(tail.tile(0, 2))[0, 0].tolist() == [[True] * 3 + [False]] * 4


def test_prepared_is_a_pytree_that_keeps_static_ranges_under_jit():
    prepared = prepare_mask(MaskInfo(causal=True), q_len=8, kv_len=8, block_q=4, block_kv=4)

    @jax.jit
    def ranges(p, qi):
        assert p.is_static and p.kv_range(1) == (0, 2)
        return (*p.kv_range(qi), p.tile(qi, 0))

    start, stop, tile = ranges(prepared, 1)
    assert (int(start), int(stop)) == (0, 2) and tile.all()
    copy = jax.tree.map(lambda x: x, prepared)
    assert jax.tree.structure(copy) == jax.tree.structure(prepared)
    assert hash(jax.tree.structure(copy)) == hash(jax.tree.structure(prepared))


def test_traced_block_numbers():
    mask = combine_masks(
        MaskInfo(causal=True), attention_mask=np.ones((2, 7), int), q_len=6, kv_len=7
    )
    prepared = prepare_mask(mask, q_len=6, kv_len=7, block_q=4, block_kv=4)
    tile = jax.jit(prepared.tile)
    np.testing.assert_array_equal(tile(1, 1), prepared.tile(1, 1))
    needed = jax.jit(prepared.tile_needed)
    assert bool(needed(0, 0)) == prepared.tile_needed(0, 0)


def test_wrong_length_names_mask_info():
    ids = np.zeros((1, 6), np.int32)
    mask = MaskInfo(q_segment_ids=ids, kv_segment_ids=ids)
    with pytest.raises(TypeError, match=r"mask_info\.q_segment_ids.*q_len 128.*int32\[1, 6\]"):
        prepare_mask(mask, q_len=128, kv_len=128, block_q=16, block_kv=16)

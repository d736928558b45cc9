"""Which program of the Hopper kernels computes which tile, and which key blocks it visits."""

from __future__ import annotations

import numpy as np
import pytest

from ejkernel.kernels.pallas.gpu.common import schedule
from ejkernel.types.structure import Band

BANDS = (Band(), Band(None, 0), Band(None, 37), Band(None, -100), Band(-64, 0), Band(-70, 130))


@pytest.mark.parametrize(
    "rows, blocks, group, programs", [(64, 32, 4, 132), (3, 5, 2, 7), (1, 1, 1, 132)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_every_tile_is_computed_once(rows, blocks, group, programs, causal):
    costs = np.arange(1, blocks + 1) if causal else np.full(blocks, blocks)
    programs = min(programs, rows * blocks)
    table = schedule.assign(rows, costs, group, programs)
    assert table.shape[0] == programs
    assert (table[:, -1] == -1).all() and (table[:, 0] >= 0).all()
    ended = np.cumsum(table < 0, axis=1) > 0
    assert (table[ended] == -1).all()
    assert sorted(table[table >= 0]) == list(range(rows * blocks))


@pytest.mark.parametrize("blocks", [32, 128])
def test_causal_loads_are_even(blocks):
    costs = np.arange(1, blocks + 1)
    table = schedule.assign(2048 // blocks, costs, 4, 132)
    load = np.where(table >= 0, costs[table % blocks] + schedule.TILE_COST, 0).sum(axis=1)
    assert load.max() <= 1.05 * load.mean()


def test_the_queue_keeps_groups_together_and_starts_with_the_longest():
    costs = np.array([1, 3, 2])
    numbers = schedule.queue(5, costs, 2)
    heads, blocks = numbers // 3, numbers % 3
    assert heads.tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 4, 4, 4]
    assert blocks[:6].tolist() == [1, 1, 2, 2, 0, 0]


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(
    "q_len, kv_len, block_q, block_kv", [(256, 256, 64, 64), (200, 333, 128, 64)]
)
def test_visited_blocks_are_those_seen(band, q_len, kv_len, block_q, block_kv):
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None]
    seen = np.ones((q_len, kv_len), bool)
    if band.lo is not None:
        seen &= j - i >= band.lo
    if band.hi is not None:
        seen &= j - i <= band.hi
    costs = schedule.band_costs(q_len, kv_len, band, block_q, block_kv)
    for n, first in enumerate(range(0, q_len, block_q)):
        last = min(first + block_q, q_len) - 1
        start, full_start, full_stop, stop = (
            int(x) for x in schedule.band_blocks(first, last, kv_len, band, block_kv)
        )
        rows = seen[first : last + 1]
        assert 0 <= start < stop <= -(-kv_len // block_kv)
        assert costs[n] == stop - start
        for k in range(-(-kv_len // block_kv)):
            tile = rows[:, k * block_kv : (k + 1) * block_kv]
            assert not tile.any() or start <= k < stop
            if full_start <= k < full_stop:
                assert tile.all() and tile.shape[1] == block_kv

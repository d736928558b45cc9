"""Which program of the Hopper kernels computes which tile, and which key blocks it visits."""

from __future__ import annotations

import heapq
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ejkernel.kernels.pallas.gpu.common import schedule
from ejkernel.kernels.pallas.gpu.common.chip import Chip
from ejkernel.kernels.pallas.gpu.flash_attention import lists
from ejkernel.kernels.pallas.gpu.flash_attention.backward import backward_orders
from ejkernel.kernels.pallas.gpu.flash_attention.backward_dkv_queue import (
    KeyUnit,
    parts_of,
)
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import (
    BackwardTiles,
    Plan,
    descending_heads,
    visit_tables,
)
from ejkernel.kernels.pallas.gpu.flash_attention.forward import flash_kernel
from ejkernel.kernels.pallas.gpu.flash_attention.tile_scheduler import FLAG_WORDS, known_order
from ejkernel.kernels.pallas.gpu.flash_attention.tiles import forward_tiles
from ejkernel.types import combine_masks
from ejkernel.types.attention.problem import Problem
from ejkernel.types.masks.blocks import structural_ranges
from ejkernel.types.masks.structure import Band, Rules
from ejktest import tile_lists

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


def find_end(loads, held, until):
    """Returns when programs end that 132 multiprocessors take in order, some of them held first."""
    free = [until] * held + [0.0] * (132 - held)
    heapq.heapify(free)
    for load in loads:
        heapq.heappush(free, heapq.heappop(free) + load)
    return max(free)


@pytest.mark.parametrize("causal", [False, True])
def test_multiprocessors_that_are_held_delay_guided_programs_little(causal):
    """A kernel that sends keys holds them for 40% of the time of the call."""
    rows, blocks = 16, 256
    costs = np.arange(1, blocks + 1) if causal else np.full(blocks, blocks)
    assign = {"guided": schedule.assign_guided, "one": schedule.assign}
    loads = {}
    for name, function in assign.items():
        table = function(rows, costs, 1, 132)
        assert sorted(table[table >= 0]) == list(range(rows * blocks))
        assert (table[:, 0] >= 0).all() and (table[:, -1] == -1).all()
        padded = np.append(np.tile(costs, rows) + schedule.TILE_COST, 0.0)
        loads[name] = padded[table].sum(axis=1)
    alone = find_end(loads["one"], 0, 0.0)
    assert find_end(loads["guided"], 0, 0.0) <= 1.01 * alone
    held = {name: find_end(x, 8, 0.4 * alone) / alone for name, x in loads.items()}
    assert held["one"] >= 1.39 and held["guided"] <= 1.06
    # the first programs of all multiprocessors have a third of the work, the last have one tile
    assert loads["guided"][:132].min() >= 0.25 * alone
    assert loads["guided"][-132:].max() <= costs.max() + schedule.TILE_COST


def test_guided_programs_of_very_many_tiles_have_one_each():
    costs = np.arange(1, 1025)
    table = schedule.assign_guided(128, costs, 1, 132)
    assert table.shape == (128 * 1024, 2) and (table[:, 1] == -1).all()
    assert table[:2, 0].tolist() == [1023, 1022]


@pytest.mark.parametrize("columns", [2, 17, 129, 300])
def test_flagged_tiles_are_computed_again_and_no_others(columns):
    """Flags of two consumers; with more tiles than bits some share a flag."""
    rng = np.random.default_rng(columns)
    problem = Problem(1, 256, 256, 1, 1, 128, 128, "bfloat16", 1.0)
    kernel = flash_kernel(problem, forward_tiles(problem, Rules(), Chip()), (), 132)
    num_words = -(-columns // (FLAG_WORDS * 32))
    order = np.full((1, columns), -1, np.int32)
    order[0, :-1] = rng.permutation(columns - 1)
    wrong = rng.random((2, columns - 1)) < 0.2
    wrong[0, -1] = True
    flags = np.zeros((2, FLAG_WORDS * 32), bool)
    for consumer, tile in np.argwhere(wrong):
        flags[consumer, tile // num_words] = True
    words = np.packbits(flags, axis=1, bitorder="little").view(np.int32)
    r = SimpleNamespace(order=jnp.asarray(order), needs_maxima=jnp.asarray(words))
    number = lambda i: kernel.scheduler.of_flagged.number(r, i)  # noqa: E731
    program = jax.vmap(lambda _: lax.map(number, jnp.arange(columns)), axis_name="program")
    found = np.asarray(program(jnp.zeros(1)))[0]
    taken = np.repeat(flags.any(0), num_words)[: columns - 1]
    np.testing.assert_array_equal(found[: taken.sum()], order[0, :-1][taken])
    assert (found[taken.sum() :] == -1).all()
    assert kernel.scheduler.of_flagged.is_any_flagged(r)
    nothing = SimpleNamespace(order=r.order, needs_maxima=jnp.zeros_like(r.needs_maxima))
    assert not kernel.scheduler.of_flagged.is_any_flagged(nothing)


def test_few_heads_of_long_tiles_are_worked_on_together():
    """Eight heads of 256 end together, which one after the other would not."""
    problem = Problem(2, 8192, 8192, 8, 8, 256, 256, "bfloat16", 1.0, rules=Rules(Band(None, 0)))
    kernel = flash_kernel(problem, forward_tiles(problem, problem.rules, Chip()), (), 132)
    costs = schedule.band_costs(8192, 8192, problem.rules.band, 128, 64)
    costs = np.append(np.tile(costs, 16) + schedule.TILE_COST, 0.0)
    loads = costs[np.asarray(kernel.scheduler.order({}))].sum(axis=1)
    assert loads.max() <= 1.01 * loads.mean()


# one tile, a tile a program, groups scheduled in several parts, one group larger than a part
@pytest.mark.parametrize("groups, places", [(1, 1), (132, 1), (37, 250), (1, 9000), (5000, 1)])
def test_every_place_is_dealt_once(groups, places):
    programs = min(132, groups * places)
    table = schedule.assign_places(groups, places, programs)
    assert table.shape[0] == programs
    assert (table[:, -1] == -1).all() and (table[:, 0] >= 0).all()
    ended = np.cumsum(table < 0, axis=1) > 0
    assert (table[ended] == -1).all()
    assert sorted(table[table >= 0]) == list(range(groups * places))


@pytest.mark.parametrize(
    "rows, length, by_key, together",
    [(32, 4096, False, 4), (32, 4096, True, 2), (6, 4096, False, 2), (8, 16384, True, 1)],
)
def test_units_of_a_few_heads_are_queued_longest_first(rows, length, by_key, together):
    rules = Rules(Band(None, 0))
    problem = Problem(1, length, length, rows, rows, 256, 256, "bfloat16", 1.0, rules=rules)
    blocks = length // 64 if by_key else length // 128
    plan = Plan(problem, BackwardTiles(64 if by_key else 128, 64))
    row, rank = map(np.asarray, plan.unit_at(jnp.arange(rows * blocks), rows, by_key=by_key))
    assert sorted(zip(row, rank, strict=True)) == [
        (r, n) for r in range(rows) for n in range(blocks)
    ]
    group = row // together
    assert (np.diff(group) >= 0).all()
    assert (np.diff(rank)[np.diff(group) == 0] >= 0).all()
    assert len(set(row[:together])) == together and set(rank[:together]) == {0}


@pytest.mark.parametrize("blocks", [32, 128])
def test_causal_loads_are_even(blocks):
    costs = np.arange(1, blocks + 1)
    table = schedule.assign(2048 // blocks, costs, 4, 132)
    load = np.where(table >= 0, costs[table % blocks] + schedule.TILE_COST, 0).sum(axis=1)
    assert load.max() <= 1.05 * load.mean()


def test_the_queue_keeps_groups_together_and_starts_with_the_longest():
    costs = np.array([1, 3, 2])
    numbers = schedule.queue_order(5, costs, 2)
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


# ---- the backward kernel -----------------------------------------------------------------------


def backward_plan(q_len, kv_len, batch, heads, band, cores=8):
    rules = Rules(band)
    p = Problem(batch, q_len, kv_len, heads, heads, 64, 64, "bfloat16", 1.0, rules=rules)
    tiles = BackwardTiles()
    circular = band.empty
    ranges = structural_ranges([band], q_len, kv_len, tiles.block_q, tiles.block_kv)[1]
    ranges = ranges.table(np)[None, None]
    walked, visitors, _ = visit_tables(ranges, -(-q_len // tiles.block_q))
    descending = 0 if circular else descending_heads(walked, batch * heads, cores)
    plan = Plan(p, tiles, circular, cores, descending)
    return plan, walked[0, 0], visitors[0, 0]


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("q_len, kv_len", [(1024, 1024), (640, 1500), (1300, 700)])
@pytest.mark.parametrize("batch, heads", [(1, 1), (2, 3)])
def test_programs_wait_only_for_programs_before_them(band, q_len, kv_len, batch, heads):
    plan, walked, visitors = backward_plan(q_len, kv_len, batch, heads, band)
    items = np.arange(batch * heads * plan.n_kv)
    row, block, late = (np.broadcast_to(np.asarray(x), items.shape) for x in plan.locate(items))
    launched = {(int(r), int(k)): n for n, (r, k) in enumerate(zip(row, block, strict=True))}
    assert len(launched) == len(items)
    for (r, k), n in launched.items():  # heads that share k and v add to dk and dv in their order
        assert r == 0 or launched[r - 1, k] < n
    if plan.circular:
        return
    for n, (r, k, down) in enumerate(zip(row, block, late, strict=True)):
        for i in range(walked[k, 0], walked[k, 3]):
            turn = k - visitors[1, i] if down else visitors[0, i] - k
            assert 0 <= turn <= visitors[0, i] - visitors[1, i]
            before = k - 1 if down else k + 1
            assert turn == 0 or launched[int(r), int(before)] < n


def makespan(plan, walked, visitors, cores):
    """Visits until the last program ends; a visit takes 1 and waits for that before its turn."""
    items = np.arange(plan.problem.batch * plan.problem.heads * plan.n_kv)
    rows, blocks, late = (np.broadcast_to(np.asarray(x), items.shape) for x in plan.locate(items))
    free, done = [0.0] * cores, {}
    for row, k, down in zip(rows, blocks, late, strict=True):
        core = int(np.argmin(free))
        time, visits = free[core], range(walked[k, 0], walked[k, 3])
        for i in reversed(visits) if down else visits:
            turn = k - visitors[1, i] if down else visitors[0, i] - k
            time = max(time + 1, done[row, i, turn - 1] + 1 if turn else 0)
            done[row, i, turn] = time
        free[core] = time
    return max(free)


@pytest.mark.parametrize("length, heads", [(2048, 8), (4096, 6), (1024, 24)])
def test_causal_programs_end_together(length, heads):
    cores, band = 33, Band(None, 0)
    plan, walked, visitors = backward_plan(length, length, 1, heads, band, cores)
    visits = heads * (walked[:, 3] - walked[:, 0]).sum()
    even = visits / cores
    ascending = makespan(replace(plan, descending=0), walked, visitors, cores)
    assert plan.descending > 0
    assert makespan(plan, walked, visitors, cores) < min(1.12 * even, 0.95 * ascending)


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 8), (3, 8)])
def test_tiles_of_lengths_in_arrays_are_dealt_once_and_evenly(shape):
    batch, heads, length = 3, 8, 16384
    rules = Rules(Band(None, 0), arrays=True)
    p = Problem(batch, length, length, heads, heads, 128, 128, "bfloat16", 1.0, rules=rules)
    kernel = flash_kernel(p, forward_tiles(p, rules, Chip()), ("ranges",), 132)
    n, rng = kernel.scheduler.q_blocks, np.random.default_rng(sum(shape))
    ranges = np.zeros((*shape, n, 4), np.int32)
    for row in ranges.reshape(-1, n, 4):  # packed sequences of any lengths
        starts = np.unique(rng.integers(0, n, 6))
        row[:, 0] = [max([0, *starts[starts <= i]]) for i in range(n)]
        row[:, 3] = np.arange(n) + 1
    order = np.asarray(kernel.scheduler.order({"ranges": jnp.asarray(ranges)}))
    assert (order[:, -2:] == -1).all() and (order[:, 0] >= 0).all()
    assert sorted(order[order >= 0]) == list(range(batch * heads * n))
    wide = np.broadcast_to(ranges, (batch, heads, n, 4)).reshape(-1, 4)
    costs = wide[:, 3] - wide[:, 0] + schedule.TILE_COST
    by_length, by_row = (
        np.where(x >= 0, costs[x], 0).sum(axis=1)
        for x in (order, schedule.assign(batch * heads, np.ones(n), 1, 132))
    )
    assert by_length.max() <= 1.1 * by_length.mean() < by_row.max()


def test_lists_of_known_and_tiles_of_traced_patterns_agree():
    """Tiles are what the device makes lists of."""
    n = 70
    p = Problem(1, n, 2 * n, 1, 1, 64, 64, "bfloat16", 1.0, pattern_blocks=(1, 1))
    p = replace(p, rules=Rules(Band(None, 3)))
    mask = combine_masks(causal=True, causal_offset=3, q_len=n, kv_len=2 * n)
    pattern = np.random.default_rng(n).random((1, 1, n, 2 * n)) < 0.4
    for make in (lists.forward_lists, lists.backward_lists):
        static, traced = (make(p, mask, x, (1, 1)) for x in (pattern, jnp.asarray(pattern)))
        assert set(static) == {"lists"} and set(traced) == {"tiles"}
        of_tiles = tile_lists.of_queries if make is lists.forward_lists else tile_lists.of_keys
        np.testing.assert_array_equal(static["lists"], of_tiles(np.asarray(traced["tiles"])))


@pytest.mark.parametrize("traced", [False, True])
def test_bits_are_there_for_every_row_of_a_program(traced):
    """Rows past the end have legal ranges too: none reads behind the array."""
    p = Problem(1, 130, 190, 1, 1, 64, 64, "bfloat16", 1.0, pattern_blocks=(16, 32))
    pattern = np.ones((1, 1, 9, 6), bool)
    pattern = jnp.asarray(pattern) if traced else pattern
    mask = combine_masks(q_len=130, kv_len=190)
    for block in (64, 128, 192):
        by_query = lists.forward_lists(p, mask, pattern, (block, 128))["bits"]
        by_key = lists.backward_lists(p, mask, pattern, (128, block))["bits"]
        assert by_query.shape == (1, 1, -(-130 // block) * (block // 64), 3)
        assert by_key.shape == (1, 1, -(-190 // block) * (block // 64), 2)


@pytest.mark.parametrize("rows, heads", [(1, 1), (1, 16), (3, 4)])
def test_tiles_of_known_lengths_are_dealt_once_and_evenly(rows, heads):
    p = Problem(3, 16384, 16384, 16, 16, 128, 128, "bfloat16", 1.0, pattern_blocks=(128, 128))
    p = replace(p, batch=rows, heads=heads)
    lengths = np.random.default_rng(0).binomial(128, 0.1, (1, heads, 128)) + 1
    (order,) = known_order(lengths, p, 132)
    tiles = order[order >= 0]
    assert sorted(tiles) == list(range(rows * heads * 128)) and (order[:, -2:] == -1).all()
    costs = np.tile(lengths.reshape(-1), rows) + schedule.TILE_COST
    loads = np.where(order >= 0, costs[order], 0).sum(axis=1)
    if rows * heads > 8:
        assert loads.max() <= 1.05 * loads.mean()


def _causal(heads):
    """Random pattern of the blocks that are seen, ``[1, heads, 128, 128]``."""
    seen = np.random.default_rng(0).random((1, heads, 128, 128)) < 0.1
    return seen & np.tril(np.ones((128, 128), bool))


def test_uneven_tiles_of_known_lengths_end_together():
    """Ordered two heads together, programs with the longest tiles end 7% late."""
    p = Problem(1, 16384, 16384, 16, 16, 128, 128, "bfloat16", 1.0, pattern_blocks=(128, 128))
    lengths = np.maximum(_causal(16).sum(-1), 1)
    (order,) = known_order(lengths, p, 132)
    costs = np.append(lengths.reshape(-1) + schedule.TILE_COST, 0.0)
    loads = costs[order].sum(axis=1)
    assert loads.max() <= 1.02 * loads.mean()


@pytest.mark.parametrize("shared", [False, True])
def test_programs_over_known_lists_start_longest_first(shared):
    """Each block once; heads that share keys stand at one place."""
    p = Problem(1, 16384, 16384, 16, 8, 128, 128, "bfloat16", 1.0, pattern_blocks=(128, 128))
    seen = _causal(1 if shared else 16)
    walks = {
        "by_query_lists": np.stack([seen.sum(-1)] * 2, -1),
        "by_key_lists": seen.sum(-2)[..., None],
    }
    orders = backward_orders(p, walks)
    of_keys = np.broadcast_to(seen.sum(-2), (1, 16, 128)).reshape(8, 2, 128).sum(1).reshape(-1)
    of_queries = np.broadcast_to(seen.sum(-1), (1, 16, 128)).reshape(-1)
    for (order,), lengths in zip(
        (orders["by_query_order"], orders["by_key_order"]), (of_queries, of_keys), strict=True
    ):
        assert sorted(order) == list(range(lengths.size))
        assert (np.diff(lengths[order].reshape(-1, 512), axis=1) <= 0).all()
        assert (order.reshape(-1, 512) // 512 == np.arange(lengths.size // 512)[:, None]).all()


@pytest.mark.parametrize(
    "heads, kv_heads, cores, parts", [(4, 4, 9, 1), (6, 2, 9, 3), (6, 3, 9, 1)]
)
def test_key_blocks_are_walked_for_each_head_once(heads, kv_heads, cores, parts):
    """A few loops are split among programs, the splits of a block one after the other."""
    p = Problem(2, 64, 300, heads, kv_heads, 64, 64, "bfloat16", 1.0, pattern_blocks=(64, 64))
    plan = Plan(p, BackwardTiles(64, 100), cores=cores)
    assert parts_of(plan) == parts
    places = jnp.arange(2 * kv_heads * 3 * parts)
    made = KeyUnit(plan, SimpleNamespace(lists=None), places)
    first = made.first[:, None] + np.arange(made.heads)
    found = np.stack(np.broadcast_arrays(made.batch[:, None], first, made.block[:, None]), -1)
    assert sorted(map(tuple, found.reshape(-1, 3).tolist())) == list(np.ndindex(2, heads, 3))
    assert (first // p.group == made.kv_head[:, None]).all()
    np.testing.assert_array_equal(made.part, np.arange(len(places)) % parts)

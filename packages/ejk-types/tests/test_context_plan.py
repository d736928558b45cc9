"""Pieces of attention over a sharded sequence: they cover every visible pair, and each once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.types import Rule
from ejkernel.types.attention.context.pieces import Chunks, Piece
from ejkernel.types.attention.context.ring import Plan, Ring, Schedule, StepRange, run_steps
from ejkernel.types.attention.context.strategy import count_head_groups

BOTH, FIRST, LAST = Chunks(0, 2), Chunks(0, 1), Chunks(1, 1)
CAUSAL = Rule(causal=True)


def visited(ring: Ring, rules: list[Rule], q_len: int, kv_len: int, joined: bool) -> np.ndarray:
    """How often each pair is visible in a piece, ``[all queries, all keys]``."""
    plan = Plan.make(ring, rules, q_len, kv_len, joined=joined)
    count = np.zeros((q_len * ring.size, kv_len * ring.size), int)
    index = [
        [np.concatenate([first + np.arange(m) for first, m in ring.starts(r, n)]) for n in lengths]
        for r, lengths in ((r, (q_len, kv_len)) for r in range(ring.size))
    ]
    for step, by_device in enumerate(plan.pieces):
        for device, pieces in enumerate(by_device):
            source = (device - plan.schedule.start - step) % ring.size
            for piece in pieces:
                spans = []
                for chunks, length in ((piece.q, q_len), (piece.kv, kv_len)):
                    size = length // ring.chunks
                    spans.append(slice(chunks.first * size, (chunks.first + chunks.count) * size))
                rows, keys = index[device][0][spans[0]], index[source][1][spans[1]]
                i, j = np.arange(len(rows))[:, None], np.arange(len(keys))[None]
                see = np.ones((len(rows), len(keys)), bool)
                if piece.shift is not None:
                    for rule in rules:
                        low, high = rule.low_distance, rule.high_distance
                        see &= low is None or j - i >= low + piece.shift
                        see &= high is None or j - i <= high + piece.shift
                np.add.at(count, np.ix_(rows, keys), see)
    return count


WINDOWS = st.tuples(st.integers(0, 20), st.integers(0, 20))
RULES = st.builds(
    Rule, causal=st.booleans(), offset=st.integers(-30, 30), window=st.none() | WINDOWS
)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 5),
    zigzag=st.booleans(),
    rules=st.lists(RULES, max_size=2),
    chunks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    joined=st.booleans(),
)
def test_pieces_cover_the_visible_pairs_once(size, zigzag, rules, chunks, joined) -> None:
    ring = Ring("sp", size, zigzag and size > 1)
    rules = [rule for rule in rules if not rule.trivial]
    q_len, kv_len = (n * ring.chunks for n in chunks)
    i, j = np.arange(q_len * size)[:, None], np.arange(kv_len * size)[None]
    see = np.ones((q_len * size, kv_len * size), bool)
    for rule in rules:
        visible = rule.visible(i, j)
        see &= True if visible is None else visible
    np.testing.assert_array_equal(visited(ring, rules, q_len, kv_len, joined), see)


@pytest.mark.parametrize("device", range(4))
def test_causal_zigzag_has_one_call_in_every_step(device: int) -> None:
    plan = Plan.make(Ring("sp", 4, True), [CAUSAL], 64, 64)
    local, *others = (by_device[device] for by_device in plan.pieces)
    assert local == (Piece(BOTH, BOTH, 0),)
    before, after = (Piece(BOTH, FIRST, None),), (Piece(LAST, BOTH, None),)
    assert others == [before if source < device else after
                      for source in ((device - t) % 4 for t in range(1, 4))]  # fmt: skip


def test_contiguous_steps_are_causal_full_or_empty() -> None:
    plan = Plan.make(Ring("sp", 4, False), [CAUSAL], 64, 64)
    forms = [[tuple(piece.shift for piece in pieces) for pieces in step] for step in plan.pieces]
    assert forms[0] == [(0,)] * 4
    assert forms[1] == [(), (None,), (None,), (None,)]
    assert forms[3] == [(), (), (), (None,)]


@given(
    size=st.integers(1, 9),
    start=st.integers(0, 8),
    count=st.integers(1, 9),
    backward=st.booleans(),
)
def test_own_keys_are_used_while_others_travel(
    size: int, start: int, count: int, backward: bool
) -> None:
    """Every step once, by moves that are as long as each range says; own keys at one end."""
    ring, schedule = Ring("sp", size, False), Schedule(start % size, min(count, size))
    local, order = schedule.local_step(ring), schedule.order(ring, backward=backward)
    assert sorted(order) == list(range(schedule.count))
    assert local is None or order[-1 if backward else 0] == local
    ranges = StepRange.split(order, local)
    assert [step for span in ranges for step in span.steps] == list(order)
    for span in ranges:
        for step in span.steps:
            i = order.index(step)
            assert span.hops_before == (None if i == 0 else step - order[i - 1])
            assert span.hops_after == (None if i == len(order) - 1 else order[i + 1] - step)
        # a loop sends the same arrays by the same places in every turn, and never home
        assert len(span.steps) == 1 or (
            span.hops_before == span.hops_after == 1 and local not in span.steps
        )
        assert len(span.steps) == 1 or span.steps.stop != local
    taken = jnp.full(len(order), -1)

    def record(step: Any, state: Any, span: StepRange) -> Any:
        taken, i = state
        return taken.at[i].set(step), i + 1

    taken, _ = run_steps(ranges, record, (taken, 0))
    assert taken.tolist() == list(order)


def test_a_window_needs_its_neighbours_alone() -> None:
    plan = Plan.make(Ring("sp", 8, False), [Rule(causal=True, window=(64, 0))], 64, 64)
    assert plan.schedule.count == 2
    assert len(plan.distinct) == 2


@pytest.mark.parametrize(
    ("devices", "tokens", "heads", "kv_heads", "bias", "groups"),
    [
        (2, 32768, 16, 16, None, 4),
        (8, 8192, 16, 16, None, 2),  # two heads a device
        (2, 32768, 16, 4, None, 2),
        (2, 32768, 16, 2, None, 1),  # one key head a device
        (2, 32768, 16, 1, None, 1),
        (2, 4096, 16, 16, None, 1),  # too little to send
        (2, 12288, 16, 16, None, 2),  # room for three, which do not divide the key heads
        (2, 32768, 16, 16, "given", 1),
        (3, 32768, 16, 16, None, 1),  # heads do not divide
    ],
)
def test_long_sequences_exchange_heads_in_groups(
    devices: int, tokens: int, heads: int, kv_heads: int, bias: Any, groups: int
) -> None:
    shapes = {"query": (1, tokens, heads, 128), "key": (1, tokens, kv_heads, 128)}
    call = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    ring = Ring("sp", devices, zigzag=False)
    assert count_head_groups({**call, "bias": bias}, ring) == groups

"""The split schedule of latent decoding: every step in one unit, units alike."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from ejkernel.types.serving.split import (
    FIXED_STEPS,
    MAX_FIXED_SPLITS,
    OVERHEAD_SHARE,
    SEQUENCE_OVERHEAD,
    fixed_split,
    max_fixed_splits,
    partial_number,
    split_order,
    split_schedule,
    unit_of_one,
)
from ejktest.split_units import LENGTHS, partial_of, unit_steps

STEP = 64


@pytest.mark.parametrize("units", [1, 5, 66])
@pytest.mark.parametrize("name", LENGTHS)
def test_every_step_has_one_unit_and_partial_results_follow_each_other(name, units):
    lengths = np.asarray(LENGTHS[name])
    schedule = split_schedule(lengths, units, STEP)
    steps, partials = defaultdict(list), defaultdict(list)
    for (unit, sequence), taken in unit_steps(schedule, lengths, STEP).items():
        steps[sequence] += taken
        partials[sequence].append(partial_of(schedule, lengths, STEP, unit, sequence))
    numbers = [number for found in partials.values() for number in found]
    assert len(set(numbers)) == len(numbers)
    cuts = {unit.cut.sequence: unit.cut for unit in schedule if unit.cut.partials}
    for sequence, length in enumerate(lengths):
        assert steps[sequence] == list(range(-(-length // STEP)))
        if sequence in cuts:
            first, count = cuts[sequence].first_partial, cuts[sequence].partials
            assert partials[sequence] == [int(partial_number(first, i)) for i in range(count)]
            assert max(partials[sequence]) < 2 * units
        else:
            assert partials[sequence] == [2 * units + sequence] * int(length > 0)


@pytest.mark.parametrize("units", [1, 3, 66])
def test_a_unit_of_one_sequence(units):
    for length in (0, 1, 64, 65, 128, 129, 700, 8192, 40_000, 131_072):
        for number, expected in enumerate(split_schedule(np.array([length]), units, STEP)):
            unit = unit_of_one(np.int32(length), np.int32(number), units=units, step=STEP)
            assert [int(x) for x in unit[1:3]] == list(expected[1:3])
            assert int(unit.cut.partials) == expected.cut.partials
            if expected.cut.partials:
                assert tuple(map(int, unit.cut)) == expected.cut


@pytest.mark.parametrize("length", [0, 1, 64, 2304, 2305, 8192, 20_000, 131_072])
def test_fixed_splits_follow_from_the_length_of_a_sequence(length):
    """Each step is in one of them, and those that a longer table allows are empty."""
    splits = [fixed_split(np.int32(length), np.int32(i), step=STEP) for i in range(20)]
    counts = {int(count) for _, _, count in splits}
    taken = [range(int(first), int(first + steps)) for first, steps, _ in splits]
    assert [j for steps in taken for j in steps] == list(range(-(-length // STEP)))
    (count,) = counts
    assert count == max_fixed_splits(length, STEP) and not any(map(len, taken[count:]))
    longest = max(map(len, taken))
    assert longest <= FIXED_STEPS or count == MAX_FIXED_SPLITS
    assert longest - min(map(len, taken[:count])) <= 1


def test_the_order_of_fixed_splits_begins_with_the_longest():
    """Each of them is there once, and every sequence has one."""
    lengths = [0, 1, 3000, 2304, 2305, 131_072, 64 * 40, 700, -3]
    order = split_order(np.asarray(lengths), STEP)
    counts = [int(fixed_split(np.int32(n), np.int32(0), step=STEP)[2]) for n in lengths]
    assert sorted(order) == [(i, s) for i, count in enumerate(counts) for s in range(count)]
    longest = [
        max(int(fixed_split(np.int32(n), np.int32(s), step=STEP)[1]) for s in range(count))
        for n, count in zip(lengths, counts, strict=True)
    ]
    sizes = [longest[i] for i, _ in order]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 128


@pytest.mark.parametrize("units", [5, 66])
def test_a_cut_is_told_by_every_unit_but_the_last_of_its_sequence(units):
    lengths = np.asarray(LENGTHS["uneven"])
    schedule = split_schedule(lengths, units, STEP)
    of_sequence = defaultdict(list)
    for unit, sequence in unit_steps(schedule, lengths, STEP):
        of_sequence[sequence].append(unit)
    told = defaultdict(list)
    for number, unit in enumerate(schedule):
        if unit.cut.partials:
            told[unit.cut.sequence].append((number, unit.cut.units_before))
    for sequence, found in of_sequence.items():
        assert told[sequence] == [(unit, i) for i, unit in enumerate(found[:-1])]


def test_units_are_even_and_sequences_complete_where_that_is_as_even():
    schedule = split_schedule(np.full(64, 8192), 66, STEP)
    assert not any(unit.cut.partials for unit in schedule)
    assert max(unit.steps for unit in schedule) == 128
    schedule = split_schedule(np.asarray([100_000, 64, 64]), 66, STEP)
    steps = 1563 + 2 + 3 * (1565 // (66 * OVERHEAD_SHARE))
    assert max(unit.steps for unit in schedule) == -(-steps // 66)


def test_a_unit_that_begins_sequences_has_fewer_steps():
    lengths = np.random.default_rng(0).integers(0, 20_000, 64)
    schedule, costs = split_schedule(lengths, 66, STEP), [0] * 66
    for (unit, sequence), steps in unit_steps(schedule, lengths, STEP).items():
        costs[unit] += len(steps) + SEQUENCE_OVERHEAD * (sequence != schedule[unit].sequence)
    total = (-(-lengths // STEP) + SEQUENCE_OVERHEAD * (lengths > 0)).sum()
    assert max(costs) <= -(-total // 66)
    # a bound may lie where a sequence begins
    assert max(costs) - min(costs[:-1]) <= 2 * SEQUENCE_OVERHEAD

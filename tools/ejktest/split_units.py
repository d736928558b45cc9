"""Iterates over the split schedule of latent decoding, as its kernel does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ejkernel.types.serving.split import SplitUnit

LENGTHS = {
    "even": [512] * 8,
    "uneven": [1, 0, 700, 64, 65, 0, 3000, 63],
    "one": [20000],
    "none": [0, 0, 0],
    "empty ends": [0, 0, 130, 0],
    "many": [i % 97 for i in range(200)],
}


def unit_steps(
    schedule: Sequence[SplitUnit], lengths: np.ndarray, step: int
) -> dict[tuple[int, int], list[int]]:
    """Returns the steps of every sequence in every unit that has some, by (unit, sequence)."""
    steps_of = defaultdict(list)
    for number, unit in enumerate(schedule):
        sequence, j = unit.sequence, unit.step
        for _ in range(unit.steps):
            while lengths[sequence] <= j * step:
                sequence, j = sequence + 1, 0
            steps_of[number, sequence].append(j)
            j += 1
    return steps_of


def partial_of(
    schedule: Sequence[SplitUnit], lengths: np.ndarray, step: int, unit: int, sequence: int
) -> int:
    """Returns the number of the partial result, or output, of a sequence in a unit."""
    steps = unit_steps(schedule, lengths, step)[unit, sequence]
    if len(steps) == -(-lengths[sequence] // step):
        return 2 * len(schedule) + sequence
    return 2 * unit + (sequence != schedule[unit].sequence)

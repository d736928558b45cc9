"""Split schedule of latent decoding: equal work for every program, from context lengths alone.

The steps of all sequences stand in one row, and each *unit* (the programs that share the rows of
one query) takes one range of it. Units take the same time: a unit that begins another sequence
behind its first has ``SEQUENCE_OVERHEAD`` steps fewer. A range may begin and end inside a sequence.
What one unit accumulates of a cut sequence is a *partial result*; a unit has two at most, of its
first sequence and of its last, numbered ``2 * unit`` and ``2 * unit + 1``. Sequences that lie in
one unit are complete, and come after all partial results: ``2 * units + sequence``.

In a batch-invariant call a unit is one of ``MAX_FIXED_SPLITS`` splits of a sequence, which follow
from the length of that sequence alone (``fixed_split``); the last ones are empty where it is short.

Every program finds its own range, so there is no table and no launch before the kernel.
``split_schedule`` is the reference in NumPy; ``unit_of_one`` finds a unit of a single sequence by
arithmetic on its length.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

MIN_STEPS = 2  # steps of a unit: fewer cost more to merge than they save
SEQUENCE_OVERHEAD = 4  # steps that another sequence of a unit costs besides its own, in time
OVERHEAD_SHARE = 8  # the overhead is at most one step in eight: short units hold little else
FIXED_STEPS, MAX_FIXED_SPLITS = 36, 16  # of a split of its own: most steps, unless there are more
EVENNESS = (26, 25)  # how much longer than the mean a unit may be for sequences to stay complete


class CutSequence(NamedTuple):
    """The sequence that goes on behind a unit.

    Attributes:
        sequence: the sequence.
        first_partial: number of its first partial result.
        partials: how many partial results it has. 0: no sequence goes on.
        units_before: how many units before this one it began.
    """

    sequence: Any
    first_partial: Any
    partials: Any
    units_before: Any


class SplitUnit(NamedTuple):
    """The work range of a unit.

    Attributes:
        sequence: its first sequence.
        step: the first step of that sequence in this unit.
        steps: steps of the unit.
        cut: the sequence that goes on behind it.
    """

    sequence: Any
    step: Any
    steps: Any
    cut: CutSequence


def partial_number(first: Any, i: Any) -> Any:
    """Returns the number of a sequence's i-th partial result, whose first is ``first``.

    Only the first may be the last of its unit; the others are the first of theirs.
    """
    return jnp.where(i == 0, first, (first // 2 + i) * 2)


def unit_of_one(length: Any, unit: Any, *, units: int, step: int) -> SplitUnit:
    """Returns the work range of a unit over one sequence, as ``split_schedule`` has it."""
    steps = lax.div(jnp.maximum(length, 0) + (step - 1), step)
    overhead = jnp.minimum(lax.div(steps, OVERHEAD_SHARE * units), SEQUENCE_OVERHEAD)
    cost = jnp.where(steps > 0, steps + overhead, 0)
    even = jnp.maximum(lax.div(cost + (units - 1), units), MIN_STEPS)
    # the overhead comes before the first step, and is shorter than a unit
    first, end = (jnp.clip(u * even - overhead, 0, steps) for u in (unit, unit + 1))
    last = lax.div(jnp.maximum(cost - 1, 0), even)  # the unit of the last step
    partials = jnp.where(unit < last, last + 1, 0)
    zero = unit * 0
    return SplitUnit(zero, first, end - first, CutSequence(zero, zero, partials, unit))


def max_fixed_splits(capacity: int, step: int) -> int:
    """Returns the most splits that ``fixed_split`` makes of up to ``capacity`` tokens."""
    return max(1, min(MAX_FIXED_SPLITS, -(-capacity // (FIXED_STEPS * step))))


def fixed_split(length: Any, split: Any, *, step: int) -> tuple[Any, Any, Any]:
    """Returns (first step, steps, number of splits) of a split of a sequence, from its length."""
    steps = lax.div(jnp.maximum(length, 0) + (step - 1), step)
    splits = jnp.clip(lax.div(steps + (FIXED_STEPS - 1), FIXED_STEPS), 1, MAX_FIXED_SPLITS)
    first, end = (lax.div(steps * jnp.minimum(s, splits), splits) for s in (split, split + 1))
    return first, end - first, splits


def split_order(lengths: np.ndarray, step: int) -> list[tuple[int, int]]:
    """Returns (sequence, split) of the fixed splits of ``lengths [b]``, the longest ones first.

    Sequences whose longest splits have the same number of steps keep their order.
    """
    steps = [-(-max(int(n), 0) // step) for n in lengths]
    counts = [min(max(-(-n // FIXED_STEPS), 1), MAX_FIXED_SPLITS) for n in steps]
    sizes = [-(-n // count) for n, count in zip(steps, counts, strict=True)]
    order = sorted(range(len(steps)), key=lambda i: -sizes[i])
    return [(i, split) for i in order for split in range(counts[i])]


def split_schedule(lengths: np.ndarray, units: int, step: int) -> list[SplitUnit]:
    """Returns the work ranges of ``units`` units over ``lengths [b]``, in steps of ``step`` tokens.

    Units past the last step have none; their first sequence is any.
    """
    b = len(lengths)
    steps = -(-np.maximum(lengths, 0) // step)
    ends = np.cumsum(steps)
    overhead = min(int(steps.sum()) // (OVERHEAD_SHARE * units), SEQUENCE_OVERHEAD)
    costs = np.where(steps > 0, steps + overhead, 0)
    cost_ends = np.cumsum(costs)
    even = max(-(-int(costs.sum()) // units), MIN_STEPS)

    # as many complete sequences in each unit, where that is nearly as even
    per_unit = -(-b // units)
    last = [min(u * per_unit, b) for u in range(units + 1)]
    bounds = [int(steps[:i].sum()) for i in last]
    longest = max(costs[i:j].sum() for i, j in itertools.pairwise(last))
    is_complete = EVENNESS[1] * longest <= EVENNESS[0] * even
    if not is_complete:
        begins = cost_ends - costs + overhead
        bounds = [int(np.clip(u * even - begins, 0, steps).sum()) for u in range(units + 1)]

    unit_of_step = np.repeat(np.arange(units), np.diff(bounds))
    schedule = []
    for start, end in itertools.pairwise(bounds):
        unit = len(schedule)
        first = min(int((ends <= start).sum()), b - 1)
        work_range = SplitUnit(first, start - int(ends[first] - steps[first]), end - start, _NO_CUT)
        inside = int((ends < end).sum())  # the sequence of the unit's last step
        if end > start and ends[inside] > end:
            began = int(unit_of_step[ends[inside] - steps[inside]])
            ending = int(unit_of_step[ends[inside] - 1])
            # whether another sequence begins the unit in which this one began
            later = int(ends[inside] - steps[inside] > bounds[began])
            cut = CutSequence(inside, 2 * began + later, ending - began + 1, unit - began)
            work_range = work_range._replace(cut=cut)
        schedule.append(work_range)
    return schedule


_NO_CUT = CutSequence(0, 0, 0, 0)

"""How the steps of all sequences are dealt to programs, from lengths that only the device knows.

The steps of all sequences stand in one row, and each group of programs takes one run of it. Runs
take the same time: one that begins another sequence behind its first has ``OPENING`` steps fewer. A
run may begin and end inside a sequence. What one run sums of such a sequence is a *part*; a run has
two at most, of its first sequence and of its last, numbered ``2 run`` and ``2 run + 1``. Sequences
inside a run are whole and come after all parts, as ``2 runs + sequence``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

LEAST = 2  # steps of a run: shorter ones cost more to merge than they save
OPENING = 4  # steps that the start of another sequence costs beside its own, in time
SHORT = 8  # and at most one of so many of a run: short runs hold one sequence, or little of two
CUT = 4  # numbers of a cut: see ``Steps``
UNEVEN = (26, 25)  # how much longer than the mean a run may be for sequences to stay whole


def numbers(first: Any, i: Any) -> Any:
    """Number of a sequence's i-th part, of which ``first`` is the first."""
    return jnp.where(i == 0, first, (first // 2 + i) * 2)


def shares(lengths: jax.Array, groups: int, step: int) -> tuple[jax.Array, jax.Array]:
    """(runs int32 ``[groups, 3]``, sequences int32 ``[b, 5]``) for ``lengths [b]``.

    Of a run: its first sequence, the first step of that, and how many steps it has. Of a sequence:
    its length, its steps, the next sequence that has any, its first part or its number as a whole
    one, and how many parts it has: 1 if it is whole.
    """
    b = lengths.shape[0]
    i, g = jnp.arange(b, dtype=jnp.int32), jnp.arange(groups + 1, dtype=jnp.int32)

    def total(x: jax.Array, axis: int | None = None) -> jax.Array:
        return jnp.sum(x, axis=axis, dtype=jnp.int32)

    def ends_of(x: jax.Array) -> jax.Array:
        return total(jnp.where(i <= i[:, None], x, 0), 1)

    steps = (lengths + step - 1) // step
    opening = jnp.minimum(total(steps) // (SHORT * groups), OPENING)
    costs = jnp.where(steps > 0, steps + opening, 0)
    ends, paid = ends_of(steps), ends_of(costs)
    starts, opens = ends - steps, paid - costs
    even = jnp.maximum((paid[-1] + groups - 1) // groups, LEAST)
    # runs of whole sequences, as many in each, where they are nearly as even
    last = jnp.minimum(g * (-(-b // groups)), b) - 1
    whole, price = (jnp.where(last < 0, 0, x[jnp.maximum(last, 0)]) for x in (ends, paid))
    longest = jnp.max(price[1:] - price[:-1])
    upto = (g * even)[:, None] - (opens + opening)
    cut = total(jnp.clip(upto, 0, steps), 1)
    bounds = jnp.where(UNEVEN[1] * longest <= UNEVEN[0] * even, whole, cut)
    first = jnp.minimum(total(ends <= bounds[:-1, None], 1), b - 1)
    runs = jnp.stack([first, bounds[:-1] - starts[first], bounds[1:] - bounds[:-1]], axis=1)
    later = (i > i[:, None]) & (steps > 0)
    following = jnp.minimum(jnp.min(jnp.where(later, i, b), axis=1), b - 1)
    from_group = total(bounds[1:] <= starts[:, None], 1)
    to_group = total(bounds[1:] <= ends[:, None] - 1, 1)
    count = jnp.where(steps > 0, to_group - from_group + 1, 0)
    inside = 2 * from_group + (first[jnp.minimum(from_group, groups - 1)] != i)
    number = jnp.where(count == 1, 2 * groups + i, inside)
    sequences = jnp.stack([lengths, steps, following, number, count], axis=1)
    return runs.astype(jnp.int32), sequences.astype(jnp.int32)

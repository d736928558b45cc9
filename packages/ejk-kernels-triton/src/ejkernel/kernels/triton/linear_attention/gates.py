"""Sums of log decays inside a chunk, exact where they are differences of large ones.

A pair of rows e < l decays by the sum of the gates of rows e + 1 .. l, or e .. l - 1 where time
runs backwards: in both cases P[l] - P[e], P being the inclusive or the exclusive prefix sum. In
float32 a difference would lose what is small beside P: after rows of -20 a pair that hardly decays
would be wrong by 1e-4. So a gate is cut at 2^-10 into a multiple of that and a rest. Prefix sums of
multiples up to 2^14 are exact, and so are their differences; those of rests stay below 2^-3, where
float32 errs by 2^-27. No exponent is then ever larger than the gates between two rows ask for, a
vanished decay is never divided by, and nothing overflows.

A gate below -128 is taken as -128, whose power is 0 in float32 as well: 128 rows stay below 2^14.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefix_sums(gate, EXCLUSIVE: tl.constexpr):
    """(multiples, rests, sum of multiples, of rests): a prefix sum is the sum of the first two."""
    gate = tl.maximum(gate, -128.0)
    coarse = tl.floor(gate * 1024.0) * 0.0009765625
    fine = gate - coarse
    high = tl.cumsum(coarse, 0)
    low = tl.cumsum(fine, 0)
    if EXCLUSIVE:
        high -= coarse
        low -= fine
    return high, low, tl.sum(coarse, 0), tl.sum(fine, 0)


@triton.jit
def chunk_sums(gate, REVERSED: tl.constexpr, LATER: tl.constexpr):
    """(multiples, rests, since the state before, until the state after, all) of every row.

    Before and after as a walk meets them: from the first row to the last, or with LATER from the
    last to the first. REVERSED: time runs from the last row to the first.
    """
    high, low, high_all, low_all = prefix_sums(gate, REVERSED)
    total = high_all + low_all
    rest = (high_all - high) + (low_all - low)
    since = high + low
    if LATER:
        since, rest = rest, since
    return high, low, since, rest, total


@triton.jit
def pair_decays(high, low, LATER: tl.constexpr, CHUNK: tl.constexpr):
    """Decay between the row that reads (first axis) and every row it sees; 0 for the others."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    if LATER:
        between = tl.where(i <= j, -between, float("-inf"))
    else:
        between = tl.where(i >= j, between, float("-inf"))
    return tl.exp(between)

"""Log decays inside a chunk, exact where they are differences of large ones.

The decay from token s to a later token t is the exponential of the sum of the gates of the tokens
after s up to t, a difference of prefix sums. In float32 such a difference loses what is small next
to the sums. So a gate is split at 2^-10 into a multiple of that and a remainder: prefix sums of
multiples up to 2^14 are exact, and so are their differences; prefix sums of remainders stay below
2^-3. A gate below -128 is taken as -128, whose exponential is 0 in float32 as well. All of that is in
base 2.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_gates(gate, at, valid, REVERSED: tl.constexpr):
    """Loads log decays, and returns what a chunk needs of them.

    (prefix sums of multiples, of remainders, decay from the chunk start through every token, decay
    from every token to the chunk end, decay of the chunk). Prefix sums are inclusive, in time order
    and in base 2; tokens that are not ``valid`` do not decay, and their decays are 0.
    """
    g = tl.load(gate + at, mask=valid, other=0.0).to(tl.float32)
    g = tl.maximum(g, -128.0) * LOG2E
    high = tl.floor(g * 1024.0) * 0.0009765625
    low = g - high
    total_high = tl.sum(high, 0)
    total_low = tl.sum(low, 0)
    high = tl.cumsum(high, 0, reverse=REVERSED)
    low = tl.cumsum(low, 0, reverse=REVERSED)
    since = tl.where(valid, tl.exp2(high + low), 0.0)
    until = tl.where(valid, tl.exp2((total_high - high) + (total_low - low)), 0.0)
    return high, low, since, until, tl.exp2(total_high + total_low)


@triton.jit
def is_up_to(SIZE: tl.constexpr, REVERSED: tl.constexpr):
    """Whether the token of a column is that of the row or comes before it ``[SIZE, SIZE]``."""
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    if REVERSED:
        seen = column >= row
    else:
        seen = column <= row
    return seen


@triton.jit
def pair_decays(high, low, seen):
    """Returns decays from the token of a column to the token of a row, 0 where it is not ``seen``."""
    exponent = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.exp2(tl.where(seen, exponent, float("-inf")))

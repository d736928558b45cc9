"""Log decays inside a chunk, exact where they are differences of large ones.

The decay from token s to a later token t is the exponential of the sum of the gates of the tokens
after s up to t, a difference of prefix sums. In float32 such a difference loses what is small next
to the sums. So a gate is split at 2^-10 into a multiple of that and a remainder: prefix sums of
multiples up to 2^14 are exact, and so are their differences; prefix sums of remainders stay below
2^-3. A gate below -128 is taken as -128, whose exponential is 0 in float32 as well.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton


@triton.jit
def load_gates(gate, at, valid):
    """Loads log decays in float32, 0 where a token is not ``valid``."""
    g = tl.load(gate + at, mask=valid, other=0.0).to(tl.float32)
    return tl.maximum(g, -128.0)


@triton.jit
def prefix_sums(g, REVERSED: tl.constexpr):
    """Returns inclusive prefix sums in time order, those of multiples and those of remainders, and
    both totals."""
    high = tl.floor(g * 1024.0) * 0.0009765625
    low = g - high
    total_high = tl.sum(high, 0)
    total_low = tl.sum(low, 0)
    return (
        tl.cumsum(high, 0, reverse=REVERSED),
        tl.cumsum(low, 0, reverse=REVERSED),
        total_high,
        total_low,
    )


@triton.jit
def is_earlier(SIZE: tl.constexpr, REVERSED: tl.constexpr):
    """Whether the token of a column comes before the token of a row ``[SIZE, SIZE]``."""
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    if REVERSED:
        earlier = column > row
    else:
        earlier = column < row
    return earlier


@triton.jit
def pair_decays(high, low, earlier):
    """Returns decays from the token of a column to the token of a row, 0 unless it is earlier."""
    exponent = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.where(earlier, tl.exp(tl.where(earlier, exponent, 0.0)), 0.0)

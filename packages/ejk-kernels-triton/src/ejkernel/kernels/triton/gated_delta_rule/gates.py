"""Decays inside a chunk, from split log decays as in ``linear_attention.gates``, in base 2."""

from __future__ import annotations

from ejkernel.kernels.triton.common.softmax import LOG2E
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.linear_attention.gates import split_gate


@triton.jit
def load_gates(gate, at, valid, REVERSED: tl.constexpr):
    """Loads log decays, and returns what a chunk needs of them.

    (cumulative multiples, cumulative remainders, decay from the chunk start through every token,
    decay from every token to the chunk end, decay of the chunk). What is cumulative includes the
    token itself, in time order. Tokens that are not ``valid`` do not decay, and their decays are 0.
    """
    g = tl.load(gate + at, mask=valid, other=0.0).to(tl.float32)
    g = tl.maximum(g, -128.0) * LOG2E
    high, low = split_gate(g)
    total_high = tl.sum(high, 0)
    total_low = tl.sum(low, 0)
    high = tl.cumsum(high, 0, reverse=REVERSED)
    low = tl.cumsum(low, 0, reverse=REVERSED)
    since = tl.where(valid, tl.exp2(high + low), 0.0)
    until = tl.where(valid, tl.exp2((total_high - high) + (total_low - low)), 0.0)
    return high, low, since, until, tl.exp2(total_high + total_low)


@triton.jit
def is_up_to(SIZE: tl.constexpr, REVERSED: tl.constexpr):
    """Returns whether a column's token comes no later than the row's ``[SIZE, SIZE]``."""
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    if REVERSED:
        seen = column >= row
    else:
        seen = column <= row
    return seen


@triton.jit
def pair_decays(high, low, seen):
    """Returns decays from the token of a column to that of the row, 0 where it is not ``seen``."""
    exponent = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.exp2(tl.where(seen, exponent, float("-inf")))

"""Decays per key channel between the tokens of a chunk, without an exponent above 0.

The pair of tokens s < t decays by exp2(sum of the gates of s + 1 .. t), differently in every
channel. As gates have no bound, a factor of t times a factor of s overflows. But s and t differ
first in some bit of their places in the chunk: at that level s lies in the lower and t in the upper
half of one block. The decay is the decay from s to the end of the lower half times the
decay from there to t, both at most 1. A chunk of 64 tokens has six levels; each is one matmul of
decayed operands, of which the pairs of that level are kept.

A token has one factor per level, whether it is the row or the column of a pair. Exponents are sums
of the gates between two tokens, never differences of prefix sums: they are as exact as the gates.
Gates are split into bfloat16 parts, which hold the bits of float32, and summed by matmuls with
zeros and ones that accumulate in float32.
"""

from __future__ import annotations

from ejkernel.kernels.triton.common.softmax import LOG2E
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.linear_attention.rows import POINTERS, load_rows


@triton.jit
def load_channel_gates(gate, base, tokens, head, sizes):
    """Loads log decays ``[CHUNK, DIM]`` in base 2 in three bfloat16 parts, 0 past the tokens."""
    g = load_rows(
        gate, base, tokens, 0, head, sizes.heads, 0, sizes.dim, sizes.CHUNK, sizes.DIM, POINTERS
    )
    return split_parts(tl.maximum(g.to(tl.float32), -128.0) * LOG2E)


@triton.jit
def split_parts(x):
    """Splits float32 values into three bfloat16 parts."""
    first = x.to(tl.bfloat16)
    x = x - first.to(tl.float32)
    second = x.to(tl.bfloat16)
    third = (x - second.to(tl.float32)).to(tl.bfloat16)
    return first, second, third


@triton.jit
def sum_selected(select, parts):
    """Returns, for every row of ``select`` [CHUNK, CHUNK], the sum of the tokens it selects."""
    select = select.to(tl.bfloat16)
    total = tl.dot(select, parts[2])
    total = tl.dot(select, parts[1], acc=total)
    return tl.dot(select, parts[0], acc=total)


@triton.jit
def time_order(SIZE: tl.constexpr, REVERSED: tl.constexpr):
    """Returns the place in time of every row."""
    row = tl.arange(0, SIZE)
    if REVERSED:
        row = SIZE - 1 - row
    return row


@triton.jit
def level_decays(parts, order, level):
    """Returns the factors of all tokens at a level.

    In an upper half it is the decay from the start of the half through the token, in a lower half
    from the token to the end of the half.
    """
    row = order[:, None]
    column = order[None, :]
    is_upper = ((row >> level) & 1) == 1
    select = ((row >> level) == (column >> level)) & (is_upper == (column <= row))
    return tl.exp2(sum_selected(select, parts))


@triton.jit
def is_pair(order, level):
    """Returns whether a row is in the upper and a column in the lower half of a block."""
    row = order[:, None] >> level
    column = order[None, :] >> level
    return ((row & 1) == 1) & (column + 1 == row)


@triton.jit
def decays_of_chunk(parts, order):
    """Returns decays of channels: from the chunk start through a token, and to the chunk end."""
    row = order[:, None]
    column = order[None, :]
    since = tl.exp2(sum_selected(column <= row, parts))
    until = tl.exp2(sum_selected(column > row, parts))
    return since, until


@triton.jit
def total_decay(parts):
    """Returns the decay of the chunk per channel."""
    total = tl.sum(parts[2].to(tl.float32), 0) + tl.sum(parts[1].to(tl.float32), 0)
    return tl.exp2(total + tl.sum(parts[0].to(tl.float32), 0))

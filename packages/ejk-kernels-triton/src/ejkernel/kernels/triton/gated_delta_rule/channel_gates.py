"""Decays per key channel between the tokens of a chunk, without an exponent above 0.

The pair of tokens s < t decays by exp2(sum of the gates of s + 1 .. t), differently in every
channel. As gates have no bound, a factor of t times a factor of s overflows. But s and t differ
first in some bit of their places in the chunk: at that level s lies in the lower and t in the upper
half of one block. The decay is the decay from s to the end of the lower half times the
decay from there to t, both at most 1. A chunk of 64 tokens has six levels; each is one matmul of
decayed operands, of which the pairs of that level are kept.

Few gates are so strong. Where no half of a block decays by more than 2^-56, the pairs of the whole
block take one matmul: factors count from its middle, and lower rows and upper columns have inverses
of decays. A chunk whose gates allow it is one block, or blocks of 16 tokens and the levels above;
others take all levels. The gates decide while the kernel runs.

A token has one factor per level, whether it is the row or the column of a pair. Exponents are sums
of the gates between two tokens, never differences of prefix sums: they are as exact as the gates.
Gates are split into bfloat16 parts, which hold the bits of float32, and summed by matmuls with
zeros and ones that accumulate in float32.
"""

from __future__ import annotations

from ejkernel.kernels.triton.common.softmax import LOG2E
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.linear_attention.rows import POINTERS, load_rows

SMALLEST = tl.constexpr(-56.0)


@triton.jit
def load_channel_gates(gate, base, tokens, head, channel, sizes, BLOCK: tl.constexpr):
    """Loads log decays ``[CHUNK, BLOCK]`` in base 2 in bfloat16 parts, 0 past the tokens."""
    g = load_rows(
        gate, base, tokens, 0, head, sizes.heads, channel, sizes.dim, sizes.CHUNK, BLOCK, POINTERS
    )
    g = tl.maximum(g.to(tl.float32), -128.0) * LOG2E
    # two parts err by 2^-17 of a gate: less than operands of matmuls in bfloat16 do
    return split_parts(g, 2 if sizes.DTYPE == tl.bfloat16 else 3)


@triton.jit
def split_parts(x, COUNT: tl.constexpr):
    """Splits float32 values into bfloat16 parts, the largest first; three have all bits."""
    parts = ()
    for _i in tl.static_range(COUNT):
        part = x.to(tl.bfloat16)
        x = x - part.to(tl.float32)
        parts += (part,)
    return parts


@triton.jit
def sum_selected(select, parts):
    """Returns, for every row of ``select`` [CHUNK, CHUNK], the sum of the tokens it selects."""
    select = select.to(tl.bfloat16)
    total = tl.dot(select, parts[len(parts) - 1])
    for i in tl.static_range(2, len(parts) + 1):
        total = tl.dot(select, parts[len(parts) - i], acc=total)
    return total


@triton.jit
def time_order(SIZE: tl.constexpr, REVERSED: tl.constexpr):
    """Returns the place in time of every row."""
    row = tl.arange(0, SIZE)
    if REVERSED:
        row = SIZE - 1 - row
    return row


@triton.jit
def level_exponents(parts, order, level):
    """Returns sums of gates at a level, none above 0.

    In an upper half from the start of the half through the token, in a lower half from the token
    to the end of the half, without the token itself.
    """
    row = order[:, None]
    column = order[None, :]
    is_upper = ((row >> level) & 1) == 1
    select = ((row >> level) == (column >> level)) & (is_upper == (column <= row))
    return sum_selected(select, parts)


@triton.jit
def direct_level(parts, order, LEVELS: tl.constexpr):
    """Returns the level whose blocks need no further halving, -1 if all do.

    The inverse of a factor is then in the range of float32, and so is what two of them give.
    """
    level = tl.where(reach(parts, order, LEVELS - 1) >= SMALLEST, LEVELS - 1, -1)
    if LEVELS > 4:
        level = tl.where((level < 0) & (reach(parts, order, 3) >= SMALLEST), 3, level)
    return level


@triton.jit
def reach(parts, order, level):
    """Returns the smallest exponent of all tokens and channels at a level."""
    return tl.min(tl.min(level_exponents(parts, order, level), 1), 0)


@triton.jit
def direct_decays(parts, order, level):
    """Returns decays for the rows of pairs in blocks of a level, and decays for the columns.

    They count from the end of the lower half: forwards to the row, backwards to the column, also
    where that is a growth.
    """
    exponent = level_exponents(parts, order, level)
    is_upper = ((order[:, None] >> level) & 1) == 1
    exponent = tl.where(is_upper, exponent, -exponent)
    return tl.exp2(exponent), tl.exp2(-exponent)


@triton.jit
def is_in_block(order, level):
    """Returns whether a column comes before a row in the same block of a level."""
    row = order[:, None]
    column = order[None, :]
    return (column < row) & ((row >> (level + 1)) == (column >> (level + 1)))


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
    total = tl.sum(parts[0].to(tl.float32), 0)
    for i in tl.static_range(1, len(parts)):
        total += tl.sum(parts[i].to(tl.float32), 0)
    return tl.exp2(total)

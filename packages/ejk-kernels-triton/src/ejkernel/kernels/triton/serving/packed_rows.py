"""Sequences of packed query rows, found by a program itself: from starts and lengths, no tables.

For calls of few rows and few sequences: a program compares every row with every sequence. The rule
is that of ``schedule``: starts are clipped to the rows there are, and to no less than those before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ejkernel.kernels.triton.language import tl, triton


class PackedSequences(NamedTuple):
    """Operands that say which rows a sequence has.

    Attributes:
        starts, lens: first rows ``[n + 1]``, context lengths ``[n]``.
        valid: an array whose element COUNT is the number of valid sequences.
    """

    starts: Any
    lens: Any
    valid: Any
    COUNT: int


class PackedRows(NamedTuple):
    """The sequence of each row, its first row, the row past its last, its clipped length.

    Rows of no sequence have ``last`` 0.
    """

    sequence: Any
    first: Any
    last: Any
    length: Any


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def find_packed_rows(row, packed, n, rows, capacity, SEQUENCES: tl.constexpr):
    """Returns the ``PackedRows`` of rows ``row``; SEQUENCES: a power of two of at least n."""
    i = tl.arange(0, SEQUENCES)
    inside = i < n
    # no load waits for another
    valid = tl.load(packed.valid + packed.COUNT)
    first = tl.load(packed.starts + i, mask=inside, other=0)
    last = tl.load(packed.starts + i + 1, mask=inside, other=0)
    length = tl.load(packed.lens + i, mask=inside, other=0)
    first = tl.associative_scan(tl.minimum(tl.maximum(first, 0), rows), 0, _larger)
    last = tl.maximum(first, tl.minimum(last, rows))
    length = tl.minimum(tl.maximum(length, 0), capacity)
    has = (first[None, :] <= row[:, None]) & (row[:, None] < last[None, :])
    has = has & (i < tl.minimum(valid, n))[None, :]
    return PackedRows(
        tl.sum(tl.where(has, i[None, :], 0), 1),
        tl.sum(tl.where(has, first[None, :], 0), 1),
        tl.sum(tl.where(has, last[None, :], 0), 1),
        tl.sum(tl.where(has, length[None, :], 0), 1),
    )

"""Sequences of packed query rows, found by a program itself: from starts and lengths, or a plan.

Without a plan, for calls of few rows and few sequences, a program compares every row with every
sequence. The rule is that of ``schedule``: starts are clipped to the rows there are, and to no less
than those before. A plan (``types.serving.plan``) has the sequence of every row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.types.serving.plan import PackedRow
from ejkernel.types.serving.problem import RaggedProblem
from ejkernel.types.serving.schedule import columns_of

SEQUENCE, FIRST, END, LENGTH = map(tl.constexpr, columns_of(PackedRow))  # rows of a plan


class PackedSequences(NamedTuple):
    """Operands that say which rows a sequence has.

    Attributes:
        starts, lens: first rows ``[n + 1]``, context lengths ``[n]``; None with a plan.
        valid: an array whose element COUNT is the number of valid sequences; None with a plan.
        plan: ``[4, T]``, a ``PackedRow`` of every row; None without a plan.
    """

    starts: Any
    lens: Any
    valid: Any
    plan: Any
    COUNT: int


class PackedRows(NamedTuple):
    """The sequence of each row, its first row, the row past its last, its clipped length.

    Rows of no sequence have ``last`` 0.
    """

    sequence: Any
    first: Any
    last: Any
    length: Any


def packed_sequences(launch: Any) -> PackedSequences:
    """Returns the operands of a launch that say which rows a sequence has."""
    if launch.has("packed_rows"):
        return PackedSequences(None, None, None, launch.operand("packed_rows"), COUNT=0)
    # the last element is the number of valid sequences
    count = (launch.shape("valid") or (1,))[0] - 1
    operands = map(launch.operand, ("starts", "lens", "valid"))
    return PackedSequences(*operands, None, COUNT=count)


def packed_operands(problem: RaggedProblem) -> tuple[str, ...]:
    """Returns the names of the arrays that ``packed_sequences`` reads."""
    return ("packed_rows",) if problem.planned else ("starts", "lens", "valid")


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _load_packed_rows(row, plan, rows, capacity):
    """Returns the ``PackedRows`` of rows ``row``, as a plan has them."""
    inside = row < rows
    sequence = tl.load(plan + SEQUENCE * rows + row, mask=inside, other=0)
    first = tl.load(plan + FIRST * rows + row, mask=inside, other=0)
    last = tl.load(plan + END * rows + row, mask=inside, other=0)
    length = tl.load(plan + LENGTH * rows + row, mask=inside, other=0)
    return PackedRows(sequence, first, last, tl.minimum(length, capacity))


@triton.jit
def _compare_rows(row, packed, n, rows, capacity, SEQUENCES: tl.constexpr):
    """Returns the ``PackedRows`` of rows ``row``, compared with all sequences."""
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


@triton.jit
def find_packed_rows(row, packed, n, rows, capacity, SEQUENCES: tl.constexpr):
    """Returns the ``PackedRows`` of rows ``row``; SEQUENCES: a power of two of at least n."""
    if packed.plan is not None:
        rows_of = _load_packed_rows(row, packed.plan, rows, capacity)
    else:
        rows_of = _compare_rows(row, packed, n, rows, capacity, SEQUENCES)
    return rows_of

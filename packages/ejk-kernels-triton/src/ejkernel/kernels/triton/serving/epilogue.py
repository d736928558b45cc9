"""The end of a row of attention over pages: its sinks, its scale of values, its log-sum-exp.

Prefill, decoding and the merge of partial results end alike: a row has the state (m, l), its
largest logit in base 2 and the sum of exponentials relative to it, and an accumulator that is
multiplied by one factor.
"""

from __future__ import annotations

from ejkernel.kernels.triton.common.softmax import LN2, LOG2E
from ejkernel.kernels.triton.language import tl, triton


@triton.jit
def add_sinks(m, l, sinks, b, heads, inside):  # noqa: E741
    """Returns (alive, weight, top, total), float32, of rows with state (m, l) and their sinks.

    ``top`` is the larger of m and the sinks, ``weight`` the factor from sums relative to m to sums
    relative to top, ``total`` the sum of exponentials relative to top. Rows that saw nothing are
    not ``alive``; they have m 0 and l 1.
    """
    alive = l != 0.0  # NaN is: it must not become a row that saw nothing
    base = tl.where(alive, m, 0.0)
    total = tl.where(alive, l, 1.0)
    weight = total * 0.0 + 1.0
    top = base
    if sinks.array is not None:
        s = tl.arange(0, sinks.PADDED)
        mask = inside[:, None] & (s < sinks.count)[None, :]
        at = sinks.array + b * sinks.row + heads[:, None] * sinks.count + s[None, :]
        logits = tl.load(at, mask=mask, other=float("-inf"))
        logits = tl.minimum(logits.to(tl.float32) * LOG2E, 3.4028234e38)  # finite ones stay so
        top = tl.maximum(base, tl.max(logits, 1))
        weight = tl.exp2(base - top)
        total = total * weight + tl.sum(tl.exp2(logits - top[:, None]), 1)
    return alive, weight, top, total


@triton.jit
def row_lse(m, l, sinks, b, heads, inside):  # noqa: E741
    """Natural log-sum-exp, float32, of rows with state (m, l); -inf for empty rows."""
    alive, _, top, total = add_sinks(m, l, sinks, b, heads, inside)
    return tl.where(alive, (top + tl.log2(total)) * LN2, float("-inf"))


@triton.jit
def load_head_scale(scale, b, hk):
    """Loads the float32 factor of a head of a sequence, 1 if there is none."""
    if scale.array is not None:
        factor = tl.load(scale.array + (b * scale.row + hk * scale.head)).to(tl.float32)
    else:
        factor = 1.0
    return factor


@triton.jit
def compute_output_factor(m, l, sinks, b, heads, inside, value_scale):  # noqa: E741
    """Returns the float32 factor of accumulators of rows with state (m, l); 0 for empty rows."""
    alive, factor, _, total = add_sinks(m, l, sinks, b, heads, inside)
    return tl.where(alive, factor / total * value_scale, 0.0)


@triton.jit
def store_rows(target, rows, acc, acc_tail, inside, layout):
    """Stores both parts of every row, like values of ``layout``; ``rows`` are int64 indices."""
    where = target + rows[:, None] * layout.DIM
    column = tl.arange(0, layout.MAIN)
    mask = inside[:, None] & (column < layout.DIM)[None, :]
    tl.store(where + column[None, :], acc.to(target.dtype.element_ty), mask=mask)
    if layout.TAIL > 0:
        column = layout.MAIN + tl.arange(0, layout.TAIL)
        mask = inside[:, None] & (column < layout.DIM)[None, :]
        tl.store(where + column[None, :], acc_tail.to(target.dtype.element_ty), mask=mask)


@triton.jit
def store_output(
    o, lse, rows, m, l, acc, acc_tail, sinks, b, heads, inside, value_scale, layout  # noqa: E741
):  # fmt: skip
    """Stores rows of the output, and their log-sum-exp unless ``lse`` is None."""
    factor = compute_output_factor(m, l, sinks, b, heads, inside, value_scale)
    if layout.TAIL > 0:
        acc_tail = acc_tail * factor[:, None]
    store_rows(o, rows, acc * factor[:, None], acc_tail, inside, layout)
    if lse is not None:
        tl.store(lse + rows, row_lse(m, l, sinks, b, heads, inside), mask=inside)


@triton.jit
def store_partial(partial, rows, m, l, acc, acc_tail, inside, layout):  # noqa: E741
    """Stores the state and the accumulator of rows as partial results."""
    tl.store(partial.m + rows, m, mask=inside)
    tl.store(partial.l + rows, l, mask=inside)
    store_rows(partial.acc, rows, acc, acc_tail, inside, layout)

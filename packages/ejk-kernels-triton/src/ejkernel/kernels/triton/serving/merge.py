"""Paged decoding, second of two kernels: partial results of a sequence become its output.

Math, over the parts i of one row, in float32 (base 2 logits):

    M = max(m_i, sinks);  L = sum_i l_i 2^(m_i - M) + sum_s 2^(sink_s - M)
    o = v_scale / L * sum_i acc_i 2^(m_i - M)

(acc_i l_i for acc_i where parts are kept as averages.)

Work split: one program per (batch row, query token, query head), or several with some columns each
where a row has many parts; parts in their fixed order, so that the same lengths and launch give the
same bits. The sinks enter here, once.

Bound: reading the parts, at most (shares + batch) * heads * dv floats: 3 MB against 2.15 GB of
cache at the shape named in ``decode``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.common.softmax import LN2, LOG2E
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import power_of_two, struct
from ejkernel.kernels.triton.serving.groups import Partial
from ejkernel.kernels.triton.serving.launch import (
    PagedLaunch,
    expected_parts,
    parts_at_once,
    sequential,
)
from ejkernel.types.serving.problem import ITEMSIZE

FEW = tl.constexpr(8)  # parts that a thread holds, one after the other


@triton.jit
def whole_sums(m, l, sinks, b, heads, inside):  # noqa: E741
    """(alive, weight, top, total), float32, of rows with state (m, l) and the sinks of their heads.

    Sums relative to m count ``weight`` of those relative to ``top``, the larger of m and the sinks;
    ``total`` is relative to top. Rows that saw nothing are not ``alive``: 0 and 1 for them.
    """
    alive = l > 0.0
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
def number_of(scale, b, hk):
    """float32 factor of a head of a sequence, 1 if there is none."""
    if scale.array is not None:
        number = tl.load(scale.array + (b * scale.row + hk * scale.head)).to(tl.float32)
    else:
        number = 1.0
    return number


@triton.jit
def finish(m, l, sinks, b, heads, inside, number):  # noqa: E741
    """float32 factor of the unnormalised outputs of rows with state (m, l); 0 for empty rows.

    ``number``: that of their values.
    """
    alive, factor, _, total = whole_sums(m, l, sinks, b, heads, inside)
    return tl.where(alive, factor / total * number, 0.0)


@triton.jit
def _share_of(t, each, extra):
    """The share that holds tile t when the first ``extra`` shares have ``each + 1`` tiles."""
    cut = extra * (each + 1)
    return tl.where(t < cut, t // (each + 1), extra + (t - cut) // tl.maximum(each, 1))


@triton.jit
def parts_of(
    b, starts, batch, shares, SPLITS: tl.constexpr, OPENING: tl.constexpr,
):  # fmt: skip
    """(first slot, number of parts) of a sequence."""
    if SPLITS > 0:
        slot = b * SPLITS
        count = SPLITS
    else:
        start = tl.load(starts + b)
        stop = tl.load(starts + b + 1)
        total = tl.load(starts + batch)
        each = total // shares
        extra = total % shares
        first = _share_of(start + OPENING, each, extra)
        slot = first + b
        count = tl.where(stop > start, _share_of(stop - 1, each, extra) - first + 1, 0)
    return slot, count


@triton.jit
def part_logit(m, slopes, l):  # noqa: E741
    """The largest logit of a part; -inf where nothing was seen, be the slope no number."""
    return tl.where(l != 0.0, m * slopes, float("-inf"))


@triton.jit
def average(l):  # noqa: E741
    """Returns the factor that makes the accumulators of a part averages, which fit float16."""
    seen = l != 0.0
    return tl.where(seen, 1.0 / tl.where(seen, l, 1.0), 0.0)


@triton.jit
def _product(a, b):
    """a * b, rounded before it is added to anything.

    In a sum across lanes the compiler would fuse it with the first addition: each lane adds its own
    exact product to its neighbour's rounded one, and lanes that hold the same sum differ.
    """
    a, b = tl.broadcast(a, b)
    return tl.fma(a, b, tl.zeros(a.shape, tl.float32))


@triton.jit
def _merge_few(
    acc_in, m_in, l_in, first, count, step, column, DV: tl.constexpr, PARTS: tl.constexpr,
    AVERAGES: tl.constexpr,
):  # fmt: skip
    """No sum crosses lanes, and all loads are under way together."""
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)  # noqa: E741
    acc = tl.zeros(column.shape, tl.float32)
    one = tl.arange(0, 1)
    for i in range(0, count, PARTS):
        accs = ()
        ms = ()
        ls = ()
        top = m
        for n in tl.static_range(PARTS):
            inside = one < count - i - n
            at = first + (i + n) * step
            mask = (column < DV) & inside
            accs += (tl.load(acc_in + at * DV + column, mask=mask, other=0.0).to(tl.float32),)
            ms += (tl.load(m_in + at + one, mask=inside, other=float("-inf")),)
            ls += (tl.load(l_in + at + one, mask=inside, other=0.0),)
        for n in tl.static_range(PARTS):
            top = tl.maximum(top, ms[n])
        base = tl.where(top == float("-inf"), 0.0, top)
        alpha = tl.exp2(m - base)
        m = top
        l = l * alpha  # noqa: E741
        acc = acc * alpha
        for n in tl.static_range(PARTS):
            weight = tl.exp2(ms[n] - base)
            total = ls[n] * weight
            l += total  # noqa: E741
            acc += accs[n] * (total if AVERAGES else weight)
    return m, l, acc


@triton.jit
def _merge_many(
    acc_in, m_in, l_in, first, count, step, column, DV: tl.constexpr, PARTS: tl.constexpr,
    AVERAGES: tl.constexpr,
):  # fmt: skip
    part = tl.arange(0, PARTS).to(tl.int64)
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)  # noqa: E741
    acc = tl.zeros(column.shape, tl.float32)
    # a constant number of elements from each other: one address in registers
    m_in += first + part * step
    l_in += first + part * step
    acc_in += first * DV + (part * (step * DV))[:, None] + column[None, :]
    for i in range(0, count, PARTS):
        inside = i + part < count
        acc_i = tl.load(acc_in, mask=inside[:, None] & (column < DV)[None, :], other=0.0)
        m_i = tl.load(m_in, mask=inside, other=float("-inf"))
        l_i = tl.load(l_in, mask=inside, other=0.0)
        m_in += PARTS * step
        l_in += PARTS * step
        acc_in += PARTS * step * DV
        top = tl.maximum(m, tl.max(m_i, 0))
        base = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(m_i - base)
        alpha = tl.exp2(m - base)
        m = top
        total = _product(l_i, weight)
        l = l * alpha + tl.sum(total, 0)  # noqa: E741
        factor = total if AVERAGES else weight
        acc_i = _product(acc_i.to(tl.float32), factor[:, None])
        acc = acc * tl.sum(alpha, 0) + tl.sum(acc_i, 0)
    return m, l, acc


@triton.jit
def merge_row(
    acc_in, m_in, l_in, first, count, step, column, DV: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """(m ``[1]``, l ``[1]``, acc of ``column``) of ``count`` parts: rows ``first + i * step``.

    float16 ones are averages, the others sums.
    """
    AVERAGES: tl.constexpr = acc_in.dtype.element_ty == tl.float16
    if PARTS <= FEW:
        m, l, acc = _merge_few(  # noqa: E741
            acc_in, m_in, l_in, first, count, step, column, DV, PARTS, AVERAGES
        )
    else:
        m, l, acc = _merge_many(  # noqa: E741
            acc_in, m_in, l_in, first, count, step, column, DV, PARTS, AVERAGES
        )
    return m, l, acc


@triton.jit
def paged_merge(
    partial,
    starts,
    v_scale,
    sinks,
    o,
    lse_out,
    batch,
    shares,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    OPENING: tl.constexpr,
):
    """Writes the output of some columns of one row."""
    ROWS: tl.constexpr = TOKENS * HEADS
    chunk = tl.program_id(0) % CHUNKS
    b = tl.program_id(0) // (CHUNKS * ROWS)
    row = tl.program_id(0) // CHUNKS % ROWS
    h = row % HEADS
    slot, count = parts_of(b, starts, batch, shares, SPLITS, OPENING)
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    # asked for here: behind the parts it would be one more wait for the memory
    number = number_of(v_scale, b, h // GROUP)
    m, l, acc = merge_row(  # noqa: E741
        partial.acc, partial.m, partial.l, slot.to(tl.int64) * ROWS + row, count, ROWS, column, DV,
        PARTS,
    )  # fmt: skip
    one = tl.arange(0, 1)
    factor = finish(m, l, sinks, b, h + one, one < 1, number)
    row += b.to(tl.int64) * ROWS
    if lse_out is not None:
        alive, _, top, total = whole_sums(m, l, sinks, b, h + one, one < 1)
        lse = tl.where(alive, (top + tl.log2(total)) * LN2, float("-inf"))
        tl.store(lse_out + row + one, lse, mask=one + chunk < 1)
    tl.store(
        o + row * DV + column, (acc * tl.sum(factor, 0)).to(o.dtype.element_ty), mask=column < DV
    )


@dataclass(frozen=True)
class PagedMerge(PagedLaunch):
    """Launch of ``paged_merge``.

    Results: o ``[b, rows, dv]`` in the query's dtype, and lse ``[b, rows]`` if the call returns it.
    """

    kernel = paged_merge
    batching: ClassVar = sequential("acc m l starts v_scale sink")

    def outputs(self):
        p = self.problem
        lse = struct("float32", p.batch, self.rows) if p.return_lse else None
        return {"o": struct(p.query_dtype, p.batch, self.rows, p.value_dim), "lse_out": lse}

    @property
    def columns(self) -> tuple[int, int]:
        """Columns of a program, and programs for a row.

        Where a sequence has many partial results a program has few columns, and loads them at once.
        """
        columns = max(16, power_of_two(self.problem.value_dim))
        each = max(min(columns, 4096 // power_of_two(self.expected)), min(columns, 32))
        return each, columns // each

    @property
    def expected(self) -> int:
        """Partial results of a sequence."""
        return self.tiles.splits or expected_parts(self.shares, self.problem.batch)

    @property
    def parts(self) -> tuple[int, int]:
        """Partial results that a program loads at once, and its warps."""
        return parts_at_once(self.columns[0], self.expected, ITEMSIZE[self.part_dtype])

    def grid(self, target):
        return (self.problem.batch * self.rows * self.columns[1],)

    def options(self, target):
        return {"num_warps": self.parts[1], "num_stages": 1}

    def arguments(self, target):
        p, t, (columns, chunks) = self.problem, self.tiles, self.columns
        return {
            "partial": Partial(*map(self.operand, ("acc", "m", "l"))),
            "v_scale": self.scale("v_scale"),
            "sinks": self.sinks(),
            "batch": p.batch,
            "shares": self.shares,
            "HEADS": p.heads,
            "TOKENS": p.tokens,
            "GROUP": p.group,
            "DV": p.value_dim,
            "COLUMNS": columns,
            "CHUNKS": chunks,
            "PARTS": self.parts[0],
            "SPLITS": t.splits or 0,
            "OPENING": 0 if t.splits else t.opening,
        }

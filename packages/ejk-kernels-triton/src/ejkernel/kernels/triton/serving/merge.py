"""Paged decoding, second of two kernels: merges the partial results of a sequence.

Math, over the partial results i of one row, in float32 (base 2 logits):

    M = max(m_i, sinks);  L = sum_i l_i 2^(m_i - M) + sum_s 2^(sink_s - M)
    o = v_scale / L * sum_i acc_i 2^(m_i - M)

(acc_i l_i for acc_i where partial results are averages, in float16.)

Work split: one program per (batch row, query token, query head), or several with some columns each
where a row has many partial results. Their order is fixed, so that the same lengths and launch give
the same bits. The sinks enter here, once.

Bound: reading the partial results, at most (ranges + batch) * heads * dv floats: 3 MB against
2.15 GB of cache at the shape named in ``decode``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import power_of_two, struct
from ejkernel.kernels.triton.serving.epilogue import (
    compute_output_factor,
    load_head_scale,
    row_lse,
)
from ejkernel.kernels.triton.serving.finished import count_finished, wait_for_programs
from ejkernel.kernels.triton.serving.groups import Partial
from ejkernel.kernels.triton.serving.launch import (
    PagedLaunch,
    expected_partials,
    partials_at_once,
    sequential,
)
from ejkernel.types.serving.problem import ITEMSIZE

POLLS = 1024  # looks at a counter, about 0.5 us each, before a program gives up waiting
LOADED_ELEMENTS = 8192  # float32 elements of partial results that the last program loads at once
FEW = tl.constexpr(8)  # partial results that a thread holds, one after the other


@triton.jit
def find_range(t, tiles, extra):
    """Returns the range of tile t; the first ``extra`` ranges have ``tiles + 1`` tiles."""
    longer = extra * (tiles + 1)  # tiles of these
    return tl.where(t < longer, t // (tiles + 1), extra + (t - longer) // tl.maximum(tiles, 1))


@triton.jit
def find_slots(
    b, starts, batch, ranges, SPLITS: tl.constexpr, SETUP_TILES: tl.constexpr,
):  # fmt: skip
    """Returns (first slot, number of partial results) of a sequence."""
    if SPLITS > 0:
        slot = b * SPLITS
        count = SPLITS
    else:
        start = tl.load(starts + b)
        stop = tl.load(starts + b + 1)
        total = tl.load(starts + batch)
        tiles = total // ranges
        extra = total % ranges
        first = find_range(start + SETUP_TILES, tiles, extra)
        slot = first + b
        count = tl.where(stop > start, find_range(stop - 1, tiles, extra) - first + 1, 0)
    return slot, count


@triton.jit
def partial_logit(m, slopes, l):  # noqa: E741
    """Returns the largest logit of a partial result; -inf where no key was seen, for any slope."""
    return tl.where(l != 0.0, m * slopes, float("-inf"))


@triton.jit
def average_factor(l):  # noqa: E741
    """Returns the factor that makes accumulators averages, which fit float16."""
    seen = l != 0.0
    return tl.where(seen, 1.0 / tl.where(seen, l, 1.0), 0.0)


@triton.jit
def _multiply_rounded(a, b):
    """Returns a * b, rounded before it is added to anything.

    In a sum across lanes the compiler would fuse it with the first addition: each lane would add
    its exact value to its neighbour's rounded one, and lanes that hold the same sum would differ.
    """
    a, b = tl.broadcast(a, b)
    return tl.fma(a, b, tl.zeros(a.shape, tl.float32))


@triton.jit
def _for_columns(x, acc):
    """Returns values of rows for the columns of ``acc``, which is of one row or of several."""
    return x[:, None] if len(acc.shape) == 2 else x


@triton.jit
def _add_partials(m, l, acc, ms, ls, accs, PARTS: tl.constexpr, AVERAGES: tl.constexpr):  # noqa: E741
    """Adds PARTS partial results to rows with state (m, l) and accumulator ``acc``."""
    top = m
    for n in tl.static_range(PARTS):
        top = tl.maximum(top, ms[n])
    base = tl.where(top == float("-inf"), 0.0, top)
    alpha = tl.exp2(m - base)
    l = l * alpha  # noqa: E741
    acc = acc * _for_columns(alpha, acc)
    for n in tl.static_range(PARTS):
        weight = tl.exp2(ms[n] - base)
        total = ls[n] * weight
        l += total  # noqa: E741
        acc += accs[n] * _for_columns(total if AVERAGES else weight, acc)
    return top, l, acc


@triton.jit
def _merge_few(
    acc_in, m_in, l_in, first, count, step, column, DV: tl.constexpr, PARTS: tl.constexpr,
    AVERAGES: tl.constexpr,
):  # fmt: skip
    """Merges PARTS at a time. No sum crosses lanes, and all loads are in flight together."""
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)  # noqa: E741
    acc = tl.zeros(column.shape, tl.float32)
    lane = tl.arange(0, 1)
    for i in range(0, count, PARTS):
        accs = ()
        ms = ()
        ls = ()
        for n in tl.static_range(PARTS):
            inside = lane < count - i - n
            at = first + (i + n) * step
            mask = (column < DV) & inside
            accs += (tl.load(acc_in + at * DV + column, mask=mask, other=0.0).to(tl.float32),)
            ms += (tl.load(m_in + at + lane, mask=inside, other=float("-inf")),)
            ls += (tl.load(l_in + at + lane, mask=inside, other=0.0),)
        m, l, acc = _add_partials(m, l, acc, ms, ls, accs, PARTS, AVERAGES)  # noqa: E741
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
        total = _multiply_rounded(l_i, weight)
        l = l * alpha + tl.sum(total, 0)  # noqa: E741
        factor = total if AVERAGES else weight
        acc_i = _multiply_rounded(acc_i.to(tl.float32), factor[:, None])
        acc = acc * tl.sum(alpha, 0) + tl.sum(acc_i, 0)
    return m, l, acc


@triton.jit
def merge_row(
    acc_in, m_in, l_in, first, count, step, column, DV: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Returns (m ``[1]``, l ``[1]``, acc) of ``count`` partial results, rows ``first + i * step``.

    acc has the columns ``column``. float16 results are averages, the others sums.
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
def merge_rows(
    acc_in, m_in, l_in, rows, inside, count, step, column, DV: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Returns (m, l, acc) of several rows, each of ``count`` partial results ``step`` rows apart.

    ``rows``: the first of each. No sum crosses lanes, and PARTS loads are in flight together.
    """
    AVERAGES: tl.constexpr = acc_in.dtype.element_ty == tl.float16
    m = tl.full(rows.shape, float("-inf"), tl.float32)
    l = tl.zeros(rows.shape, tl.float32)  # noqa: E741
    acc = tl.zeros([rows.shape[0], column.shape[0]], tl.float32)
    for i in range(0, count, PARTS):
        accs = ()
        ms = ()
        ls = ()
        for n in tl.static_range(PARTS):
            valid = inside & (i + n < count)
            at = rows + (i + n) * step
            mask = valid[:, None] & (column < DV)[None, :]
            acc_at = acc_in + at[:, None] * DV + column[None, :]
            accs += (tl.load(acc_at, mask=mask, other=0.0).to(tl.float32),)
            ms += (tl.load(m_in + at, mask=valid, other=float("-inf")),)
            ls += (tl.load(l_in + at, mask=valid, other=0.0),)
        m, l, acc = _add_partials(m, l, acc, ms, ls, accs, PARTS, AVERAGES)  # noqa: E741
    return m, l, acc


@triton.jit
def store_merged_row(
    o, lse_out, row, m, l, acc, column, chunk, sinks, b, h, value_scale, DV: tl.constexpr  # noqa: E741
):  # fmt: skip
    """Stores columns of a row of the output, and with the first ``chunk`` of them its lse, if any.

    m and l are ``[1]``.
    """
    lane = tl.arange(0, 1)
    factor = compute_output_factor(m, l, sinks, b, h + lane, lane < 1, value_scale)
    if lse_out is not None:
        lse = row_lse(m, l, sinks, b, h + lane, lane < 1)
        tl.store(lse_out + row + lane, lse, mask=lane + chunk < 1)
    acc = (acc * tl.sum(factor, 0)).to(o.dtype.element_ty)
    tl.store(o + row * DV + column, acc, mask=column < DV)


@triton.jit
def store_merged_rows(
    o, lse_out, rows, m, l, acc, column, sinks, b, heads, inside, value_scale, DV: tl.constexpr  # noqa: E741
):  # fmt: skip
    """Stores rows of the output, and their lse, if any."""
    factor = compute_output_factor(m, l, sinks, b, heads, inside, value_scale)
    acc = (acc * factor[:, None]).to(o.dtype.element_ty)
    mask = inside[:, None] & (column < DV)[None, :]
    tl.store(o + rows[:, None] * DV + column[None, :], acc, mask=mask)
    if lse_out is not None:
        tl.store(lse_out + rows, row_lse(m, l, sinks, b, heads, inside), mask=inside)


@triton.jit
def merge_columns(
    partial, v_scale, sinks, o, lse_out, b, row, h, slot, count, chunk, ROWS: tl.constexpr,
    GROUP: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes the output of some columns of a row of sequence ``b``, and with the first its lse.

    ``slot``, ``count``: the first of its partial results, and their number.
    """
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    # loaded here: after the partial results it would be one more wait for memory
    value_scale = load_head_scale(v_scale, b, h // GROUP)
    m, l, acc = merge_row(  # noqa: E741
        partial.acc, partial.m, partial.l, slot.to(tl.int64) * ROWS + row, count, ROWS, column, DV,
        PARTS,
    )  # fmt: skip
    row += b.to(tl.int64) * ROWS
    store_merged_row(o, lse_out, row, m, l, acc, column, chunk, sinks, b, h, value_scale, DV)


@triton.jit
def merge_block(
    partial, sinks, o, lse_out, b, partial_rows, rows, heads, inside, count, step, value_scale,
    DV: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes ``rows`` of the output, and of its lse if there is one, with all of their columns.

    Each has ``count`` partial results, ``step`` rows apart, the first of them ``partial_rows``.
    """
    column = tl.arange(0, COLUMNS)
    m, l, acc = merge_rows(  # noqa: E741
        partial.acc, partial.m, partial.l, partial_rows, inside, count, step, column, DV, PARTS
    )
    store_merged_rows(o, lse_out, rows, m, l, acc, column, sinks, b, heads, inside, value_scale, DV)


@triton.jit
def merge_by_last(
    partial, v_scale, sinks, o, lse_out, counters, b, hk, chunk, layout, DV: tl.constexpr,
    SPLITS: tl.constexpr, tile,
):  # fmt: skip
    """Writes the rows of a program's block of sequence ``b``, in the last program that has them.

    All splits of a block count themselves in one of the ``counters``.
    """
    GROUP: tl.constexpr = layout.ALL // layout.KV
    ROWS: tl.constexpr = layout.TOKENS * layout.ALL
    value_scale = load_head_scale(v_scale, b, hk)
    if count_finished(counters + hk * layout.CHUNKS + chunk) == SPLITS - 1:
        member = chunk * layout.BLOCK + tl.arange(0, tile.MEMBERS)
        heads = hk * GROUP + member % GROUP
        row = (member // GROUP * layout.ALL + heads).to(tl.int64)
        merge_block(
            partial, sinks, o, lse_out, b, b.to(tl.int64) * SPLITS * ROWS + row,
            b.to(tl.int64) * ROWS + row, heads, member < GROUP * layout.TOKENS, SPLITS, ROWS,
            value_scale, DV, tile.COLUMNS, tile.PARTS,
        )  # fmt: skip


@triton.jit
def merge_at_end(
    partial, v_scale, sinks, o, lse_out, counters, b, hk, chunk, split, layout, DV: tl.constexpr,
    SPLITS: tl.constexpr, tile,
):  # fmt: skip
    """Writes rows of a program of the launch that stores the partial results of sequence ``b``.

    All its splits share the rows of a program's block, which has one of the ``counters``.
    """
    GROUP: tl.constexpr = layout.ALL // layout.KV
    ROWS: tl.constexpr = layout.TOKENS * layout.ALL
    is_complete, is_alone = wait_for_programs(
        counters + hk * layout.CHUNKS + chunk, SPLITS, tile.POLLS
    )
    first = chunk * layout.BLOCK
    end = tl.where(is_complete, tl.minimum(first + layout.BLOCK, GROUP * layout.TOKENS), 0)
    first += tl.where(is_alone, 0, split)
    step = tl.where(is_alone, 1, SPLITS)
    for member in tl.range(first, end, step):
        h = hk * GROUP + member % GROUP
        row = member // GROUP * layout.ALL + h
        for columns in range(0, tile.CHUNKS):
            merge_columns(
                partial, v_scale, sinks, o, lse_out, b, row, h, b * SPLITS, SPLITS, columns, ROWS,
                GROUP, DV, tile.COLUMNS, tile.PARTS,
            )  # fmt: skip


@triton.jit
def paged_merge(
    partial,
    starts,
    v_scale,
    sinks,
    o,
    lse_out,
    batch,
    ranges,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SETUP_TILES: tl.constexpr,
):
    """Writes the output of some columns of one row."""
    ROWS: tl.constexpr = TOKENS * HEADS
    chunk = tl.program_id(0) % CHUNKS
    b = tl.program_id(0) // (CHUNKS * ROWS)
    row = tl.program_id(0) // CHUNKS % ROWS
    h = row % HEADS
    slot, count = find_slots(b, starts, batch, ranges, SPLITS, SETUP_TILES)
    merge_columns(
        partial, v_scale, sinks, o, lse_out, b, row, h, slot, count, chunk, ROWS, GROUP, DV,
        COLUMNS, PARTS,
    )  # fmt: skip


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
        block = max(min(columns, 4096 // power_of_two(self.expected)), min(columns, 32))
        return block, columns // block

    @property
    def expected(self) -> int:
        """Partial results of a sequence."""
        return self.tiles.splits or expected_partials(self.ranges, self.problem.batch)

    @property
    def parts(self) -> tuple[int, int]:
        """Partial results that a program loads at once, and its warps."""
        return partials_at_once(self.columns[0], self.expected, ITEMSIZE[self.partial_dtype])

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
            "ranges": self.ranges,
            "HEADS": p.heads,
            "TOKENS": p.tokens,
            "GROUP": p.group,
            "DV": p.value_dim,
            "COLUMNS": columns,
            "CHUNKS": chunks,
            "PARTS": self.parts[0],
            "SPLITS": t.splits or 0,
            "SETUP_TILES": 0 if t.splits else t.setup_tiles,
        }

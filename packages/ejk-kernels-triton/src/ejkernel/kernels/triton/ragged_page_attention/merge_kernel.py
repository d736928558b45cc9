"""Ragged attention, last kernel: partial results of decoded rows and of cut tiles to the output.

The sum of ``page_attention.merge_kernel``. Few programs take the pieces in turns: first each
(sequence, query head), then each (slot, kv head, LINES rows of a tile), of which those of the first
part of a tile are work. Writes into the output of the prefill kernel, which has all other rows;
these, and the cache of a call that writes one, are copied where XLA put a result elsewhere
(``in_place``).
"""

from __future__ import annotations

from ejkernel.kernels.triton.common.in_place import copy_if_elsewhere, is_elsewhere
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.page_attention.merge_kernel import (
    finish,
    merge_row,
    number_of,
    parts_of,
)
from ejkernel.kernels.triton.ragged_page_attention.prefill_kernel import tile_rows
from ejkernel.kernels.triton.ragged_page_attention.schedule_kernel import find


@triton.jit
def _copy_other_rows(
    source, o, rows, d_counts, first_rows, work, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Copies the rows that are not merged."""
    column = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        # the sequence is the one after those that end at or before the row
        r, _ = find(row, work, n, LANES)
        r = tl.minimum(r, n - 1)
        slots = tl.load(work + 4 * n + r) - tl.load(work + 4 * n + r - 1, mask=r > 0, other=0)
        is_merged = (tl.load(d_counts + r) > 0) | (slots > 0)
        is_merged = is_merged & (row >= tl.load(first_rows + r)) & (row < tl.load(work + r))
        if not is_merged:
            start = (tl.zeros([], tl.int64) + row) * WIDTH
            for begin in range(0, WIDTH, BLOCK):
                i = begin + column
                x = tl.load(source + start + i, mask=i < WIDTH)
                tl.store(o + start + i, x, mask=i < WIDTH)


@triton.jit
def ragged_merge(
    d_acc,
    d_m,
    d_l,
    d_starts,
    d_counts,
    first_rows,
    work,
    facts,
    p_acc,
    p_m,
    p_l,
    v_scale,
    sinks,
    given,
    cache_in,
    o,
    cache,
    n,
    rows,
    cache_size,
    shares,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    MEMBERS: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    LINES: tl.constexpr,
    LANES: tl.constexpr,
    COPIED: tl.constexpr,
):
    if cache_in is not None:
        copy_if_elsewhere(cache_in, cache, cache_size, COPIED)
    if is_elsewhere(given, o):
        _copy_other_rows(
            given, o, rows, d_counts, first_rows, work, n, HEADS * D, COPIED, LANES
        )  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    UNITS: tl.constexpr = KV_HEADS * CHUNKS
    LANE: tl.constexpr = ROWS // LINES
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, COLUMNS)
    slots = tl.load(facts + 3)
    for x in tl.range(pid, n * HEADS, programs):
        h = x % HEADS
        b = x // HEADS
        tokens = tl.load(d_counts + b)
        start = tl.load(first_rows + b)
        slot, parts = parts_of(b, d_starts, n, shares, 0, 0)
        number = number_of(v_scale, 0, h // GROUP)
        for token in range(0, tokens):
            kept = slot.to(tl.int64) * (TOKENS * HEADS) + token * HEADS + h
            m, l, acc = merge_row(  # noqa: E741
                d_acc, d_m, d_l, kept, parts, TOKENS * HEADS, column, D, PARTS
            )
            one = tl.arange(0, 1)
            factor = finish(m, l, sinks, 0, h + one, one < 1, number)
            row = (start + token).to(tl.int64) * HEADS + h
            acc = (acc * tl.sum(factor, 0)).to(o.dtype.element_ty)
            tl.store(o + row * D + column, acc, mask=column < D)
    for x in tl.range(pid, slots * (UNITS * LANE), programs):
        line = x % LANE
        unit = (x // LANE) % UNITS
        slot = x // (LANE * UNITS)
        r, before = find(slot, work + 4 * n, n, LANES)
        parts = tl.load(work + 3 * n + r)
        if (slot - before) % parts == 0:
            first = tl.load(first_rows + r)
            count = tl.load(work + r) - first
            hk = unit // CHUNKS
            member = line * LINES + tl.arange(0, LINES)
            _, heads, row, inside = tile_rows(
                member, (slot - before) // parts, unit % CHUNKS, first, count, hk,
                HEADS, GROUP, TILE, MEMBERS,
            )  # fmt: skip
            m = tl.full([LINES], float("-inf"), tl.float32)
            l = tl.zeros([LINES], tl.float32)  # noqa: E741
            acc = tl.zeros([LINES, COLUMNS], tl.float32)
            for i in range(0, parts):
                kept = ((slot + i).to(tl.int64) * UNITS + unit) * ROWS + member
                m_i = tl.load(p_m + kept)
                acc_i = tl.load(
                    p_acc + kept[:, None] * D + column[None, :], mask=(column < D)[None, :],
                    other=0.0,
                )  # fmt: skip
                top = tl.maximum(m, m_i)
                base = tl.where(top == float("-inf"), 0.0, top)
                weight = tl.exp2(m_i - base)
                alpha = tl.exp2(m - base)
                m = top
                l = l * alpha + tl.load(p_l + kept) * weight  # noqa: E741
                acc = acc * alpha[:, None] + acc_i * weight[:, None]
            factor = finish(m, l, sinks, 0, heads, inside, number_of(v_scale, 0, hk))
            acc = (acc * factor[:, None]).to(o.dtype.element_ty)
            where = o + row[:, None] * D + column[None, :]
            tl.store(where, acc, mask=inside[:, None] & (column < D)[None, :])

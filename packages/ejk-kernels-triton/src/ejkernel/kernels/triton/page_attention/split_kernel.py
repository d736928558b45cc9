"""Paged decoding, first of two kernels: partial attention over shares of the cache.

Math, per batch row and query head over the visible keys j (base 2 inside):

    x_j = scale * k_scale * q . k_j, soft-capped;  m = max x_j;  l = sum exp(x_j - m)
    acc = sum exp(x_j - m) v_j                      (unnormalised: the merge divides)

Work split: the key tiles of all sequences, laid end to end, are cut into ``shares`` equal parts;
one program per (share, kv head, chunk of query heads). The number of programs depends on shapes
and on the chip only; a share finds its sequences from the lengths, so uneven contexts cost as
much as even ones. Sequence b, as far as share s holds it, goes to slot s + b of the partial
results: both only grow along the shares, so no two pieces meet in a slot. Programs of the same
share and different heads are neighbours: together they read whole cache rows. All query heads of
a kv head are rows of one product, padded to 16.
With SPLITS > 0 every sequence is cut into SPLITS equal parts instead.
An 8-bit cache is read two columns at a time (``common.eight_bit``): even and odd columns meet even
and odd columns of the query, and have accumulators of their own.

Bound: reading keys and values once; with a group of 4 heads there are 4 FLOPs a byte. At B64,
context 8192, 8 kv heads, D128 in bfloat16: 2.15 GB, 0.5 ms at 4.3 TB/s.

Sources: Dao et al., "Flash-Decoding for long-context inference" (2023), for the split;
Osama et al., "Stream-K" (arXiv 2301.03598), section 4, for equal shares of uneven work;
Kwon et al., "PagedAttention" (arXiv 2309.06180), section 4.1, for the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from ejkernel.kernels.triton.common.pages import (
    block_pages,
    load_pairs,
    load_places,
    token_places,
)
from ejkernel.kernels.triton.common.softmax import online_softmax, tanh_from_exp2
from ejkernel.kernels.triton.page_attention.merge_kernel import finish


@triton.jit
def _extent(length, capacity, left, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """(length, first visible key, first tile, number of tiles) of sequences."""
    length = tl.minimum(tl.maximum(length, 0), capacity)
    begin = length * 0
    if WINDOW:
        begin = tl.maximum(length - 1 - left, 0)
    first = begin // BLOCK
    return length, begin, first, tl.cdiv(length, BLOCK) - first


@triton.jit
def _query_rows(q, row, heads, inside, D: tl.constexpr, COLUMN: tl.constexpr, COLS: tl.constexpr):
    column = COLUMN + tl.arange(0, COLS)
    mask = inside[:, None] & (column < D)[None, :]
    return tl.load(q + (row + heads)[:, None] * D + column[None, :], mask=mask, other=0.0)


@triton.jit
def _even_odd(q, KIND: tl.constexpr):
    """What meets the cache: all columns (twice), or the even and the odd ones of an 8-bit cache."""
    if KIND == "":
        even, odd = q, q
    else:
        even, odd = tl.split(tl.reshape(q, [q.shape[0], q.shape[1] // 2, 2]))
    return even, odd


@triton.jit
def _add_scores(
    s, q, q_odd, cache, places, seen, head,
    HEADS: tl.constexpr, DIM: tl.constexpr, COLUMN: tl.constexpr, COLUMNS: tl.constexpr,
    NUMBER: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """s ``[rows, BLOCK]`` plus products of queries and keys over columns from COLUMN on."""
    if KIND == "":
        keys = load_places(cache, places, seen, head, HEADS, DIM, COLUMN, COLUMNS)
        s = tl.dot(q, tl.trans(keys.to(NUMBER)), s, input_precision=PRECISION)
    else:
        even, odd = load_pairs(cache, places, seen, head, HEADS, DIM, COLUMN, COLUMNS, KIND, PTX)
        s = tl.dot(q, tl.trans(even.to(NUMBER)), s, input_precision=PRECISION)
        s = tl.dot(q_odd, tl.trans(odd.to(NUMBER)), s, input_precision=PRECISION)
    return s


@triton.jit
def _add_values(
    acc, acc_odd, alpha, p, cache, places, seen, head,
    HEADS: tl.constexpr, DIM: tl.constexpr, COLUMN: tl.constexpr, COLUMNS: tl.constexpr,
    NUMBER: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc * alpha plus p times values, columns from COLUMN on; acc_odd as ``_even_odd`` says."""
    if KIND == "":
        values = load_places(cache, places, seen, head, HEADS, DIM, COLUMN, COLUMNS)
        acc = tl.dot(p, values.to(NUMBER), acc * alpha[:, None], input_precision=PRECISION)
    else:
        even, odd = load_pairs(cache, places, seen, head, HEADS, DIM, COLUMN, COLUMNS, KIND, PTX)
        acc = tl.dot(p, even.to(NUMBER), acc * alpha[:, None], input_precision=PRECISION)
        acc_odd = tl.dot(p, odd.to(NUMBER), acc_odd * alpha[:, None], input_precision=PRECISION)
    return acc, acc_odd


@triton.jit
def _power_of_two(x):
    """(p, 1 / p) with p the power of two at or below x > 0; (1, 1) where x is 0, tiny or huge."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.where((bits < 0x08000000) | (bits > 0x77000000), 0x3F800000, bits)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def paged_split(
    q,
    k,
    v,
    lens,
    tables,
    k_scale,
    v_scale,
    sink,
    acc_out,
    m_out,
    l_out,
    starts,
    o,
    batch,
    shares,
    max_pages,
    pages,
    left,
    scale,
    cap_in,
    cap_out,
    k_scale_row,
    k_scale_head,
    v_scale_row,
    v_scale_head,
    sink_row,
    sinks,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_REST: tl.constexpr,
    DV_MAIN: tl.constexpr,
    DV_REST: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    QK: tl.constexpr,
    PV: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    PTX: tl.constexpr,
    NORMALISE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    # an 8-bit cache has its even and odd columns in accumulators of their own
    HALVES: tl.constexpr = 1 if V_KIND == "" else 2
    pid = tl.program_id(0)
    chunk = pid % CHUNKS
    hk = (pid // CHUNKS) % KV_HEADS
    share = pid // (CHUNKS * KV_HEADS)
    capacity = max_pages * PAGE

    # which tiles: t .. end, numbered from the first tile of sequence b, which is ``before``
    b = 0
    before = 0
    if SPLITS > 0:
        b = share // SPLITS
        part = share % SPLITS
        _, _, _, tiles = _extent(tl.load(lens + b), capacity, left, WINDOW, BLOCK)
        t = (tiles.to(tl.int64) * part // SPLITS).to(tl.int32)
        end = (tiles.to(tl.int64) * (part + 1) // SPLITS).to(tl.int32)
        more = True
    else:
        total = 0
        for base in range(0, batch, LANES):
            i = base + tl.arange(0, LANES)
            length = tl.load(lens + i, mask=i < batch, other=0)
            _, _, _, count = _extent(length, capacity, left, WINDOW, BLOCK)
            if pid == 0:
                tl.store(starts + i, total + tl.cumsum(count, 0) - count, mask=i < batch)
            total += tl.sum(count, 0)
        if pid == 0:
            tl.store(starts + batch, total)
        each = total // shares
        extra = total % shares
        t = share * each + tl.minimum(share, extra)
        end = t + each + (share < extra).to(tl.int32)
        passed = 0
        for base in range(0, batch, LANES):
            i = base + tl.arange(0, LANES)
            length = tl.load(lens + i, mask=i < batch, other=0)
            _, _, _, count = _extent(length, capacity, left, WINDOW, BLOCK)
            done = (passed + tl.cumsum(count, 0) <= t) & (i < batch)
            b += tl.sum(done.to(tl.int32), 0)
            before += tl.sum(tl.where(done, count, 0), 0)
            passed += tl.sum(count, 0)
        more = t < end

    member = chunk * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = member < GROUP
    heads = hk * GROUP + member
    dv_main = tl.arange(0, DV_MAIN)

    while more:
        length, begin, first_tile, tiles = _extent(tl.load(lens + b), capacity, left, WINDOW, BLOCK)
        stop = tl.minimum(end, before + tiles)
        row = b.to(tl.int64) * HEADS
        q_main = _query_rows(q, row, heads, inside, D, 0, D_MAIN)
        if D_REST > 0:
            q_more = _query_rows(q, row, heads, inside, D, D_MAIN, D_REST)
        factor = scale
        if k_scale is not None:
            factor *= tl.load(k_scale + b * k_scale_row + hk * k_scale_head).to(tl.float32)
        factors = tl.full([BLOCK_H], 1.0, tl.float32) * factor
        if NORMALISE:
            # any query fits float16 once its largest entry is near 1
            size = tl.max(tl.abs(q_main.to(tl.float32)), 1)
            if D_REST > 0:
                size = tl.maximum(size, tl.max(tl.abs(q_more.to(tl.float32)), 1))
            power, inverse = _power_of_two(size)
            q_main = q_main.to(tl.float32) * inverse[:, None]
            if D_REST > 0:
                q_more = q_more.to(tl.float32) * inverse[:, None]
            factors = factors * power
        q_main, q_main_odd = _even_odd(q_main.to(QK), K_KIND)
        if D_REST > 0:
            q_more, q_more_odd = _even_odd(q_more.to(QK), K_KIND)

        # logits are products by a sign, which is exact, and a positive slope
        signs = tl.where(factors > 0.0, 1.0, tl.where(factors < 0.0, -1.0, 0.0))
        slopes = tl.maximum(tl.abs(factors), 2.0**-120)
        if CAPPED:
            slopes = slopes * 0.0 + cap_out
        m = tl.full([BLOCK_H], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_H], tl.float32)  # noqa: E741
        acc = tl.zeros([BLOCK_H, DV_MAIN // HALVES], tl.float32)
        acc_odd = acc
        if DV_REST > 0:
            acc_more = tl.zeros([BLOCK_H, DV_REST // HALVES], tl.float32)
            acc_more_odd = acc_more
        table = tables + b.to(tl.int64) * max_pages

        tile0 = first_tile + t - before
        # looked up a step ahead: a look-up inside the step would halve the depth of the pipeline
        page = block_pages(table, tile0 * BLOCK, length, PAGE, BLOCK)
        for tile in tl.range(tile0, first_tile + stop - before):
            j = tile * BLOCK + tl.arange(0, BLOCK)
            places = token_places(page, tile * BLOCK, pages, PAGE, BLOCK)
            page = block_pages(table, (tile + 1) * BLOCK, length, PAGE, BLOCK)
            seen = j < length
            if WINDOW:
                seen = seen & (j >= begin)
            s = tl.zeros([BLOCK_H, BLOCK], tl.float32)
            s = _add_scores(
                s, q_main, q_main_odd, k, places, seen, hk,
                KV_HEADS, D, 0, D_MAIN, QK, K_KIND, PTX, PRECISION,
            )  # fmt: skip
            if D_REST > 0:
                s = _add_scores(
                    s, q_more, q_more_odd, k, places, seen, hk,
                    KV_HEADS, D, D_MAIN, D_REST, QK, K_KIND, PTX, PRECISION,
                )  # fmt: skip
            if CAPPED:
                s = tanh_from_exp2(s * factors[:, None] * cap_in)
            else:
                s = s * signs[:, None]
            s = tl.where(seen[None, :], s, float("-inf"))
            p, m, l, alpha = online_softmax(s, m, l, slopes, True, True)  # noqa: E741
            p = p.to(PV)
            acc, acc_odd = _add_values(
                acc, acc_odd, alpha, p, v, places, seen, hk,
                KV_HEADS, DV, 0, DV_MAIN, PV, V_KIND, PTX, PRECISION,
            )  # fmt: skip
            if DV_REST > 0:
                acc_more, acc_more_odd = _add_values(
                    acc_more, acc_more_odd, alpha, p, v, places, seen, hk,
                    KV_HEADS, DV, DV_MAIN, DV_REST, PV, V_KIND, PTX, PRECISION,
                )  # fmt: skip

        m = m * slopes
        if V_KIND != "":
            acc = tl.interleave(acc, acc_odd)
            if DV_REST > 0:
                acc_more = tl.interleave(acc_more, acc_more_odd)
        if SPLITS == 1:
            factor = finish(
                m, l, sink, b * sink_row, heads, inside, sinks, v_scale,
                b * v_scale_row + hk * v_scale_head, SINKS,
            )  # fmt: skip
            where = o + (row + heads)[:, None] * DV
            acc = (acc * factor[:, None]).to(o.dtype.element_ty)
            tl.store(where + dv_main[None, :], acc, mask=inside[:, None] & (dv_main < DV)[None, :])
            if DV_REST > 0:
                column = DV_MAIN + tl.arange(0, DV_REST)
                acc_more = (acc_more * factor[:, None]).to(o.dtype.element_ty)
                tl.store(
                    where + column[None, :], acc_more,
                    mask=inside[:, None] & (column < DV)[None, :],
                )  # fmt: skip
        else:
            slot = share + b if SPLITS == 0 else share
            rows = slot.to(tl.int64) * HEADS + heads
            tl.store(m_out + rows, m, mask=inside)
            tl.store(l_out + rows, l, mask=inside)
            where = acc_out + rows[:, None] * DV
            tl.store(where + dv_main[None, :], acc, mask=inside[:, None] & (dv_main < DV)[None, :])
            if DV_REST > 0:
                column = DV_MAIN + tl.arange(0, DV_REST)
                tl.store(
                    where + column[None, :], acc_more,
                    mask=inside[:, None] & (column < DV)[None, :],
                )  # fmt: skip

        if SPLITS == 0:
            t = stop
            before += tiles
            b += 1
            more = t < end
        else:
            more = False

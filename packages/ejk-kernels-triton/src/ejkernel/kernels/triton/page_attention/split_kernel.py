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

A sequence has one query row at its end, or up to TOKENS of them (``counts``, None: all; from row
``rows`` on, None: TOKENS times its number): then they are rows of one product with their heads, and
each sees as far as it stands. ``begins``: keys before are seen by none. Keys and values may lie in
one array, V_FIRST elements apart; v None: the first DV columns of a key are its value, read once
for both products. ``k_rest``: then k is a descriptor of runs of rows, and this one of the columns
that are not values; a block lies inside a page.

Bound: reading keys and values once; with a group of 4 heads there are 4 FLOPs a byte. At B64,
context 8192, 8 kv heads, D128 in bfloat16: 2.15 GB, 0.5 ms at 4.3 TB/s.

Sources: Dao et al., "Flash-Decoding for long-context inference" (2023), for the split;
Osama et al., "Stream-K" (arXiv 2301.03598), section 4, for equal shares of uneven work;
Kwon et al., "PagedAttention" (arXiv 2309.06180), section 4.1, for the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from ejkernel.kernels.triton.common.cached import (
    attend_block,
    empty,
    joined,
    opened,
    opened_as_loaded,
    store_rows,
)
from ejkernel.kernels.triton.common.pages import block_pages, run_between, token_places
from ejkernel.kernels.triton.page_attention.merge_kernel import finish


@triton.jit
def _number(values, b, mask):
    if mask is None:
        number = tl.load(values + b)
    else:
        number = tl.load(values + b, mask=mask, other=0)
    return number


@triton.jit
def _extent(
    lens, begins, b, mask, capacity, left,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """(length, first visible key, first tile, number of tiles) of sequences ``b``."""
    length = tl.minimum(tl.maximum(_number(lens, b, mask), 0), capacity)
    begin = length * 0
    if begins is not None:
        begin = tl.minimum(tl.maximum(_number(begins, b, mask), 0), length)
    if WINDOW:
        begin = tl.maximum(length - TOKENS - left, begin)  # what the first row sees
    first = begin // BLOCK
    return length, begin, first, tl.cdiv(length, BLOCK) - first


@triton.jit
def paged_split(
    q,
    k,
    k_rest,
    v,
    lens,
    tables,
    begins,
    rows,
    counts,
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
    K_HEADS: tl.constexpr,
    K_STEP: tl.constexpr,
    V_HEADS: tl.constexpr,
    V_STEP: tl.constexpr,
    V_FIRST: tl.constexpr,
    TOKENS: tl.constexpr,
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
    POSITIVE: tl.constexpr,
    RAW: tl.constexpr,
    APART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
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
        _, _, _, tiles = _extent(lens, begins, b, None, capacity, left, WINDOW, BLOCK, TOKENS)
        t = (tiles.to(tl.int64) * part // SPLITS).to(tl.int32)
        end = (tiles.to(tl.int64) * (part + 1) // SPLITS).to(tl.int32)
        more = True
    else:
        total = 0
        for base in range(0, batch, LANES):
            i = base + tl.arange(0, LANES)
            _, _, _, count = _extent(
                lens, begins, i, i < batch, capacity, left, WINDOW, BLOCK, TOKENS
            )
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
            _, _, _, count = _extent(
                lens, begins, i, i < batch, capacity, left, WINDOW, BLOCK, TOKENS
            )
            done = (passed + tl.cumsum(count, 0) <= t) & (i < batch)
            b += tl.sum(done.to(tl.int32), 0)
            before += tl.sum(tl.where(done, count, 0), 0)
            passed += tl.sum(count, 0)
        more = t < end

    member = chunk * BLOCK_H + tl.arange(0, BLOCK_H)
    token = member // GROUP
    if TOKENS == 1:
        inside = member < GROUP
        heads = hk * GROUP + member
        row_of = heads
    else:
        heads = hk * GROUP + member % GROUP
        row_of = token * HEADS + heads
    if v is not None:
        v = v + V_FIRST

    while more:
        length, begin, first_tile, tiles = _extent(
            lens, begins, b, None, capacity, left, WINDOW, BLOCK, TOKENS
        )
        stop = tl.minimum(end, before + tiles)
        row = b.to(tl.int64) * (TOKENS * HEADS)
        if rows is not None:
            row = tl.load(rows + b).to(tl.int64) * HEADS
        position = None
        if TOKENS > 1:
            count = TOKENS
            if counts is not None:
                count = tl.load(counts + b)
            inside = token < count
            position = length - count + token
        factor = scale
        if k_scale is not None:
            factor *= tl.load(k_scale + b * k_scale_row + hk * k_scale_head).to(tl.float32)
        sign = None
        if RAW:
            q_main, q_main_odd, q_more, q_more_odd, slopes, inner, sign = opened_as_loaded(
                q, row + row_of, inside, factor, cap_in, cap_out, D, D_MAIN, D_REST, CAPPED
            )
            if POSITIVE and k_scale is None:
                sign = None
        else:
            q_main, q_main_odd, q_more, q_more_odd, slopes, inner = opened(
                q, row + row_of, inside, factor, cap_in, cap_out, D, D_MAIN, D_REST, QK, K_KIND,
                NORMALISE, CAPPED, POSITIVE and k_scale is None,
            )  # fmt: skip
        m, l, acc, acc_odd, acc_more, acc_more_odd = empty(  # noqa: E741
            BLOCK_H, DV_MAIN, DV_REST, V_KIND
        )
        table = tables + b.to(tl.int64) * max_pages

        tile0 = first_tile + t - before
        # looked up a step ahead: a look-up inside the step would halve the depth of the pipeline
        page = block_pages(table, tile0 * BLOCK, length, PAGE, BLOCK)
        apart = None
        if APART:
            apart = length > 0
        for tile in tl.range(tile0, first_tile + stop - before):
            j = tile * BLOCK + tl.arange(0, BLOCK)
            places = token_places(page, tile * BLOCK, pages, PAGE, BLOCK)
            here = page
            page = block_pages(table, (tile + 1) * BLOCK, length, PAGE, BLOCK)
            loaded = j < length
            if WINDOW or begins is not None:
                loaded = loaded & (j >= begin)
            run = None
            if k_rest is not None:
                run = run_between(here, tile * BLOCK, length - 1, pages, PAGE, BLOCK)
            m, l, _e, acc, acc_odd, acc_more, acc_more_odd = attend_block(  # noqa: E741
                q_main, q_main_odd, q_more, q_more_odd,
                m, l, None, acc, acc_odd, acc_more, acc_more_odd,
                slopes, inner, None, None, k, v, places, loaded, run, j, position,
                left if WINDOW and TOKENS > 1 else None, None, hk,
                K_HEADS, K_STEP, V_HEADS, V_STEP, D, D_MAIN, D_REST, DV, DV_MAIN, DV_REST,
                CAPPED, False, QK, PV, K_KIND, V_KIND, PTX, PRECISION, sign, apart, k_rest,
            )  # fmt: skip

        m = m * slopes
        acc, acc_more = joined(acc, acc_odd, acc_more, acc_more_odd, DV_REST, V_KIND)
        if o is not None:
            factor = finish(
                m, l, sink, b * sink_row, heads, inside, sinks, v_scale,
                b * v_scale_row + hk * v_scale_head, SINKS,
            )  # fmt: skip
            acc = acc * factor[:, None]
            if DV_REST > 0:
                acc_more = acc_more * factor[:, None]
            store_rows(o, row + row_of, acc, acc_more, inside, DV, DV_MAIN, DV_REST)
        else:
            slot = share + b if SPLITS == 0 else share
            kept = slot.to(tl.int64) * (TOKENS * HEADS) + row_of
            tl.store(m_out + kept, m, mask=inside)
            tl.store(l_out + kept, l, mask=inside)
            store_rows(acc_out, kept, acc, acc_more, inside, DV, DV_MAIN, DV_REST)

        if SPLITS == 0:
            t = stop
            before += tiles
            b += 1
            more = t < end
        else:
            more = False

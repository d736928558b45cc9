"""Latent decoding of 8-bit rows with up to 16 heads on Hopper: keys are the rows of its products.

What ``page_attention.split_kernel`` computes, of one query row a sequence, turned round:

    s^T [tokens, heads] = K q^T;    acc^T [columns, heads] += V^T p^T

An asynchronous product has 64 rows, of which heads would fill 16; keys and columns fill them all,
and 16 heads are the narrowest second operand. int8 keys are operands as they lie in shared memory
(both digits of the queries side by side, see ``common.eight_bit_keys``); float8 ones pass through
registers, as do values, which are needed in float16. Queries stay in shared memory.

    rows of a step arrive -> scores, values into registers -> the next rows may come
                          -> softmax -> values, a part while the next part is converted

Rows come by TMA, as many steps ahead as there is room for, those of the share's next sequence too:
between two sequences there is no wait for memory. A page is looked up a step before its rows are
asked for.

Bound: reading the rows once: 64 contexts of 8192, 0.070 ms at 4.3 TB/s. Measured with four splits,
merge included: int8 0.085 ms, float8 0.084, where ``paged_split`` takes 0.092 and 0.086.

In Gluon (``compat.has_gluon``). No interpreter runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton.language as tl
from ejkernel.kernels.triton.common.eight_bit import pair_numbers
from ejkernel.kernels.triton.common.eight_bit_keys import neighbours, quads
from ejkernel.kernels.triton.common.queries import as_digits, prepared
from ejkernel.kernels.triton.common.softmax import tanh_from_exp2
from ejkernel.kernels.triton.launch import RUNS as _RUNS
from ejkernel.kernels.triton.launch import Launch, power_of_two
from ejkernel.kernels.triton.page_attention.split_kernel import cost, extent
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

RUNS = gl.constexpr(_RUNS)
MAX_LANES = 1024  # sequences looked at together when a share finds its place
ROWS = gl.constexpr(16)  # heads, as many as the narrowest second operand has


@gluon.jit
def run_of(
    sequences, b, there, t, before, end, sizes, cache,
    BLOCK: gl.constexpr, SPLITS: gl.constexpr, OPENING: gl.constexpr,
):  # fmt: skip
    """(length, first, stop, table, cost) of sequence b in a share; no tile where not ``there``."""
    capacity = sizes.max_pages * cache.PAGE
    length, _, _, tiles = extent(sequences, b, there, capacity, sizes, BLOCK, 1)
    costs = cost(tiles, OPENING)
    first = t
    stop = end
    if SPLITS == 0:
        first = gl.maximum(t - before - OPENING, 0)
        stop = gl.minimum(end, before + costs) - before - OPENING
    stop = gl.where(there, stop, first)
    return length, first, stop, sequences.tables + b.to(gl.int64) * sizes.max_pages, costs


@gluon.jit
def page_of(table, tile, there, cache, BLOCK: gl.constexpr):
    return gl.load(table + tile * BLOCK // cache.PAGE, mask=there, other=0)


@gluon.jit
def begin_load(cache, page, tile, length, sizes, landed, main, rest, there, BLOCK: gl.constexpr):
    """Rows of a tile on their way: zeros behind the sequence's end, as far as they are values."""
    page = gl.minimum(gl.maximum(page, 0), sizes.pages - 1)
    place = page * cache.PAGE + tile * BLOCK % cache.PAGE
    count = gl.minimum(BLOCK, length - tile * BLOCK)
    size: gl.constexpr = cache.k.nbytes_per_cta + cache.k_rest.nbytes_per_cta
    mbarrier.expect(landed, size, pred=there)
    tma.async_load(cache.k, [RUNS, place + count, RUNS - count, 0], landed, main, pred=there)
    tma.async_load(cache.k_rest, [place, cache.K.MAIN // 2], landed, rest, pred=there)


@gluon.jit
def read_queries(q, b, there, cache, HEADS: gl.constexpr, LOADED: gl.constexpr):
    """Both parts of the queries of sequence b; 0 where not ``there``."""
    MAIN: gl.constexpr = cache.K.MAIN
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOADED))
    column = gl.arange(0, MAIN, layout=gl.SliceLayout(0, LOADED))
    more = MAIN + gl.arange(0, cache.K.REST, layout=gl.SliceLayout(0, LOADED))
    there = ((row < HEADS) & there)[:, None]
    q += b.to(gl.int64) * (HEADS * cache.K.DIM) + row[:, None] * cache.K.DIM
    x = gl.load(q + column[None, :], mask=there, other=0.0)
    return x, gl.load(q + more[None, :], mask=there, other=0.0)


@gluon.jit
def store_queries(x, y, factor, logits, cache, q_main, q_rest, ROW: gl.constexpr):
    """Operands of scores to their places: (slopes, inner) of the rows, see ``common.queries``."""
    if cache.K.KIND == "int8":
        x, low, y, low_rest, slopes, inner = as_digits(x, y, factor, logits, cache.K)
        parts = (x, low, y, low_rest)
    else:
        one = gl.full([ROWS], 1.0, gl.float32, ROW)
        x, y, slopes, inner = prepared(x, y, one, factor, logits, cache.K, True, False)
        parts = quads(x) + quads(y)
    for n in gl.static_range(2):
        q_main.slice(n * ROWS, ROWS, dim=0).store(parts[n])
        q_rest.slice(n * ROWS, ROWS, dim=0).store(parts[2 + n])
    fence_async_shared()
    return slopes, inner


@gluon.jit
def scores_as_they_lie(main, rest, q_main, q_rest, BOTH: gl.constexpr):
    """Of int8: products of both digits side by side, under way."""
    BLOCK: gl.constexpr = rest.shape[0]
    DIM: gl.constexpr = q_main.shape[1]
    REST: gl.constexpr = q_rest.shape[1]
    numbers = main.reinterpret(gl.int8, [BLOCK, DIM], q_main.layout)
    more = rest.reinterpret(gl.int8, [BLOCK, REST], q_rest.layout)
    d = gl.zeros([BLOCK, 2 * ROWS], gl.int32, BOTH)
    d = warpgroup_mma(numbers, q_main.permute((1, 0)), d, use_acc=False, is_async=True)
    return warpgroup_mma(more, q_rest.permute((1, 0)), d, is_async=True)


@gluon.jit
def sum_of_digits(d, S: gl.constexpr):
    """float32 scores of them."""
    high, low = gl.split(gl.permute(gl.reshape(d, [d.shape[0], 2, ROWS]), (0, 2, 1)))
    s = high.to(gl.float32) * 256.0 + low.to(gl.float32)
    return gl.convert_layout(s, S, assert_trivial=True)


@gluon.jit
def add_scores(s, pairs, q, KIND: gl.constexpr, PTX: gl.constexpr, A: gl.constexpr):
    """Of float8: s plus products with columns; some are converted while others are added."""
    COLUMNS: gl.constexpr = pairs.shape[1] if pairs.shape[1] < 64 else 64
    STEPS: gl.constexpr = pairs.shape[1] // COLUMNS
    x = pairs.slice(0, COLUMNS, dim=1).load(A)
    for n in gl.static_range(STEPS):
        parts = gl.split(gl.reshape(x, [x.shape[0], COLUMNS // 2, 2]))
        if n + 1 < STEPS:
            x = pairs.slice((n + 1) * COLUMNS, COLUMNS, dim=1).load(A)
        for i in gl.static_range(2):
            k = gl.convert_layout(neighbours(parts[i], KIND, PTX), A, assert_trivial=True)
            part = q.slice(i * ROWS, ROWS, dim=0).slice(n * COLUMNS, COLUMNS, dim=1)
            s = warpgroup_mma(k, part.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(2, deps=[s])
    return s


@gluon.jit
def store_pairs(out, even, odd, HEADS: gl.constexpr, MAIN: gl.constexpr):
    """Sums of even and of odd columns ``[columns, heads]`` to rows of MAIN columns."""
    both = gl.join(even, odd)
    L: gl.constexpr = both.type.layout
    c = gl.arange(0, both.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    head = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    i = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    place = (c * 2)[:, None, None] + (head * MAIN)[None, :, None] + i[None, None, :]
    gl.store(out + place, both, mask=(head < HEADS)[None, :, None] & (place >= 0))


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def latent_split(
    q,
    cache,
    sequences,
    k_scale,
    acc_out,
    m_out,
    l_out,
    starts,
    sizes,
    logits,
    layout,
    BLOCK: gl.constexpr,
    LANES: gl.constexpr,
    SPLITS: gl.constexpr,
    OPENING: gl.constexpr,
    PTX: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Parameters as of ``paged_split``. STAGES: steps whose rows have a place."""
    HEADS: gl.constexpr = layout.ALL
    MAIN: gl.constexpr = cache.K.MAIN
    REST: gl.constexpr = cache.K.REST
    KIND: gl.constexpr = cache.K.KIND
    WHOLE: gl.constexpr = KIND == "int8"
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * ROWS, 32])
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    HEAD: gl.constexpr = gl.SliceLayout(0, S)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [4, 1], [1, 0])
    HALF: gl.constexpr = MAIN // 4  # of pairs of columns
    share = gl.program_id(0)
    batch = sizes.batch
    capacity = sizes.max_pages * cache.PAGE
    b = 0
    before = 0
    if SPLITS > 0:
        b = share // SPLITS
        part = share % SPLITS
        _, _, _, tiles = extent(sequences, b, share >= 0, capacity, sizes, BLOCK, 1)
        t = (tiles.to(gl.int64) * part // SPLITS).to(gl.int32)
        end = (tiles.to(gl.int64) * (part + 1) // SPLITS).to(gl.int32)
        more = share >= 0
    else:
        EACH: gl.constexpr = gl.BlockedLayout([max(1, LANES // 32)], [32], [4], [0])
        total = 0
        for base in range(0, batch, LANES):
            i = base + gl.arange(0, LANES, layout=EACH)
            _, _, _, tiles = extent(sequences, i, i < batch, capacity, sizes, BLOCK, 1)
            costs = cost(tiles, OPENING)
            if share == 0:
                sums = gl.associative_scan(costs, 0, add)
                gl.store(starts + i, total + sums - costs, mask=i < batch)
            total += gl.sum(costs, 0)
        if share == 0:
            gl.store(starts + batch, total)
        each = total // sizes.shares
        extra = total % sizes.shares
        t = share * each + gl.minimum(share, extra)
        end = t + each + (share < extra).to(gl.int32)
        passed = 0
        for base in range(0, batch, LANES):
            i = base + gl.arange(0, LANES, layout=EACH)
            _, _, _, tiles = extent(sequences, i, i < batch, capacity, sizes, BLOCK, 1)
            costs = cost(tiles, OPENING)
            done = (passed + gl.associative_scan(costs, 0, add) <= t) & (i < batch)
            b += gl.sum(done.to(gl.int32), 0)
            before += gl.sum(gl.where(done, costs, 0), 0)
            passed += gl.sum(costs, 0)
        more = gl.maximum(t, before + OPENING) < end

    mains = gl.allocate_shared_memory(
        gl.int16, [STAGES, 1, 1, BLOCK, MAIN // 2], gl.NVMMASharedLayout(128, 16, 4)
    )
    rests = gl.allocate_shared_memory(
        gl.int16, [STAGES, BLOCK, REST // 2], gl.NVMMASharedLayout(REST, 16, 2)
    )
    weights = gl.allocate_shared_memory(gl.float16, [BLOCK, ROWS], gl.NVMMASharedLayout(32, 16, 2))
    # both operands that meet keys, one below the other
    NUMBER: gl.constexpr = gl.int8 if WHOLE else gl.float16
    EVERY: gl.constexpr = 1 if WHOLE else 2  # number of a key meets one of them
    BITS: gl.constexpr = 8 * EVERY
    q_main = gl.allocate_shared_memory(
        NUMBER, [2 * ROWS, MAIN // EVERY], gl.NVMMASharedLayout(128, BITS, 2)
    )
    q_rest = gl.allocate_shared_memory(
        NUMBER, [2 * ROWS, REST // EVERY], gl.NVMMASharedLayout(REST, BITS, 2)
    )
    landed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(landed.index(n), count=1)
    fence_async_shared()
    gl.barrier()

    slot = 0  # whose rows are read next,
    phase = 0
    free = 0  # and whose are asked for next
    x, y = read_queries(q, b, more, cache, HEADS, LOADED)
    length, first, stop, table, costs = run_of(
        sequences, b, more, t, before, end, sizes, cache, BLOCK, SPLITS, OPENING
    )
    asked = first  # the first tile that was not asked for
    while more:
        # the sequence behind this one, as far as the share has it
        after = before + costs
        next_more = share < 0
        if SPLITS == 0:
            next_more = (b + 1 < batch) & (after + OPENING < end)
        next_length, next_first, next_stop, next_table, next_costs = run_of(
            sequences, b + 1, next_more, after, after, end, sizes, cache, BLOCK, SPLITS, OPENING
        )
        next_asked = next_first
        for _ahead in gl.static_range(STAGES):
            there = asked < gl.minimum(stop, first + STAGES)
            page = page_of(table, asked, there, cache, BLOCK)
            begin_load(
                cache, page, asked, length, sizes, landed.index(free), mains.index(free),
                rests.index(free), there, BLOCK,
            )  # fmt: skip
            asked += there.to(gl.int32)
            free = (free + there.to(gl.int32)) % STAGES
        page = page_of(
            gl.where(asked < stop, table, next_table), gl.where(asked < stop, asked, next_first),
            (asked < stop) | (next_first < next_stop), cache, BLOCK,
        )  # fmt: skip

        factor = logits.scale
        if k_scale.array is not None:
            factor *= gl.load(k_scale.array + b * k_scale.row).to(gl.float32)
        slopes, inner = store_queries(
            x, y, factor, logits, cache, q_main, q_rest, gl.SliceLayout(1, LOADED)
        )
        slopes = gl.convert_layout(slopes, HEAD)
        inner = gl.convert_layout(inner, HEAD)
        gl.barrier()

        m = gl.full([ROWS], float("-inf"), gl.float32, HEAD)
        l = gl.zeros([BLOCK, ROWS], gl.float32, S)  # noqa: E741
        none = gl.zeros([HALF, ROWS], gl.float32, S)
        sums = (none, none, none, none)  # of even and odd columns, the first half and the other
        for tile in tl.range(first, stop, disable_licm=True):
            main = mains.index(slot)
            rest = rests.index(slot)
            mbarrier.wait(landed.index(slot), phase)
            pairs = main.reinterpret(gl.int16, [BLOCK, MAIN // 2], PAIRS)
            if WHOLE:
                d = scores_as_they_lie(main, rest, q_main, q_rest, BOTH)
            else:
                d = gl.zeros([BLOCK, ROWS], gl.float32, S)
                d = add_scores(d, pairs, q_main, KIND, PTX, A)
                d = add_scores(d, rest, q_rest, KIND, PTX, A)
            turned = pairs.permute((1, 0))
            values = (turned.slice(0, HALF).load(A), turned.slice(HALF, HALF).load(A))
            d = warpgroup_mma_wait(0, deps=[d])
            s = sum_of_digits(d, S) if WHOLE else d
            gl.barrier()
            # the place is free for the next rows, of this sequence or of the one behind it
            own = asked < stop
            there = own | (next_asked < next_stop)
            begin_load(
                cache, page, gl.where(own, asked, next_asked), gl.where(own, length, next_length),
                sizes, landed.index(free), mains.index(free), rests.index(free), there, BLOCK,
            )  # fmt: skip
            free = (free + there.to(gl.int32)) % STAGES
            asked += own.to(gl.int32)
            next_asked += there.to(gl.int32) - own.to(gl.int32)
            slot = (gl.to_tensor(slot) + 1) % STAGES
            phase ^= (slot == 0).to(gl.int32)

            if logits.CAPPED:
                s = tanh_from_exp2(s * inner[None, :])
            j = tile * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, S))
            s = gl.where((j < length)[:, None], s, float("-inf"))
            top = gl.maximum(m, gl.max(s, 0))
            base_of = gl.where(top == float("-inf"), 0.0, top)
            p = gl.exp2((s - base_of[None, :]) * slopes[None, :]).to(gl.float16)
            weights.store(p)
            alpha = gl.exp2((m - base_of) * slopes)[None, :]
            l = l * alpha + p.to(gl.float32)  # noqa: E741
            m = top
            fence_async_shared()
            gl.barrier()
            # only now: a fence would wait for the look-up
            own = asked < stop
            page = page_of(
                gl.where(own, table, next_table), gl.where(own, asked, next_asked),
                own | (next_asked < next_stop), cache, BLOCK,
            )  # fmt: skip
            done = ()
            for n in gl.static_range(2):
                even, odd = pair_numbers(values[n], KIND, PTX)
                even = warpgroup_mma(even, weights, sums[2 * n] * alpha, is_async=True)
                odd = warpgroup_mma(odd, weights, sums[2 * n + 1] * alpha, is_async=True)
                done += (even, odd)
            sums = warpgroup_mma_wait(0, deps=[done[0], done[1], done[2], done[3]])

        # the next queries are on their way while these sums are stored
        x, y = read_queries(q, b + 1, next_more, cache, HEADS, LOADED)
        slot_out = share + b if SPLITS == 0 else share
        kept = slot_out.to(gl.int64) * HEADS
        head = gl.arange(0, ROWS, layout=HEAD)
        gl.store(m_out + kept + head, m * slopes, mask=head < HEADS)
        gl.store(l_out + kept + head, gl.sum(l, 0), mask=head < HEADS)
        for n in gl.static_range(2):
            out = acc_out + kept * MAIN + 2 * HALF * n
            store_pairs(out, sums[2 * n], sums[2 * n + 1], HEADS, MAIN)
        before = after
        b += 1
        more = next_more
        length = next_length
        first = next_first
        stop = next_stop
        table = next_table
        costs = next_costs
        asked = next_asked


def suits(problem: Any, tiles: Any) -> bool:
    """Whether ``latent_split`` computes what is asked for."""
    p, t = problem, tiles
    shape = (t.block, t.num_warps, p.tokens, *p.parts[0]) == (64, 4, 1, 512, 64)
    return shape and p.heads <= ROWS.value and t.form in ("digits", "quads") and t.splits != 1


def launch(arguments: Mapping[str, Any], split: Launch, batch: int) -> Launch:
    """In the place of ``split``, a launch of ``paged_split`` with these ``arguments``."""
    lanes = min(MAX_LANES, power_of_two(batch))
    more = {"PTX": split.constants["PTX"], "STAGES": max(1, split.num_stages - 1), "LANES": lanes}
    how = (split.grid, split.num_warps, 1, split.options)
    return Launch.of(latent_split, {}, *how, known={**arguments, **more}, stand_in=split)

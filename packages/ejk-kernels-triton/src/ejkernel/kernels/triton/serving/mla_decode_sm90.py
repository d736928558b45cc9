"""Latent decoding of 8-bit rows with up to 16 heads on Hopper: keys are the rows of its matmuls.

The result of ``decode``, of one query row a sequence, transposed:

    s^T [tokens, heads] = K q^T;    acc^T [columns, heads] += V^T p^T

An asynchronous matmul has 64 rows, of which heads would fill 16; keys and columns fill them all,
and 16 heads are the narrowest second operand. Queries stay in shared memory; values, which are
needed in float16, pass through registers.

One warp loads, four compute:

    rows of a step arrive -> scores, values into registers -> their place is free
                          -> softmax -> values, a part while the next part is converted

Two programs share a multiprocessor, and its registers: a thread that computes has 232 of them.

Rows come by TMA into a ring of slots, as many steps ahead as there are slots, those of the range's
next sequence too: between two sequences there is no wait for memory. A page is looked up a step
before its rows are loaded.

Keys are the rows of matmuls: int8 ones meet both digits of the queries side by side, as they lie
in shared memory (``eight_bit_scores``); float8 ones pass through registers.

Bound: reading the rows once: 64 contexts of 8192, 0.070 ms at 4.3 TB/s. Measured, merge included:
0.083 ms, int8 and float8_e4m3fn.

In Gluon (``compat.has_gluon``). No interpreter runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ejkernel.kernels.triton.bound_launch import RUNS as _RUNS
from ejkernel.kernels.triton.common.eight_bit import pair_numbers
from ejkernel.kernels.triton.common.softmax import tanh_from_exp2
from ejkernel.kernels.triton.language import tl
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.serving.eight_bit_scores import convert_adjacent, digits, quads
from ejkernel.kernels.triton.serving.launch import CacheLaunch, PagedLaunch, sequential
from ejkernel.kernels.triton.serving.merge import average, part_logit
from ejkernel.kernels.triton.serving.pages import block_pages, run_between
from ejkernel.kernels.triton.serving.params import column_parts
from ejkernel.kernels.triton.serving.queries import digit_factors, largest_bits, row_factors
from ejkernel.kernels.triton.serving.work_ranges import (
    cost,
    extent,
    find_share,
    part_of_sequence,
    store_starts,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

MAX_LANES = 1024  # sequences looked at together when a share finds its place,
MAX_ROUNDS = 4  # rounds of MAX_LANES sequences; the compiler unrolls them
# that a thread starts with: two programs of eight warps share 65536. Four compute, one loads, three
# are Triton's and do nothing: those four give theirs up, so that the others have 232
REGISTERS = 128
LOADER_REGISTERS = gl.constexpr(24)
ROWS = gl.constexpr(16)  # heads: the narrowest second operand of a matmul
RUNS = gl.constexpr(_RUNS)


# ---- the warp that loads -----------------------------------------------------------------------


class Share(NamedTuple):
    """Work of a program: from ``t`` to ``end``, beginning in sequence ``b``.

    With SPLITS those are tiles of b. Without, they and ``before``, where b begins, count the costs
    of all sequences laid end to end, see ``decode``. ``there``: whether there is anything.
    """

    t: Any
    end: Any
    b: Any
    before: Any
    there: Any


class Ring(NamedTuple):
    """Places of rows, values and the rest; ``landed`` and ``freed``: a barrier of each."""

    main: Any
    rest: Any
    landed: Any
    freed: Any


@gluon.jit
def share_of(
    sequences, sizes, starts, capacity,
    BLOCK: gl.constexpr, LANES: gl.constexpr, SPLITS: gl.constexpr, OPENING: gl.constexpr,
    ROUNDS: gl.constexpr,
):  # fmt: skip
    """The share of this program; the first one stores the first tile of every sequence."""
    share = gl.program_id(0)
    if SPLITS > 0:
        t, end, b = part_of_sequence(share, sequences, capacity, sizes, BLOCK, 1, SPLITS)
        return Share(t, end, b, gl.to_tensor(0), gl.to_tensor(True))
    else:
        # every warp has all lanes: none waits for the others
        EACH: gl.constexpr = gl.BlockedLayout([max(1, LANES // 32)], [32], [4], [0])
        lane = gl.arange(0, LANES, layout=EACH)
        t, end, b, before, total = find_share(
            share, lane, sequences, capacity, sizes, BLOCK, 1, OPENING, LANES, ROUNDS
        )
        if share == 0:
            store_starts(
                starts, total, lane, sequences, capacity, sizes, BLOCK, 1, OPENING, LANES, ROUNDS
            )
        return Share(t, end, b, before, gl.maximum(t, before + OPENING) < end)


@gluon.jit
def run_of(
    sequences, share, b, before, capacity, sizes,
    BLOCK: gl.constexpr, SPLITS: gl.constexpr, OPENING: gl.constexpr,
):  # fmt: skip
    """(length, first, stop, behind, more): tiles of sequence b in a share.

    ``behind``: where sequence b + 1 begins; ``more``: whether the share goes on there.
    """
    length, _, _, tiles = extent(sequences, b, None, capacity, sizes, BLOCK, 1)
    behind = before + cost(tiles, OPENING)
    if SPLITS > 0:
        return length, share.t, share.end, behind, gl.to_tensor(False)
    else:
        first = gl.maximum(share.t - before - OPENING, 0)
        stop = gl.minimum(share.end, behind) - before - OPENING
        more = (b + 1 < sizes.batch) & (behind + OPENING < share.end)
        return length, first, stop, behind, more


@gluon.jit
def load_rows(
    cache, sequences, sizes, share, ring, capacity,
    BLOCK: gl.constexpr, SPLITS: gl.constexpr, OPENING: gl.constexpr,
):  # fmt: skip
    """The warp that loads. Values behind a sequence's end are 0."""
    PLACES: gl.constexpr = ring.main.shape[0]
    BYTES: gl.constexpr = cache.k.nbytes_per_cta + cache.k_rest.nbytes_per_cta
    b = share.b
    before = share.before
    more = share.there
    place = 0
    phase = 1  # the first round waits for nobody
    while more:
        length, first, stop, before, more = run_of(
            sequences, share, b, before, capacity, sizes, BLOCK, SPLITS, OPENING
        )
        table = sequences.tables + b.to(gl.int64) * sizes.max_pages
        page = block_pages(table, first * BLOCK, stop * BLOCK, cache.PAGE, BLOCK)
        for tile in range(first, stop):
            key = tile * BLOCK
            row, count = run_between(page, key, length - 1, sizes.pages, cache.PAGE, BLOCK)
            page = block_pages(table, key + BLOCK, stop * BLOCK, cache.PAGE, BLOCK)
            landed = ring.landed.index(place)
            mbarrier.wait(ring.freed.index(place), phase)
            mbarrier.expect(landed, BYTES)
            where = [RUNS, row + count, RUNS - count, 0]
            tma.async_load(cache.k, where, landed, ring.main.index(place))
            tma.async_load(cache.k_rest, [row, cache.K.MAIN // 2], landed, ring.rest.index(place))
            place, phase = next_place(place, phase, PLACES)
        b += 1


@gluon.jit
def next_place(place, phase, PLACES: gl.constexpr):
    """(place, phase) of the next step; the phase turns when the ring begins again."""
    place = (gl.to_tensor(place) + 1) % PLACES
    return place, phase ^ (place == 0).to(gl.int32)


# ---- queries, scores and stores of the warps that compute ----------------------------------------


@gluon.jit
def _read_part(
    q, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, there, cache, HEADS: gl.constexpr,
    L: gl.constexpr,
):  # fmt: skip
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    column = COLUMN + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    place = row[:, None] * cache.K.DIM + column[None, :]
    return gl.load(q + place, mask=((row < HEADS) & there)[:, None], other=0.0)


@gluon.jit
def read_queries(q, b, there, cache, HEADS: gl.constexpr):
    """Both parts of the queries of sequence b; 0 where not ``there``."""
    MAIN: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [4, 1], [1, 0])
    REST: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    q += b.to(gl.int64) * (HEADS * cache.K.DIM)
    x = _read_part(q, 0, cache.K.MAIN, there, cache, HEADS, MAIN)
    return x, _read_part(q, cache.K.MAIN, cache.K.REST, there, cache, HEADS, REST)


@gluon.jit
def store_queries(x, y, factor, logits, cache, q_main, q_rest):
    """Operands of scores to their places: (slopes, inner) of the rows, see ``queries``.

    A warp has the same rows of both parts: what is known of rows goes from one to the other as it
    is.
    """
    MAIN: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    REST: gl.constexpr = gl.SliceLayout(1, y.type.layout)
    x = x.to(gl.float32)
    y = y.to(gl.float32)
    if cache.K.KIND == "int8":
        bits = gl.convert_layout(largest_bits(y), MAIN, assert_trivial=True)
        bits = gl.maximum(largest_bits(x), bits)
        scale, slopes, inner = digit_factors(bits, factor, logits)
        parts = digits(x, scale) + digits(y, gl.convert_layout(scale, REST, assert_trivial=True))
    else:
        size = gl.convert_layout(gl.max(gl.abs(y), 1), MAIN, assert_trivial=True)
        size = gl.maximum(gl.max(gl.abs(x), 1), size)
        one = gl.full([ROWS], 1.0, gl.float32, MAIN)
        weight, slopes, inner = row_factors(one, size, factor, logits, False)
        x = (x * weight[:, None]).to(gl.float16)
        weight = gl.convert_layout(weight, REST, assert_trivial=True)
        parts = quads(x) + quads((y * weight[:, None]).to(gl.float16))
    for n in gl.static_range(2):
        q_main.slice(n * ROWS, ROWS, dim=0).store(parts[n])
        q_rest.slice(n * ROWS, ROWS, dim=0).store(parts[2 + n])
    fence_async_shared()
    return slopes, inner


@gluon.jit
def scores_as_they_lie(main, rest, q_main, q_rest, BOTH: gl.constexpr):
    """Returns matmuls of int8 keys with both digits side by side, still running."""
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
    """Returns s plus matmuls of float8 columns; some are converted while others are added."""
    COLUMNS: gl.constexpr = pairs.shape[1] if pairs.shape[1] < 64 else 64
    STEPS: gl.constexpr = pairs.shape[1] // COLUMNS
    x = pairs.slice(0, COLUMNS, dim=1).load(A)
    for n in gl.static_range(STEPS):
        parts = gl.split(gl.reshape(x, [x.shape[0], COLUMNS // 2, 2]))
        if n + 1 < STEPS:
            x = pairs.slice((n + 1) * COLUMNS, COLUMNS, dim=1).load(A)
        for i in gl.static_range(2):
            k = gl.convert_layout(convert_adjacent(parts[i], KIND, PTX), A, assert_trivial=True)
            part = q.slice(i * ROWS, ROWS, dim=0).slice(n * COLUMNS, COLUMNS, dim=1)
            s = warpgroup_mma(k, part.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(2, deps=[s])
    return s


@gluon.jit
def store_pairs(out, even, odd, HEADS: gl.constexpr, MAIN: gl.constexpr):
    """Even and odd columns ``[columns, heads]`` to rows of MAIN columns."""
    both = gl.join(even, odd).to(out.dtype.element_ty)
    L: gl.constexpr = both.type.layout
    c = gl.arange(0, both.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    head = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    i = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    place = (c * 2)[:, None, None] + (head * MAIN)[None, :, None] + i[None, None, :]
    gl.store(out + place, both, mask=(head < HEADS)[None, :, None])


# ---- the kernel --------------------------------------------------------------------------------


@gluon.jit
def attend(
    q, cache, sequences, k_scale, partial, sizes, logits, share, ring, capacity, weights, q_main,
    q_rest,
    HEADS: gl.constexpr, BLOCK: gl.constexpr, SPLITS: gl.constexpr, OPENING: gl.constexpr,
    PTX: gl.constexpr,
):  # fmt: skip
    """The warps that compute. ``weights``, ``q_main``, ``q_rest``: places of operands."""
    PLACES: gl.constexpr = ring.main.shape[0]
    MAIN: gl.constexpr = cache.K.MAIN
    KIND: gl.constexpr = cache.K.KIND
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * ROWS, 32])
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    HEAD: gl.constexpr = gl.SliceLayout(0, S)
    HALF: gl.constexpr = MAIN // 4  # of pairs of columns
    b = share.b
    before = share.before
    more = share.there
    place = 0
    phase = 0
    x, y = read_queries(q, b, more, cache, HEADS)
    while more:
        factor = logits.scale
        if k_scale.array is not None:
            factor *= gl.load(k_scale.array + b * k_scale.row).to(gl.float32)
        length, first, stop, before, more = run_of(
            sequences, share, b, before, capacity, sizes, BLOCK, SPLITS, OPENING
        )
        slopes, inner = store_queries(x, y, factor, logits, cache, q_main, q_rest)
        slopes = gl.convert_layout(slopes, HEAD)
        inner = gl.convert_layout(inner, HEAD)
        gl.barrier()

        m = gl.full([ROWS], float("-inf"), gl.float32, HEAD)
        l = gl.zeros([BLOCK, ROWS], gl.float32, S)  # noqa: E741
        none = gl.zeros([HALF, ROWS], gl.float32, S)
        sums = (none, none, none, none)  # of even and odd columns, the first half and the other
        for tile in tl.range(first, stop, disable_licm=True):
            main = ring.main.index(place)
            rest = ring.rest.index(place)
            mbarrier.wait(ring.landed.index(place), phase)
            pairs = main.reinterpret(gl.int16, [BLOCK, MAIN // 2], PAIRS)
            if KIND == "int8":
                d = scores_as_they_lie(main, rest, q_main, q_rest, BOTH)
            else:
                d = gl.zeros([BLOCK, ROWS], gl.float32, S)
                d = add_scores(d, pairs, q_main, KIND, PTX, A)
                d = add_scores(d, rest, q_rest, KIND, PTX, A)
            turned = pairs.permute((1, 0))
            values = turned.slice(0, HALF).load(A)
            others = turned.slice(HALF, HALF).load(A)
            d = warpgroup_mma_wait(0, deps=[d])
            s = sum_of_digits(d, S) if KIND == "int8" else d
            # the compiler puts a barrier of all warps before this, which tests look for
            mbarrier.arrive(ring.freed.index(place))
            place, phase = next_place(place, phase, PLACES)

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
            even, odd = pair_numbers(values, KIND, PTX)
            even = warpgroup_mma(even, weights, sums[0] * alpha, is_async=True)
            odd = warpgroup_mma(odd, weights, sums[1] * alpha, is_async=True)
            # the others are converted when half of these are no longer needed: registers
            even, odd, others = warpgroup_mma_wait(1, deps=[even, odd, others])
            even_2, odd_2 = pair_numbers(others, KIND, PTX)
            even_2 = warpgroup_mma(even_2, weights, sums[2] * alpha, is_async=True)
            odd_2 = warpgroup_mma(odd_2, weights, sums[3] * alpha, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[even, odd, even_2, odd_2])

        # the next queries are on their way while these accumulators are stored
        x, y = read_queries(q, b + 1, more, cache, HEADS)
        slot = gl.program_id(0)
        if SPLITS == 0:
            slot += b
        kept = slot.to(gl.int64) * HEADS
        head = gl.arange(0, ROWS, layout=HEAD)
        total = gl.sum(l, 0)
        if partial.acc.dtype.element_ty == gl.float16:
            weight = average(total)[None, :]
            even, odd, even_2, odd_2 = sums
            sums = (even * weight, odd * weight, even_2 * weight, odd_2 * weight)
        gl.store(partial.m + kept + head, part_logit(m, slopes, total), mask=head < HEADS)
        gl.store(partial.l + kept + head, total, mask=head < HEADS)
        for n in gl.static_range(2):
            out = partial.acc + kept * MAIN + 2 * HALF * n
            store_pairs(out, sums[2 * n], sums[2 * n + 1], HEADS, MAIN)
        b += 1


@gluon.jit
def latent_split(
    q,
    cache,
    sequences,
    k_scale,
    partial,
    starts,
    sizes,
    logits,
    layout,
    BLOCK: gl.constexpr,
    LANES: gl.constexpr,
    ROUNDS: gl.constexpr,
    SPLITS: gl.constexpr,
    OPENING: gl.constexpr,
    PTX: gl.constexpr,
    PLACES: gl.constexpr,
):
    """Parameters as of ``paged_split``. PLACES: of steps in shared memory."""
    MAIN: gl.constexpr = cache.K.MAIN
    REST: gl.constexpr = cache.K.REST
    mains = gl.allocate_shared_memory(
        gl.int16, [PLACES, 1, 1, BLOCK, MAIN // 2], gl.NVMMASharedLayout(128, 16, 4)
    )
    rests = gl.allocate_shared_memory(
        gl.int16, [PLACES, BLOCK, REST // 2], gl.NVMMASharedLayout(REST, 16, 2)
    )
    weights = gl.allocate_shared_memory(gl.float16, [BLOCK, ROWS], gl.NVMMASharedLayout(32, 16, 2))
    # both operands that meet keys, one below the other
    WHOLE: gl.constexpr = cache.K.KIND == "int8"
    NUMBER: gl.constexpr = gl.int8 if WHOLE else gl.float16
    EVERY: gl.constexpr = 1 if WHOLE else 2  # number of a key meets one of them
    BITS: gl.constexpr = 8 * EVERY
    q_main = gl.allocate_shared_memory(
        NUMBER, [2 * ROWS, MAIN // EVERY], gl.NVMMASharedLayout(128, BITS, 2)
    )
    q_rest = gl.allocate_shared_memory(
        NUMBER, [2 * ROWS, REST // EVERY], gl.NVMMASharedLayout(REST, BITS, 2)
    )
    landed = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(PLACES):
        mbarrier.init(landed.index(n), count=1)
        mbarrier.init(freed.index(n), count=1)
    fence_async_shared()
    capacity = sizes.max_pages * cache.PAGE
    share = share_of(sequences, sizes, starts, capacity, BLOCK, LANES, SPLITS, OPENING, ROUNDS)
    ring = Ring(mains, rests, landed, freed)
    gl.warp_specialize(
        [
            (attend, (
                q, cache, sequences, k_scale, partial, sizes, logits, share, ring, capacity,
                weights, q_main, q_rest, layout.ALL, BLOCK, SPLITS, OPENING, PTX,
            )),
            (load_rows, (
                cache, sequences, sizes, share, ring, capacity, BLOCK, SPLITS, OPENING,
            )),
        ],
        [1],
        [LOADER_REGISTERS],
    )  # fmt: skip


def is_supported(problem: Any, tiles: Any) -> bool:
    """Returns whether ``latent_split`` computes a call."""
    p, t = problem, tiles
    shape = (t.block, t.num_warps, p.tokens, *column_parts(p)[0]) == (64, 4, 1, 512, 64)
    form = t.form in ("digits", "quads") and t.splits != 1
    return shape and form and p.heads <= ROWS.value and p.batch <= MAX_LANES * MAX_ROUNDS


@dataclass(frozen=True)
class LatentSplit(CacheLaunch):
    """Launch of ``latent_split`` in the place of ``general``, a launch of ``paged_split``."""

    kernel = latent_split
    batching: ClassVar = sequential("q k v lens tables begins rows counts k_scale v_scale sink")

    general: PagedLaunch

    def outputs(self):
        return self.general.outputs()

    def grid(self, target):
        return self.general.grid(target)

    def options(self, target):
        return {"num_warps": self.general.tiles.num_warps, "num_stages": 1, "maxnreg": REGISTERS}

    def arguments(self, target):
        batch, tiles = self.general.problem.batch, self.general.tiles
        lanes = min(MAX_LANES, power_of_two(batch))
        arguments = {
            **self.general.arguments(target),
            "PLACES": max(1, tiles.num_stages - 1),
            "LANES": lanes,
            "ROUNDS": -(-batch // lanes),
        }
        return {name: x for name, x in arguments.items() if name in self.kernel.arg_names}

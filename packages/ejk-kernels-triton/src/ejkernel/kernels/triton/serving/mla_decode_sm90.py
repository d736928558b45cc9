"""Latent decoding of 8-bit rows with up to 16 heads on Hopper: keys are the rows of its matmuls.

The result of ``decode``, of one query row a sequence, transposed:

    s^T [tokens, heads] = K q^T;    acc^T [columns, heads] += V^T p^T

An asynchronous matmul has 64 rows, of which heads would fill 16; keys and columns fill them all,
and 16 heads are the narrowest second operand. Queries stay in shared memory. int8 keys are operands
as they lie in shared memory, next to both digits of the queries (``eight_bit_scores``); float8 keys
pass through registers. So do values, which are needed in float16.

One warp loads, four compute. Rows come by TMA into a ring of slots, as many steps ahead as there
are slots, across sequences too: between two sequences there is no wait for memory. A page is looked
up a step before its rows are loaded.

    slot is full -> scores, values into registers -> slot is empty
                 -> softmax -> values, a part while the next part is converted

Two programs share a multiprocessor, and its registers: a thread that computes has 232 of them.

Bound: reading the rows once: 64 contexts of 8192, 0.070 ms at 4.3 TB/s. Measured, merge included:
0.083 ms, int8 and float8_e4m3fn.

In Gluon (``compat.has_gluon``). No interpreter runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ejkernel.kernels.triton.bound_launch import MAP_ROWS as _MAP_ROWS
from ejkernel.kernels.triton.common.eight_bit import convert_pairs
from ejkernel.kernels.triton.common.softmax import tanh_from_exp2
from ejkernel.kernels.triton.language import tl
from ejkernel.kernels.triton.launch import SubstituteLaunch, power_of_two
from ejkernel.kernels.triton.serving.eight_bit_scores import (
    convert_adjacent,
    split_column_pairs,
    split_digits,
)
from ejkernel.kernels.triton.serving.launch import CacheLaunch, sequential
from ejkernel.kernels.triton.serving.merge import average_factor, partial_logit
from ejkernel.kernels.triton.serving.pages import clamp_run, load_block_pages
from ejkernel.kernels.triton.serving.params import column_parts
from ejkernel.kernels.triton.serving.queries import (
    compute_digit_factors,
    compute_row_factors,
    max_magnitude_bits,
)
from ejkernel.kernels.triton.serving.work_ranges import (
    find_sequence_split,
    find_work_range,
    load_extent,
    sequence_cost,
    store_sequence_starts,
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

MAX_LANES = 1024  # sequences looked at together when a program finds its work range
MAX_ROUNDS = 4  # rounds of MAX_LANES sequences; the compiler unrolls them
# registers that a thread starts with: two programs of eight warps share 65536. Four warps compute,
# one loads, three are Triton's and do nothing: those four give theirs up, so that the others have
# 232
REGISTERS = 128
LOADER_REGISTERS = gl.constexpr(24)
ROWS = gl.constexpr(16)  # heads: the narrowest second operand of a matmul
MAP_ROWS = gl.constexpr(_MAP_ROWS)


class WorkRange(NamedTuple):
    """Work of a program: from ``start`` to ``end``, beginning in sequence ``sequence``.

    With SPLITS those are tiles of the sequence. Without, they and ``sequence_start``, where the
    sequence begins, count the costs of all sequences laid end to end, see ``decode``.
    """

    start: Any
    end: Any
    sequence: Any
    sequence_start: Any
    has_work: Any


class Ring(NamedTuple):
    """Slots of rows in shared memory; barriers that a slot is ``full`` and that it is ``empty``.

    ``main`` holds the columns of a row that are values too, ``tail`` the other columns.
    """

    main: Any
    tail: Any
    full: Any
    empty: Any


# ---- work ----------------------------------------------------------------------------------------


@gluon.jit
def _find_work(
    sequences, sizes, starts, capacity,
    BLOCK: gl.constexpr, LANES: gl.constexpr, SPLITS: gl.constexpr, SETUP_TILES: gl.constexpr,
    ROUNDS: gl.constexpr,
):  # fmt: skip
    """Returns the range of this program; the first one stores the first tile of every sequence."""
    pid = gl.program_id(0)
    if SPLITS > 0:
        t, end, b = find_sequence_split(pid, sequences, capacity, sizes, BLOCK, 1, SPLITS)
        return WorkRange(t, end, b, gl.to_tensor(0), gl.to_tensor(True))
    else:
        # every warp has all lanes: none waits for the others
        EACH: gl.constexpr = gl.BlockedLayout([max(1, LANES // 32)], [32], [4], [0])
        lane = gl.arange(0, LANES, layout=EACH)
        t, end, b, before, total = find_work_range(
            pid, lane, sequences, capacity, sizes, BLOCK, 1, SETUP_TILES, LANES, ROUNDS
        )
        if pid == 0:
            store_sequence_starts(
                starts, total, lane, sequences, capacity, sizes, BLOCK, 1, SETUP_TILES, LANES,
                ROUNDS,
            )  # fmt: skip
        return WorkRange(t, end, b, before, gl.maximum(t, before + SETUP_TILES) < end)


@gluon.jit
def _select_tiles(
    sequences, work, b, before, capacity, sizes,
    BLOCK: gl.constexpr, SPLITS: gl.constexpr, SETUP_TILES: gl.constexpr,
):  # fmt: skip
    """Returns (length, first tile, tile past the last, start of b + 1, has_work) of sequence b.

    has_work: whether the range goes on in sequence b + 1.
    """
    length, _, _, tiles = load_extent(sequences, b, None, capacity, sizes, BLOCK, 1)
    after = before + sequence_cost(tiles, SETUP_TILES)
    if SPLITS > 0:
        return length, work.start, work.end, after, gl.to_tensor(False)
    else:
        first = gl.maximum(work.start - before - SETUP_TILES, 0)
        stop = gl.minimum(work.end, after) - before - SETUP_TILES
        has_work = (b + 1 < sizes.batch) & (after + SETUP_TILES < work.end)
        return length, first, stop, after, has_work


@gluon.jit
def _advance_slot(slot, phase, SLOTS: gl.constexpr):
    """Returns (slot, phase) of the next step; the phase flips when the ring begins again."""
    slot = (gl.to_tensor(slot) + 1) % SLOTS
    return slot, phase ^ (slot == 0).to(gl.int32)


# ---- the warp that loads -------------------------------------------------------------------------


@gluon.jit
def _load_rows(
    cache, sequences, sizes, work, ring, capacity,
    BLOCK: gl.constexpr, SPLITS: gl.constexpr, SETUP_TILES: gl.constexpr,
):  # fmt: skip
    """Loads the rows of a range. Values behind a sequence's end are 0."""
    SLOTS: gl.constexpr = ring.main.shape[0]
    BYTES: gl.constexpr = cache.k.nbytes_per_cta + cache.k_tail.nbytes_per_cta
    b = work.sequence
    before = work.sequence_start
    has_work = work.has_work
    slot = 0
    phase = 1  # the slots of the first round are empty
    while has_work:
        length, first, stop, before, has_work = _select_tiles(
            sequences, work, b, before, capacity, sizes, BLOCK, SPLITS, SETUP_TILES
        )
        table = sequences.tables + b.to(gl.int64) * sizes.max_pages
        page = load_block_pages(table, first * BLOCK, stop * BLOCK, cache.PAGE, BLOCK)
        for tile in range(first, stop):
            key = tile * BLOCK
            row, count = clamp_run(page, key, length - 1, sizes.pages, cache.PAGE, BLOCK)
            page = load_block_pages(table, key + BLOCK, stop * BLOCK, cache.PAGE, BLOCK)
            full = ring.full.index(slot)
            mbarrier.wait(ring.empty.index(slot), phase)
            mbarrier.expect(full, BYTES)
            corner = [MAP_ROWS, row + count, MAP_ROWS - count, 0]
            tma.async_load(cache.k, corner, full, ring.main.index(slot))
            tma.async_load(cache.k_tail, [row, cache.K.MAIN // 2], full, ring.tail.index(slot))
            slot, phase = _advance_slot(slot, phase, SLOTS)
        b += 1


# ---- the warps that compute ----------------------------------------------------------------------


@gluon.jit
def _read_columns(
    q, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, is_valid, cache, HEADS: gl.constexpr,
    L: gl.constexpr,
):  # fmt: skip
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    column = COLUMN + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    offset = row[:, None] * cache.K.DIM + column[None, :]
    return gl.load(q + offset, mask=((row < HEADS) & is_valid)[:, None], other=0.0)


@gluon.jit
def _read_queries(q, b, is_valid, cache, HEADS: gl.constexpr):
    """Loads main and tail columns of the queries of sequence b; 0 unless ``is_valid``."""
    MAIN: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [4, 1], [1, 0])
    TAIL: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    q += b.to(gl.int64) * (HEADS * cache.K.DIM)
    main = _read_columns(q, 0, cache.K.MAIN, is_valid, cache, HEADS, MAIN)
    return main, _read_columns(q, cache.K.MAIN, cache.K.TAIL, is_valid, cache, HEADS, TAIL)


@gluon.jit
def _store_queries(main, tail, factor, logits, cache, q_main, q_tail):
    """Stores the operands of scores; returns (slopes, inner) of the rows, see ``queries``.

    A warp has the same rows of both parts, so values of a row move between them without a shuffle.
    """
    MAIN: gl.constexpr = gl.SliceLayout(1, main.type.layout)
    TAIL: gl.constexpr = gl.SliceLayout(1, tail.type.layout)
    main = main.to(gl.float32)
    tail = tail.to(gl.float32)
    if cache.K.KIND == "int8":
        bits = gl.convert_layout(max_magnitude_bits(tail), MAIN, assert_trivial=True)
        bits = gl.maximum(max_magnitude_bits(main), bits)
        scale, slopes, inner = compute_digit_factors(bits, factor, logits)
        tail_scale = gl.convert_layout(scale, TAIL, assert_trivial=True)
        operands = split_digits(main, scale) + split_digits(tail, tail_scale)
    else:
        size = gl.convert_layout(gl.max(gl.abs(tail), 1), MAIN, assert_trivial=True)
        size = gl.maximum(gl.max(gl.abs(main), 1), size)
        ones = gl.full([ROWS], 1.0, gl.float32, MAIN)
        weight, slopes, inner = compute_row_factors(ones, size, factor, logits, False)
        main = (main * weight[:, None]).to(gl.float16)
        weight = gl.convert_layout(weight, TAIL, assert_trivial=True)
        tail = (tail * weight[:, None]).to(gl.float16)
        operands = split_column_pairs(main) + split_column_pairs(tail)
    for n in gl.static_range(2):
        q_main.slice(n * ROWS, ROWS, dim=0).store(operands[n])
        q_tail.slice(n * ROWS, ROWS, dim=0).store(operands[2 + n])
    fence_async_shared()
    return slopes, inner


@gluon.jit
def _multiply_int8_keys(main, tail, q_main, q_tail, BOTH: gl.constexpr):
    """Returns matmuls of int8 keys with both digits side by side, still running."""
    BLOCK: gl.constexpr = tail.shape[0]
    DIM: gl.constexpr = q_main.shape[1]
    TAIL: gl.constexpr = q_tail.shape[1]
    main = main.reinterpret(gl.int8, [BLOCK, DIM], q_main.layout)
    tail = tail.reinterpret(gl.int8, [BLOCK, TAIL], q_tail.layout)
    d = gl.zeros([BLOCK, 2 * ROWS], gl.int32, BOTH)
    d = warpgroup_mma(main, q_main.permute((1, 0)), d, use_acc=False, is_async=True)
    return warpgroup_mma(tail, q_tail.permute((1, 0)), d, is_async=True)


@gluon.jit
def _combine_digits(d, S: gl.constexpr):
    """Returns float32 scores of the matmuls of ``_multiply_int8_keys``."""
    high, low = gl.split(gl.permute(gl.reshape(d, [d.shape[0], 2, ROWS]), (0, 2, 1)))
    s = high.to(gl.float32) * 256.0 + low.to(gl.float32)
    return gl.convert_layout(s, S, assert_trivial=True)


@gluon.jit
def _add_float8_scores(s, pairs, q, KIND: gl.constexpr, PTX: gl.constexpr, A: gl.constexpr):
    """Returns s plus matmuls of float8 columns; some are converted while others are added."""
    COLUMNS: gl.constexpr = pairs.shape[1] if pairs.shape[1] < 64 else 64
    STEPS: gl.constexpr = pairs.shape[1] // COLUMNS
    x = pairs.slice(0, COLUMNS, dim=1).load(A)
    for n in gl.static_range(STEPS):
        halves = gl.split(gl.reshape(x, [x.shape[0], COLUMNS // 2, 2]))
        if n + 1 < STEPS:
            x = pairs.slice((n + 1) * COLUMNS, COLUMNS, dim=1).load(A)
        for i in gl.static_range(2):
            k = gl.convert_layout(convert_adjacent(halves[i], KIND, PTX), A, assert_trivial=True)
            q_columns = q.slice(i * ROWS, ROWS, dim=0).slice(n * COLUMNS, COLUMNS, dim=1)
            s = warpgroup_mma(k, q_columns.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(2, deps=[s])
    return s


@gluon.jit
def _store_column_pairs(out, even, odd, HEADS: gl.constexpr, MAIN: gl.constexpr):
    """Stores even and odd columns ``[columns, heads]`` to rows of MAIN columns."""
    both = gl.join(even, odd).to(out.dtype.element_ty)
    L: gl.constexpr = both.type.layout
    c = gl.arange(0, both.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    head = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    i = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    offset = (c * 2)[:, None, None] + (head * MAIN)[None, :, None] + i[None, None, :]
    gl.store(out + offset, both, mask=(head < HEADS)[None, :, None])


@gluon.jit
def _attend_rows(
    q, cache, sequences, k_scale, partial, sizes, logits, work, ring, capacity, weights, q_main,
    q_tail,
    HEADS: gl.constexpr, BLOCK: gl.constexpr, SPLITS: gl.constexpr, SETUP_TILES: gl.constexpr,
    PTX: gl.constexpr,
):  # fmt: skip
    """Computes the partial results of a range.

    ``weights``, ``q_main``, ``q_tail``: shared memory of operands.
    """
    SLOTS: gl.constexpr = ring.main.shape[0]
    MAIN: gl.constexpr = cache.K.MAIN
    KIND: gl.constexpr = cache.K.KIND
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * ROWS, 32])
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    HEAD: gl.constexpr = gl.SliceLayout(0, S)
    HALF: gl.constexpr = MAIN // 4  # pairs of columns
    b = work.sequence
    before = work.sequence_start
    has_work = work.has_work
    slot = 0
    phase = 0
    main_columns, tail_columns = _read_queries(q, b, has_work, cache, HEADS)
    while has_work:
        factor = logits.scale
        if k_scale.array is not None:
            factor *= gl.load(k_scale.array + b * k_scale.row).to(gl.float32)
        length, first, stop, before, has_work = _select_tiles(
            sequences, work, b, before, capacity, sizes, BLOCK, SPLITS, SETUP_TILES
        )
        slopes, inner = _store_queries(
            main_columns, tail_columns, factor, logits, cache, q_main, q_tail
        )
        slopes = gl.convert_layout(slopes, HEAD)
        inner = gl.convert_layout(inner, HEAD)
        gl.barrier()

        m = gl.full([ROWS], float("-inf"), gl.float32, HEAD)
        l = gl.zeros([BLOCK, ROWS], gl.float32, S)  # noqa: E741
        zero = gl.zeros([HALF, ROWS], gl.float32, S)
        sums = (zero, zero, zero, zero)  # even and odd columns of the first half, and of the second
        for tile in tl.range(first, stop, disable_licm=True):
            main = ring.main.index(slot)
            tail = ring.tail.index(slot)
            mbarrier.wait(ring.full.index(slot), phase)
            pairs = main.reinterpret(gl.int16, [BLOCK, MAIN // 2], PAIRS)
            if KIND == "int8":
                d = _multiply_int8_keys(main, tail, q_main, q_tail, BOTH)
            else:
                d = gl.zeros([BLOCK, ROWS], gl.float32, S)
                d = _add_float8_scores(d, pairs, q_main, KIND, PTX, A)
                d = _add_float8_scores(d, tail, q_tail, KIND, PTX, A)
            transposed = pairs.permute((1, 0))
            first_half = transposed.slice(0, HALF).load(A)
            second_half = transposed.slice(HALF, HALF).load(A)
            d = warpgroup_mma_wait(0, deps=[d])
            s = _combine_digits(d, S) if KIND == "int8" else d
            # the compiler puts a barrier of all warps before this, which tests look for
            mbarrier.arrive(ring.empty.index(slot))
            slot, phase = _advance_slot(slot, phase, SLOTS)

            if logits.CAPPED:
                s = tanh_from_exp2(s * inner[None, :])
            j = tile * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, S))
            s = gl.where((j < length)[:, None], s, float("-inf"))
            top = gl.maximum(m, gl.max(s, 0))
            base = gl.where(top == float("-inf"), 0.0, top)
            p = gl.exp2((s - base[None, :]) * slopes[None, :]).to(gl.float16)
            weights.store(p)
            alpha = gl.exp2((m - base) * slopes)[None, :]
            l = l * alpha + p.to(gl.float32)  # noqa: E741
            m = top
            fence_async_shared()
            gl.barrier()
            even, odd = convert_pairs(first_half, KIND, PTX)
            even = warpgroup_mma(even, weights, sums[0] * alpha, is_async=True)
            odd = warpgroup_mma(odd, weights, sums[1] * alpha, is_async=True)
            # converted when half of the first are no longer needed: registers
            even, odd, second_half = warpgroup_mma_wait(1, deps=[even, odd, second_half])
            even_2, odd_2 = convert_pairs(second_half, KIND, PTX)
            even_2 = warpgroup_mma(even_2, weights, sums[2] * alpha, is_async=True)
            odd_2 = warpgroup_mma(odd_2, weights, sums[3] * alpha, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[even, odd, even_2, odd_2])

        # the next queries are on their way while these accumulators are stored
        main_columns, tail_columns = _read_queries(q, b + 1, has_work, cache, HEADS)
        partial_slot = gl.program_id(0)
        if SPLITS == 0:
            partial_slot += b
        row = partial_slot.to(gl.int64) * HEADS
        head = gl.arange(0, ROWS, layout=HEAD)
        total = gl.sum(l, 0)
        if partial.acc.dtype.element_ty == gl.float16:
            weight = average_factor(total)[None, :]
            even, odd, even_2, odd_2 = sums
            sums = (even * weight, odd * weight, even_2 * weight, odd_2 * weight)
        gl.store(partial.m + row + head, partial_logit(m, slopes, total), mask=head < HEADS)
        gl.store(partial.l + row + head, total, mask=head < HEADS)
        for n in gl.static_range(2):
            out = partial.acc + row * MAIN + 2 * HALF * n
            _store_column_pairs(out, sums[2 * n], sums[2 * n + 1], HEADS, MAIN)
        b += 1


# ---- the kernel ----------------------------------------------------------------------------------


@gluon.jit
def latent_split(
    q, cache, sequences, k_scale, partial, starts, sizes, logits, layout,
    BLOCK: gl.constexpr, LANES: gl.constexpr, ROUNDS: gl.constexpr, SPLITS: gl.constexpr,
    SETUP_TILES: gl.constexpr, PTX: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Parameters as of ``paged_split``. SLOTS: steps in shared memory."""
    MAIN: gl.constexpr = cache.K.MAIN
    TAIL: gl.constexpr = cache.K.TAIL
    mains = gl.allocate_shared_memory(
        gl.int16, [SLOTS, 1, 1, BLOCK, MAIN // 2], gl.NVMMASharedLayout(128, 16, 4)
    )
    tails = gl.allocate_shared_memory(
        gl.int16, [SLOTS, BLOCK, TAIL // 2], gl.NVMMASharedLayout(TAIL, 16, 2)
    )
    weights = gl.allocate_shared_memory(gl.float16, [BLOCK, ROWS], gl.NVMMASharedLayout(32, 16, 2))
    # both operands that are multiplied with keys, one below the other
    IS_INT8: gl.constexpr = cache.K.KIND == "int8"
    DTYPE: gl.constexpr = gl.int8 if IS_INT8 else gl.float16
    OPERANDS: gl.constexpr = 1 if IS_INT8 else 2  # that share the columns of a key
    BITS: gl.constexpr = 8 * OPERANDS
    q_main = gl.allocate_shared_memory(
        DTYPE, [2 * ROWS, MAIN // OPERANDS], gl.NVMMASharedLayout(128, BITS, 2)
    )
    q_tail = gl.allocate_shared_memory(
        DTYPE, [2 * ROWS, TAIL // OPERANDS], gl.NVMMASharedLayout(TAIL, BITS, 2)
    )
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(SLOTS):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=1)
    fence_async_shared()
    capacity = sizes.max_pages * cache.PAGE
    work = _find_work(sequences, sizes, starts, capacity, BLOCK, LANES, SPLITS, SETUP_TILES, ROUNDS)
    ring = Ring(mains, tails, full, empty)
    gl.warp_specialize(
        [
            (_attend_rows, (
                q, cache, sequences, k_scale, partial, sizes, logits, work, ring, capacity,
                weights, q_main, q_tail, layout.ALL, BLOCK, SPLITS, SETUP_TILES, PTX,
            )),
            (_load_rows, (
                cache, sequences, sizes, work, ring, capacity, BLOCK, SPLITS, SETUP_TILES,
            )),
        ],
        [1],
        [LOADER_REGISTERS],
    )  # fmt: skip


def is_supported(problem: Any, tiles: Any) -> bool:
    """Returns whether ``latent_split`` computes a call."""
    p, t = problem, tiles
    shape = (t.block, t.num_warps, p.tokens, *column_parts(p)[0]) == (64, 4, 1, 512, 64)
    form = t.form in ("int8_split", "column_pairs") and t.splits != 1
    return shape and form and p.heads <= ROWS.value and p.batch <= MAX_LANES * MAX_ROUNDS


@dataclass(frozen=True)
class LatentSplit(SubstituteLaunch, CacheLaunch):
    """Launch of ``latent_split`` in the place of ``general``, a launch of ``paged_split``."""

    kernel = latent_split
    batching: ClassVar = sequential("q k v lens tables begins rows counts k_scale v_scale sink")

    def options(self, target):
        return {"num_warps": self.general.tiles.num_warps, "num_stages": 1, "maxnreg": REGISTERS}

    def arguments(self, target):
        batch, tiles = self.general.problem.batch, self.general.tiles
        lanes = min(MAX_LANES, power_of_two(batch))
        arguments = {
            **self.general.arguments(target),
            "SLOTS": max(1, tiles.num_stages - 1),
            "LANES": lanes,
            "ROUNDS": -(-batch // lanes),
        }
        return {name: x for name, x in arguments.items() if name in self.kernel.arg_names}

"""Latent decoding of 8-bit rows with up to 16 heads on Hopper: keys are the rows of its matmuls.

What ``page_attention.split_kernel`` computes, of one query row a sequence, turned round:

    s^T [tokens, heads] = K q^T;    acc^T [columns, heads] += V^T p^T

An asynchronous matmul has 64 rows, of which heads would fill 16; keys and columns fill them all,
and 16 heads are the narrowest second operand. Queries stay in shared memory; values, which are
needed in float16, pass through registers.

One warp loads (``latent_loads``), four compute:

    rows of a step arrive -> scores, values into registers -> their place is free
                          -> softmax -> values, a part while the next part is converted

Two programs share a multiprocessor, and its registers: a thread that computes has 232 of them.

Bound: reading the rows once: 64 contexts of 8192, 0.070 ms at 4.3 TB/s. Measured, merge included:
0.083 ms, int8 and float8_e4m3fn.

In Gluon (``compat.has_gluon``). No interpreter runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ejkernel.kernels.triton.common.eight_bit import pair_numbers
from ejkernel.kernels.triton.common.softmax import tanh_from_exp2
from ejkernel.kernels.triton.language import tl
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.page_attention.latent_loads import (
    Ring,
    load_rows,
    next_place,
    run_of,
    share_of,
)
from ejkernel.kernels.triton.page_attention.latent_products import (
    ROWS,
    add_scores,
    read_queries,
    scores_as_they_lie,
    store_pairs,
    store_queries,
    sum_of_digits,
)
from ejkernel.kernels.triton.page_attention.launch import CacheLaunch, PagedLaunch, sequential
from ejkernel.kernels.triton.page_attention.merge_kernel import average, part_logit
from ejkernel.kernels.triton.page_attention.params import column_parts
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

MAX_LANES = 1024  # sequences looked at together when a share finds its place,
MAX_ROUNDS = 4  # rounds of MAX_LANES sequences; the compiler unrolls them
# that a thread starts with: two programs of eight warps share 65536. Four compute, one loads, three
# are Triton's and do nothing: those four give theirs up, so that the others have 232
REGISTERS = 128
LOADER_REGISTERS = gl.constexpr(24)


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

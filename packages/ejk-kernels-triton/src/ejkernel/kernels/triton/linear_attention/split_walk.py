"""``walk`` with a query, of float32 numbers on Hopper: here is said what waits for what.

The numbers are those of ``walk``. Two programs share a multiprocessor, which leaves each chunk's
rows one buffer: there every chunk waits for three copies. Here a copy begins as soon as the last
reader of the rows before is done, and has the rest of the chunk's time; products run while others'
operands are made.

    q lies there until q H and q k^T are done, v until its parts are made, k until its parts are
    q H, q k^T  |  parts of v and of the weights  |  weights v  |  parts of k, k^T v

One place has first the state for q H, then the parts of v, as they are and decayed. Of 128 x 64
states and 64 rows that makes 113 KiB. Invariants stay in the loop: what two programs spill has no
room in the first cache beside that, and goes through the second.

Bound, 2 x 8192 rows, 16 heads of 128: as many bytes as ``walk`` twice, 0.13 ms; products 0.11 ms.
Measured: 0.178 ms, where ``walk`` takes 0.41; with invariants hoisted 0.232.

In Gluon, whose names changed until Triton 3.9 (``compat.has_gluon``). No interpreter runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel.kernels.triton.bound_launch import BoundLaunch
from ejkernel.kernels.triton.language import tl
from ejkernel.kernels.triton.plan import bound
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def parts(x):
    """x as (its bfloat16 number, the rest), two neighbours at a time."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 first, second;
        cvt.rn.bf16x2.f32 $0, $3, $2;
        shl.b32 first, $0, 16;
        and.b32 second, $0, 0xffff0000;
        sub.f32 first, $2, first;
        sub.f32 second, $3, second;
        cvt.rn.bf16x2.f32 $1, second, first;
        }""",
        "=&r,=&r,r,r",
        [x],
        (gl.bfloat16, gl.bfloat16),
        True,
        2,
    )


@gluon.jit
def power(x):
    """exp(x), 0 where that is below 2^-126: smaller numbers cost two more steps."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * 1.4426950408889634], gl.float32, True, 1
    )


@gluon.jit
def begin_load(rows, at, column, landed, buffer, wanted):
    mbarrier.expect(landed, rows.nbytes_per_cta, pred=wanted)
    tma.async_load(rows, [at, column], landed, buffer, pred=wanted)


@gluon.jit
def split_walk(
    query,
    key,
    value,
    high_sums,
    low_sums,
    gate_totals,
    starts,
    out,
    states,
    rows,
    heads,
    query_heads,
    key_heads,
    value_heads,
    dim,
    columns,
    pieces,
    scale_in,
    scale_out,
    SWAPPED: gl.constexpr,
    LATER: gl.constexpr,
    CHUNK: gl.constexpr,
    SEGMENT: gl.constexpr,
    DIM: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Parameters as of ``walk``; rows are whole chunks."""
    # products: one chunk's output from numbers, its weights, and what comes from parts
    FULL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 8])
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 8])
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    NUMBERS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    TURNED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2, transposed=True)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    HALF: gl.constexpr = CHUNK // 2

    across = columns // COLUMNS
    program = gl.program_id(0)
    column = program % across * COLUMNS
    head = program // across % heads
    slot = (program // across // heads).to(gl.int64)
    begin = (slot % pieces).to(gl.int32) * SEGMENT
    base = slot // pieces * rows + begin
    steps = (gl.minimum(rows, begin + SEGMENT) - begin) // CHUNK
    if LATER:
        first = (steps - 1) * CHUNK
        step = -CHUNK
    else:
        first = 0
        step = CHUNK
    chunk = slot * (SEGMENT // CHUNK) + first // CHUNK

    d = gl.arange(0, DIM, layout=gl.SliceLayout(1, S))[:, None]
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, S))[None, :]
    if SWAPPED:
        place = (column + c) * dim + d
    else:
        place = d * columns + column + c
    size = (heads * dim * columns).to(gl.int64)
    state = gl.load(starts + slot * size + head * dim * columns + place)
    if states is not None:
        states += chunk * size + head * dim * columns

    q_rows = gl.allocate_shared_memory(gl.float32, [CHUNK, DIM], NUMBERS)
    k_rows = gl.allocate_shared_memory(gl.float32, [CHUNK, DIM], NUMBERS)
    v_rows = gl.allocate_shared_memory(gl.float32, [CHUNK, COLUMNS], NUMBERS)
    # of v: (number, rest), the same decayed; before them the state
    pairs = gl.allocate_shared_memory(gl.bfloat16, [4, CHUNK, COLUMNS], PAIRS)
    kept = pairs.reinterpret(gl.float32, [DIM, COLUMNS], TURNED)
    sums = gl.allocate_shared_memory(gl.float32, [3, CHUNK], LINES)
    landed = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(3):
        mbarrier.init(landed.index(n), count=1)
    fence_async_shared()
    gl.barrier()
    row = (base + first).to(gl.int32)
    q_at = head // (heads // query_heads) * dim
    k_at = head // (heads // key_heads) * dim
    v_at = head // (heads // value_heads) * columns + column
    begin_load(query, row, q_at, landed.index(0), q_rows, True)
    begin_load(key, row, k_at, landed.index(1), k_rows, True)
    begin_load(value, row, v_at, landed.index(2), v_rows, True)

    gate_at = (base + first + gl.arange(0, CHUNK, layout=EACH)) * heads + head
    total_at = gate_totals + chunk * 2 * heads + head
    high = gl.load(high_sums + gate_at)
    low = gl.load(low_sums + gate_at)
    high_all = gl.load(total_at)
    low_all = gl.load(total_at + heads)
    out += ((base + first) * heads + head) * columns + column
    out_place = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, S))[:, None] * (heads * columns) + c
    i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, W))[:, None]
    j = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, W))[None, :]
    no_o = gl.zeros([CHUNK, COLUMNS], gl.float32, FULL)
    no_weights = gl.zeros([CHUNK, CHUNK], gl.float32, W)
    for t in tl.range(0, steps, disable_licm=True):
        phase = t & 1
        more = t + 1 < steps
        row += step
        if LATER:
            rest = high + low
        else:
            rest = (high_all - high) + (low_all - low)
        sums.index(0).store(high)
        sums.index(1).store(low)
        sums.index(2).store(power(rest) * scale_in)
        every_high = high_all
        every_low = low_all
        kept.store(state)
        if states is not None:
            gl.store(states + place, state)
            states += step // CHUNK * size
        fence_async_shared()
        gl.barrier()
        mbarrier.wait(landed.index(0), phase)
        o = warpgroup_mma(q_rows, kept, no_o, use_acc=False, precision="tf32", is_async=True)
        mbarrier.wait(landed.index(1), phase)
        weights = warpgroup_mma(
            q_rows, k_rows.permute((1, 0)), no_weights, use_acc=False, precision="tf32",
            is_async=True,
        )  # fmt: skip
        gate_at += gl.where(more, step * heads, 0)
        total_at += gl.where(more, step // CHUNK * 2 * heads, 0)
        high = gl.load(high_sums + gate_at)
        low = gl.load(low_sums + gate_at)
        high_all = gl.load(total_at)
        low_all = gl.load(total_at + heads)
        o, weights = warpgroup_mma_wait(0, deps=[o, weights])
        gl.barrier()
        begin_load(query, row, q_at, landed.index(0), q_rows, more)

        mbarrier.wait(landed.index(2), phase)
        v = v_rows.load(ROWS)
        v_high, v_low = parts(v)
        pairs.index(0).store(v_high)
        pairs.index(1).store(v_low)
        v_high, v_low = parts(v * sums.index(2).load(gl.SliceLayout(1, ROWS))[:, None])
        pairs.index(2).store(v_high)
        pairs.index(3).store(v_low)
        fence_async_shared()
        since = sums.index(0).load(gl.SliceLayout(1, FULL))
        fine = sums.index(1).load(gl.SliceLayout(1, FULL))
        if LATER:
            since = (every_high - since) + (every_low - fine)
        else:
            since += fine
        o = o * (power(since) * scale_out)[:, None]
        between = sums.index(0).load(gl.SliceLayout(1, W))[:, None]
        between = between - sums.index(0).load(gl.SliceLayout(0, W))[None, :]
        fine = sums.index(1).load(gl.SliceLayout(1, W))[:, None]
        between += fine - sums.index(1).load(gl.SliceLayout(0, W))[None, :]
        if LATER:
            between = gl.where(i <= j, -between, float("-inf"))
        else:
            between = gl.where(i >= j, between, float("-inf"))
        weights = weights * power(between) * (scale_in * scale_out)
        w_high, w_low = parts(weights)
        w_high = gl.convert_layout(w_high, LEFT)
        w_low = gl.convert_layout(w_low, LEFT)
        gl.barrier()
        begin_load(value, row, v_at, landed.index(2), v_rows, more)
        o = gl.convert_layout(o, S)
        o = warpgroup_mma(w_low, pairs.index(0), o, is_async=True)
        o = warpgroup_mma(w_high, pairs.index(1), o, is_async=True)
        o = warpgroup_mma(w_high, pairs.index(0), o, is_async=True)
        # waiting here costs less than the registers of both products at once
        o = warpgroup_mma_wait(0, deps=[o])
        gl.store(out + out_place, o)
        out += step * heads * columns

        state = state * power(every_high + every_low)
        for n in gl.static_range(2):  # one half's parts are made during the other's products
            k = k_rows.slice(n * HALF, HALF).permute((1, 0)).load(LEFT)
            k_high, k_low = parts(k)
            v_high = pairs.index(2).slice(n * HALF, HALF)
            v_low = pairs.index(3).slice(n * HALF, HALF)
            state = warpgroup_mma(k_low, v_high, state, is_async=True)
            state = warpgroup_mma(k_high, v_low, state, is_async=True)
            state = warpgroup_mma(k_high, v_high, state, is_async=True)
        gl.barrier()
        begin_load(key, row, k_at, landed.index(1), k_rows, more)
        state = warpgroup_mma_wait(0, deps=[state])
        gl.barrier()


def launch(arguments: Mapping[str, Any], walked: BoundLaunch) -> BoundLaunch:
    """In the place of ``walked``, a launch of ``walk`` with these ``arguments``."""
    return bound(split_walk, {}, walked.grid, 4, 1, known=arguments, stand_in=walked)

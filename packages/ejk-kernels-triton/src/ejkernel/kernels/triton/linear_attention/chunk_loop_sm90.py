"""``chunk_loop`` with a query, in float32 on Hopper, with hand-placed waits.

Results as of ``chunk_loop``. Two programs share a multiprocessor, which leaves each
chunk's rows one buffer: there every chunk waits for three copies. Here a copy starts as soon as the
last reader of the rows before is done, and has the remaining time of the chunk; matmuls run while
operands of others are made.

    q stays until q H and q k^T are done, v until it is split, k until it is split
    q H, q k^T  |  split v and the weights  |  weights v  |  split k, k^T v

One buffer has first the state for q H, then the split v, as it is and decayed. With 128 x 64
states and 64 rows that makes 113 KiB. Invariants stay in the loop: what two programs spill does not
fit the first-level cache next to that, and goes through the second.

Bound, 2 x 8192 rows, 16 heads of 128: twice the bytes of ``chunk_loop``, 0.13 ms; matmuls 0.11 ms.
Measured: 0.178 ms, where ``chunk_loop`` takes 0.41; with invariants hoisted 0.232.

In Gluon, whose names changed until Triton 3.9 (``compat.has_gluon``). No interpreter runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ejkernel.kernels.triton.language import tl
from ejkernel.kernels.triton.launch import BATCHED, SubstituteLaunch
from ejkernel.kernels.triton.linear_attention.launch import GATE_SUMS
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
def split_float32(x):
    """Splits x into a bfloat16 value and the remainder, two neighbours at a time."""
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
def flushed_exp(x):
    """Returns exp(x), 0 if below 2^-126: smaller values cost two more instructions."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * 1.4426950408889634], gl.float32, True, 1
    )


@gluon.jit
def start_load(rows, at, column, barrier, buffer, pred):
    mbarrier.expect(barrier, rows.nbytes_per_cta, pred=pred)
    tma.async_load(rows, [at, column], barrier, buffer, pred=pred)


class Sizes(NamedTuple):
    """Sizes of a pass, see ``chunk_loop.Sizes``."""

    rows: int
    heads: int
    query_heads: int
    key_heads: int
    value_heads: int
    dim: int
    columns: int
    pieces: int


@gluon.jit
def chunk_loop_sm90(
    query, key, value, high_sums, low_sums, gate_totals, starts, out, states, sizes, scale_in,
    scale_out, SWAPPED: gl.constexpr, LATER: gl.constexpr, CHUNK: gl.constexpr,
    SEGMENT: gl.constexpr, DIM: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Loops over the full chunks of a segment; parameters as of ``chunk_loop``."""
    rows, heads, dim, columns = sizes.rows, sizes.heads, sizes.dim, sizes.columns
    pieces = sizes.pieces
    # layouts: one chunk's output from values, its weights, and matmuls of split operands
    FULL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 8])
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 8])
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    FLOAT32: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    TRANSPOSED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2, transposed=True)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    VECTORS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
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
        element = (column + c) * dim + d
    else:
        element = d * columns + column + c
    size = (heads * dim * columns).to(gl.int64)
    state = gl.load(starts + slot * size + head * dim * columns + element)
    if states is not None:
        states += chunk * size + head * dim * columns

    q_rows = gl.allocate_shared_memory(gl.float32, [CHUNK, DIM], FLOAT32)
    k_rows = gl.allocate_shared_memory(gl.float32, [CHUNK, DIM], FLOAT32)
    v_rows = gl.allocate_shared_memory(gl.float32, [CHUNK, COLUMNS], FLOAT32)
    # v split into value and remainder, the same decayed; before them the state
    pairs = gl.allocate_shared_memory(gl.bfloat16, [4, CHUNK, COLUMNS], PAIRS)
    state_buffer = pairs.reinterpret(gl.float32, [DIM, COLUMNS], TRANSPOSED)
    gate_sums = gl.allocate_shared_memory(gl.float32, [3, CHUNK], VECTORS)
    barriers = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(3):
        mbarrier.init(barriers.index(n), count=1)
    fence_async_shared()
    gl.barrier()
    row = (base + first).to(gl.int32)
    q_at = head // (heads // sizes.query_heads) * dim
    k_at = head // (heads // sizes.key_heads) * dim
    v_at = head // (heads // sizes.value_heads) * columns + column
    start_load(query, row, q_at, barriers.index(0), q_rows, True)
    start_load(key, row, k_at, barriers.index(1), k_rows, True)
    start_load(value, row, v_at, barriers.index(2), v_rows, True)

    gate_at = (base + first + gl.arange(0, CHUNK, layout=ROW)) * heads + head
    total_at = gate_totals + chunk * 2 * heads + head
    high = gl.load(high_sums + gate_at)
    low = gl.load(low_sums + gate_at)
    high_all = gl.load(total_at)
    low_all = gl.load(total_at + heads)
    out += ((base + first) * heads + head) * columns + column
    out_element = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, S))[:, None] * (heads * columns) + c
    i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, W))[:, None]
    j = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, W))[None, :]
    no_o = gl.zeros([CHUNK, COLUMNS], gl.float32, FULL)
    no_weights = gl.zeros([CHUNK, CHUNK], gl.float32, W)
    for t in tl.range(0, steps, disable_licm=True):
        phase = t & 1
        has_next = t + 1 < steps
        row += step
        if LATER:
            until = high + low
        else:
            until = (high_all - high) + (low_all - low)
        gate_sums.index(0).store(high)
        gate_sums.index(1).store(low)
        gate_sums.index(2).store(flushed_exp(until) * scale_in)
        decay_high = high_all
        decay_low = low_all
        state_buffer.store(state)
        if states is not None:
            gl.store(states + element, state)
            states += step // CHUNK * size
        fence_async_shared()
        gl.barrier()
        mbarrier.wait(barriers.index(0), phase)
        o = warpgroup_mma(
            q_rows, state_buffer, no_o, use_acc=False, precision="tf32", is_async=True
        )
        mbarrier.wait(barriers.index(1), phase)
        weights = warpgroup_mma(
            q_rows, k_rows.permute((1, 0)), no_weights, use_acc=False, precision="tf32",
            is_async=True,
        )  # fmt: skip
        gate_at += gl.where(has_next, step * heads, 0)
        total_at += gl.where(has_next, step // CHUNK * 2 * heads, 0)
        high = gl.load(high_sums + gate_at)
        low = gl.load(low_sums + gate_at)
        high_all = gl.load(total_at)
        low_all = gl.load(total_at + heads)
        o, weights = warpgroup_mma_wait(0, deps=[o, weights])
        gl.barrier()
        start_load(query, row, q_at, barriers.index(0), q_rows, has_next)

        mbarrier.wait(barriers.index(2), phase)
        v = v_rows.load(ROWS)
        v_high, v_low = split_float32(v)
        pairs.index(0).store(v_high)
        pairs.index(1).store(v_low)
        v_high, v_low = split_float32(v * gate_sums.index(2).load(gl.SliceLayout(1, ROWS))[:, None])
        pairs.index(2).store(v_high)
        pairs.index(3).store(v_low)
        fence_async_shared()
        since = gate_sums.index(0).load(gl.SliceLayout(1, FULL))
        fine = gate_sums.index(1).load(gl.SliceLayout(1, FULL))
        if LATER:
            since = (decay_high - since) + (decay_low - fine)
        else:
            since += fine
        o = o * (flushed_exp(since) * scale_out)[:, None]
        between = gate_sums.index(0).load(gl.SliceLayout(1, W))[:, None]
        between = between - gate_sums.index(0).load(gl.SliceLayout(0, W))[None, :]
        fine = gate_sums.index(1).load(gl.SliceLayout(1, W))[:, None]
        between += fine - gate_sums.index(1).load(gl.SliceLayout(0, W))[None, :]
        if LATER:
            between = gl.where(i <= j, -between, float("-inf"))
        else:
            between = gl.where(i >= j, between, float("-inf"))
        weights = weights * flushed_exp(between) * (scale_in * scale_out)
        w_high, w_low = split_float32(weights)
        w_high = gl.convert_layout(w_high, LEFT)
        w_low = gl.convert_layout(w_low, LEFT)
        gl.barrier()
        start_load(value, row, v_at, barriers.index(2), v_rows, has_next)
        o = gl.convert_layout(o, S)
        o = warpgroup_mma(w_low, pairs.index(0), o, is_async=True)
        o = warpgroup_mma(w_high, pairs.index(1), o, is_async=True)
        o = warpgroup_mma(w_high, pairs.index(0), o, is_async=True)
        # waiting here costs less than the registers of both accumulators at once
        o = warpgroup_mma_wait(0, deps=[o])
        gl.store(out + out_element, o)
        out += step * heads * columns

        state = state * flushed_exp(decay_high + decay_low)
        for n in gl.static_range(2):  # one half is split during the other's matmuls
            k = k_rows.slice(n * HALF, HALF).permute((1, 0)).load(LEFT)
            k_high, k_low = split_float32(k)
            v_high = pairs.index(2).slice(n * HALF, HALF)
            v_low = pairs.index(3).slice(n * HALF, HALF)
            state = warpgroup_mma(k_low, v_high, state, is_async=True)
            state = warpgroup_mma(k_high, v_low, state, is_async=True)
            state = warpgroup_mma(k_high, v_high, state, is_async=True)
        gl.barrier()
        start_load(key, row, k_at, barriers.index(1), k_rows, has_next)
        state = warpgroup_mma_wait(0, deps=[state])
        gl.barrier()


@dataclass(frozen=True)
class ChunkLoopSm90(SubstituteLaunch):
    """Launch of ``chunk_loop_sm90`` in the place of ``general``, a launch of ``chunk_loop``."""

    kernel = chunk_loop_sm90
    batching: ClassVar = dict.fromkeys((*GATE_SUMS, "starts"), BATCHED)

    def options(self, target):
        return {"num_warps": 4, "num_stages": 1}

    def arguments(self, target):
        general = self.general.arguments(target)
        s, tile = general["sizes"], general["tile"]
        names = ("query", "key", "value", "scale_in", "scale_out")
        return {
            **{name: general[name] for name in names},
            "sizes": Sizes(
                s.rows, s.heads, s.query_heads, s.key_heads, s.value_heads, s.dim, s.columns,
                s.pieces,
            ),
            **{n: getattr(tile, n) for n in ("SWAPPED", "LATER", "CHUNK", "SEGMENT")},
            **{n: getattr(tile, n) for n in ("DIM", "COLUMNS")},
        }  # fmt: skip

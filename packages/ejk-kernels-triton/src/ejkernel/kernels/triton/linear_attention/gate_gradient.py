"""The gradient of one log decay a row and head.

The gate of row r decays every pair of a row s before it in time and a row t from it on. With
Z[t, s] = scale (q_t k_s) (do_t v_s) D[t, s], the sum over all such pairs is, chunk by chunk,

    dg_r = sum over t >= r, s < r in the chunk of Z[t, s]
         + sum over t >= r of scale exp(since_t) (q_t H) do_t        s before the chunk
         + sum over s < r of exp(rest_s) (k_s dH) v_s                t after the chunk
         + exp(all) sum of H . dH                                    both outside

H being the state before the chunk and dH the gradient of the one after it, which the walks kept.
The first line is a sum over rows less one over columns, both of the same float32 numbers and
without the diagonal, which no gate decays. No sum runs past a chunk, so that strong decays and long
sequences lose nothing; the other three lines subtract nothing.

Work split: one chunk of one head a program, value columns in turn.

Bound: q, k, v, do and two states a chunk are read: memory. 2 x 8192 rows, 16 heads of 128, chunks
of 64, bfloat16: 268 + 268 MB = 0.125 ms on an H200; the walks wrote the states in another 0.06 ms.
"""

from __future__ import annotations

from ejkernel.kernels.triton.bound_launch import BoundLaunch, Out
from ejkernel.kernels.triton.common.sequences import find_segment
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.linear_attention.gates import chunk_sums, pair_decays
from ejkernel.kernels.triton.linear_attention.opening import opening
from ejkernel.kernels.triton.linear_attention.problem import Problem
from ejkernel.kernels.triton.linear_attention.rows import POINTERS, load_rows
from ejkernel.kernels.triton.linear_attention.tiles import Tiles, width
from ejkernel.kernels.triton.plan import inputs
from ejkernel.kernels.triton.targets import Target


@triton.jit
def gate_gradient(of, states, dstates, cu, dgate):
    heads, kv_heads, dim, columns = of.heads, of.kv_heads, of.dim, of.columns
    CHUNK: tl.constexpr = of.CHUNK
    SEGMENT: tl.constexpr = of.SEGMENT
    DIM: tl.constexpr = of.DIM
    COLUMNS: tl.constexpr = of.COLUMNS
    MAPS: tl.constexpr = of.MAPS
    OPERAND: tl.constexpr = of.OPERAND
    PRECISION: tl.constexpr = of.PRECISION
    program = tl.program_id(0)
    head = program % heads
    kv_head = head // (heads // kv_heads)
    slot = (program // heads).to(tl.int64)
    segment = slot // (SEGMENT // CHUNK)
    at = (slot % (SEGMENT // CHUNK)).to(tl.int32) * CHUNK
    batch, begin, end, used = find_segment(
        cu, segment, of.pieces, of.rows, of.sequences, SEGMENT, of.LANES
    )
    length = used - begin
    base = batch * of.rows + begin
    row = base + at
    each = tl.arange(0, CHUNK)

    high, low, since, rest, every = chunk_sums(
        of.high_sums, of.low_sums, of.gate_totals, row * heads + head, slot, head, heads,
        length - at, of.REVERSED, CHUNK, POINTERS,
    )  # fmt: skip
    # chunks behind the segment may not even begin in the array
    base = tl.where(at < length, base, base - at)
    q = load_rows(of.query, base, length, at, head, heads, 0, dim, CHUNK, DIM, MAPS).to(OPERAND)
    k = load_rows(of.key, base, length, at, kv_head, kv_heads, 0, dim, CHUNK, DIM, MAPS).to(OPERAND)
    d = tl.arange(0, DIM)[:, None]
    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    reached = tl.zeros([CHUNK], tl.float32)
    leaving = tl.zeros([CHUNK], tl.float32)
    outside = 0.0
    state_at = (slot * heads + head) * dim * columns
    # chunks without rows have no states
    tall = tl.where(at < length, dim, 0)
    for column in tl.range(0, columns, COLUMNS):
        c = (column + tl.arange(0, COLUMNS))[None, :]
        v = load_rows(
            of.value, base, length, at, kv_head, kv_heads, column, columns, CHUNK, COLUMNS, MAPS
        ).to(OPERAND)  # fmt: skip
        do = load_rows(
            of.dout, base, length, at, head, heads, column, columns, CHUNK, COLUMNS, MAPS
        ).to(OPERAND)  # fmt: skip
        place = d * columns + c
        held = (d < tall) & (c < columns)
        h = tl.load(states + state_at + place, mask=held, other=0.0)
        dh = tl.load(dstates + state_at + place, mask=held, other=0.0)
        outside += tl.sum(tl.sum(h.to(tl.float32) * dh.to(tl.float32), 0), 0)
        qh = tl.dot(q, h.to(OPERAND), input_precision=PRECISION)
        kh = tl.dot(k, dh.to(OPERAND), input_precision=PRECISION)
        reached += tl.sum(qh * do.to(tl.float32), 1)
        leaving += tl.sum(kh * v.to(tl.float32), 1)
        products = tl.dot(do, tl.trans(v), products, input_precision=PRECISION)

    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    z = tl.dot(q, tl.trans(k), input_precision=PRECISION) * products
    z = tl.where(i == j, 0.0, z * pair_decays(high, low, of.REVERSED, CHUNK)) * of.scale
    since = tl.sum(z, 1) - tl.sum(z, 0) + reached * tl.exp(since) * of.scale
    until = leaving * tl.exp(rest)
    if of.REVERSED:
        now = j <= i
    else:
        now = j >= i
    # the two in one layout before they become rows
    dg = tl.sum(tl.where(now, since[None, :], until[None, :]), 1) + outside * tl.exp(every)
    tl.store(dgate + row * heads + head + each * heads, dg, mask=each < end - begin - at)


def launch(p: Problem, t: Tiles, target: Target) -> BoundLaunch:
    """Of operands q, k, v, do, sums of the gate, states and their gradients before every chunk,
    (cu)."""
    of = opening(p, t, target, min(t.columns, 32, width(p.value_dim)))
    others = inputs({"states": True, "dstates": True, "cu": p.sequences > 0}, first=7)
    arguments = {"of": of, **others, "dgate": Out(0)}
    grid = (p.batch * of.pieces * (t.segment // t.chunk) * p.heads,)
    options = {"num_warps": t.num_warps, "num_stages": t.num_stages}
    return BoundLaunch(gate_gradient, arguments, {}, grid, options)

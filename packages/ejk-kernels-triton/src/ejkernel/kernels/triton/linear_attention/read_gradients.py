"""Gradients of what was read, keys and values, in one walk.

As ``walk`` from the last chunk of a segment to the first, with the gradient dH of the state after
it in registers; S and P being the two products of rows with rows, D their decays:

    S = scale k q^T . D        P = v do^T        Z = S . P
    dv_s = S do + exp(since_s) k_s dH            dk_s = (scale P . D) q + exp(since_s) v_s dH^T
    dH <- exp(all) dH + scale q^T (exp(rest) do)

What the gradient of one log decay a row and head takes from here (``pull``) is b_s =
exp(since_s) (k_s dH) v_s, the sums of Z over rows and over columns, of the same float32 numbers and
without the diagonal, which no gate decays, and <H, dH> at the end of the segment.

Work split: a segment of one head a program; 128 x 128 float32 numbers of dH are 64 registers of
eight warps.

Bound: q, k, v, do are read, dk, dv written: memory. 2 x 8192 rows, 16 heads of 128, bfloat16:
403 MB = 0.094 ms on an H200. 10 products of 64 x 64 x 128 a chunk: 43 GFLOP = 0.062 ms. Measured:
0.259 ms with what the gate's gradient takes: products that wait for each other. With invariants
hoisted out of the loop, to be spilled, 0.297 ms.

Sources: as ``walk``.
"""

from __future__ import annotations

from ejkernel.kernels.triton.bound_launch import BoundLaunch
from ejkernel.kernels.triton.common.sequences import find_piece
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.linear_attention import tiles
from ejkernel.kernels.triton.linear_attention.gates import chunk_sums, pair_decays
from ejkernel.kernels.triton.linear_attention.opening import opening
from ejkernel.kernels.triton.linear_attention.problem import Problem
from ejkernel.kernels.triton.linear_attention.rows import (
    load_rows,
    store_rows,
)
from ejkernel.kernels.triton.linear_attention.tiles import Tiles, width
from ejkernel.kernels.triton.plan import inputs, results
from ejkernel.kernels.triton.targets import Target

OF_GATE = ("over", "leaving", "read", "reading")
ACROSS, DOWN = tl.constexpr(tiles.ACROSS), tl.constexpr(tiles.DOWN)


@triton.jit
def read_gradients(
    of,
    dstarts,
    starts,
    final,
    cu,
    dkey,
    dvalue,
    over,
    leaving,
    read,
    reading,
):
    """``over``: X at the end of every segment; ``leaving``: b; ``read`` and ``reading``: sums of Z
    over the rows that read one, and over those that one reads. None: no gradient of a gate.
    Sums that cross warps are left to who reads them, in ACROSS and DOWN parts."""
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
    batch = slot // of.pieces
    piece = (slot % of.pieces).to(tl.int32)
    tile = piece * SEGMENT
    sequence = 0
    start = 0
    end = of.rows
    if cu is not None:
        cu += batch * (of.sequences + 1)
        sequence, start, end, tile = find_piece(cu, of.sequences, of.rows, piece, SEGMENT, of.LANES)
    if of.REVERSED:
        last = tile <= start
        after = slot - 1
    else:
        last = tile + SEGMENT >= end
        after = slot + 1
    end = tl.minimum(end, tile + SEGMENT)
    begin = tl.maximum(tile, start)
    used = end
    owner = batch
    if cu is not None:
        # rows behind the last sequence read as 0 and write 0
        used = tl.where(sequence < of.sequences, end, begin)
        owner = batch * of.sequences + sequence
    steps = tl.maximum((end - begin + CHUNK - 1) // CHUNK, 0)

    d = tl.arange(0, DIM)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    tall = tl.where(used > begin, dim, 0)
    place = d * columns + c
    size = dim * columns
    dstarts += (slot * heads + head) * size
    if over is not None:
        # few elements at a time: addresses take registers as well
        starts += (after * heads + head) * size
        final += (owner * heads + head) * size
        e = tl.arange(0, 1024)
        known = tl.where(used > begin, size, 0)
        inner = tl.where(last, 0, known)
        sums = tl.zeros([1024], tl.float32)
        for first in tl.range(0, size, 1024):
            n = first + e
            h = tl.load(starts + n, mask=n < inner, other=0.0)
            h += tl.load(final + n, mask=(n >= inner) & (n < known), other=0.0)
            sums += h * tl.load(dstarts + n, mask=n < known, other=0.0)
        tl.store(over + slot * heads + head, tl.sum(sums, 0))
    dstate = tl.load(dstarts + place, mask=(c < columns) & (d < tall), other=0.0)
    base = batch * of.rows + begin
    length = used - begin
    each = tl.arange(0, CHUNK)
    i = each[:, None]
    j = each[None, :]
    for t in tl.range(0, steps, disable_licm=True):
        if of.REVERSED:
            at = t * CHUNK
        else:
            at = (steps - 1 - t) * CHUNK
        row = base + at
        q = load_rows(of.query, base, length, at, head, heads, 0, dim, CHUNK, DIM, MAPS).to(OPERAND)
        k = load_rows(of.key, base, length, at, kv_head, kv_heads, 0, dim, CHUNK, DIM, MAPS)
        k = k.to(OPERAND)
        v = load_rows(
            of.value, base, length, at, kv_head, kv_heads, 0, columns, CHUNK, COLUMNS, MAPS
        ).to(OPERAND)  # fmt: skip
        do = load_rows(
            of.dout, base, length, at, head, heads, 0, columns, CHUNK, COLUMNS, MAPS
        ).to(OPERAND)  # fmt: skip
        if of.high_sums is not None:
            high, low, since, rest, every = chunk_sums(
                of.high_sums, of.low_sums, of.gate_totals, row * heads + head,
                slot * (SEGMENT // CHUNK) + at // CHUNK, head, heads, length - at, not of.REVERSED,
                CHUNK, MAPS,
            )  # fmt: skip
            fresh = tl.exp(since)
        else:
            fresh = tl.zeros([CHUNK], tl.float32) + 1.0
        # what needs rows in registers comes first: they are read from shared memory where they
        # are loaded, and would wait in registers
        kept = dstate.to(OPERAND)
        dv = tl.dot(k, kept, input_precision=PRECISION) * fresh[:, None]
        written = end - begin - at
        of_row = row * heads + head + each * heads
        if over is not None:
            met = tl.reshape(dv * v.to(tl.float32), (CHUNK, ACROSS, COLUMNS // ACROSS))
            at_parts = of_row[:, None] * ACROSS + tl.arange(0, ACROSS)[None, :]
            tl.store(leaving + at_parts, tl.sum(met, 2), mask=each[:, None] < written)
        if of.high_sums is not None:
            sent = (do.to(tl.float32) * (tl.exp(rest) * of.scale)[:, None]).to(OPERAND)
            dstate = dstate * tl.exp(every)
            dstate = tl.dot(tl.trans(q), sent, dstate, input_precision=PRECISION)
        else:
            dstate += tl.dot(tl.trans(q), do, input_precision=PRECISION) * of.scale

        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        p = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        if of.high_sums is not None:
            decays = pair_decays(high, low, not of.REVERSED, CHUNK)
        elif of.REVERSED:
            decays = tl.where(i >= j, 1.0, 0.0)
        else:
            decays = tl.where(i <= j, 1.0, 0.0)
        s = s * decays
        if over is not None:
            z = tl.where(i == j, 0.0, s * p) * of.scale
            tl.store(read + of_row, tl.sum(z, 1), mask=each < written)
            z = tl.sum(tl.reshape(z, (DOWN, CHUNK // DOWN, CHUNK)), 1)
            at_parts = of_row[None, :] * DOWN + tl.arange(0, DOWN)[:, None]
            tl.store(reading + at_parts, z, mask=each[None, :] < written)
        p = p * decays

        # products of their own: one more summand in a product would tie their layouts
        dv += tl.dot(s.to(OPERAND), do, input_precision=PRECISION) * of.scale
        store_rows(dvalue, dv, row, written, head, heads, 0, columns, CHUNK, COLUMNS, MAPS)
        dk = tl.dot(v, tl.trans(kept), input_precision=PRECISION) * fresh[:, None]
        dk += tl.dot(p.to(OPERAND), q, input_precision=PRECISION) * of.scale
        store_rows(dkey, dk, row, written, head, heads, 0, dim, CHUNK, DIM, MAPS)


def launch(
    p: Problem, t: Tiles, target: Target, gated: bool, wanted: tuple[tuple[str, str], ...]
) -> BoundLaunch:
    """Of operands q, k, v, do, (sums of the gate), dstarts, (starts, final), (cu); ``wanted``: dkey
    and dvalue with their dtypes."""
    of = opening(p, t, target, width(p.value_dim))
    known = {"dstarts": True, "starts": gated, "final": gated, "cu": p.sequences > 0}
    made = dict.fromkeys((name for name, _ in wanted), True) | dict.fromkeys(OF_GATE, gated)
    arguments = {"of": of, **inputs(known, first=7 if p.scalar else 4), **results(made)}
    grid = (p.batch * of.pieces * p.heads,)
    warps = 8 if of.DIM * of.COLUMNS > 64 * 64 else 4
    stages = min(t.num_stages, 2)  # three do not fit
    options = {"num_warps": warps, "num_stages": stages}
    return BoundLaunch(read_gradients, arguments, {}, grid, options)

"""Gradients of keys and values of linear attention, in one loop.

As ``chunk_loop`` from the last chunk of a segment to the first, with the gradient dH of the state
after it in registers; S and P being the two matmuls of rows with rows, D their decays:

    S = scale k q^T . D        P = v do^T        Z = S . P
    dv_s = S do + exp(since_s) k_s dH            dk_s = (scale P . D) q + exp(since_s) v_s dH^T
    dH <- exp(chunk) dH + scale q^T (exp(until) do)

For the gradient of one log decay a row and head (``gate_gradient_rows``) it also writes b_s =
exp(since_s) (k_s dH) v_s, Z summed over rows and over columns, of the same float32 values and
without the diagonal, which no gate decays, and <H, dH> at the end of the segment.

Work split: a segment of one head a program; 128 x 128 float32 values of dH are 64 registers of
eight warps.

Bound: q, k, v, do are read, dk, dv written: memory. 2 x 8192 rows, 16 heads of 128, bfloat16:
403 MB = 0.094 ms on an H200. 10 matmuls of 64 x 64 x 128 a chunk: 43 GFLOP = 0.062 ms. Measured:
0.259 ms with the outputs for the gate's gradient: matmuls that wait for each other. With invariants
hoisted out of the loop, to be spilled, 0.297 ms.

Sources: as ``chunk_loop``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ejkernel.kernels.triton.common.sequences import find_piece
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, struct
from ejkernel.kernels.triton.linear_attention import tiles
from ejkernel.kernels.triton.linear_attention.gates import load_chunk_sums, pair_decays
from ejkernel.kernels.triton.linear_attention.launch import ScalarGradientLaunch
from ejkernel.kernels.triton.linear_attention.rows import (
    ChunkOfSegment,
    HeadRows,
    load_chunk_rows,
    store_chunk_rows,
)
from ejkernel.kernels.triton.linear_attention.tiles import width

ACROSS, DOWN = tl.constexpr(tiles.ACROSS), tl.constexpr(tiles.DOWN)


class Segment(NamedTuple):
    """A segment, and where the state after it in time is stored.

    Attributes:
        batch: batch row.
        begin, end, used: first row, row past the last, and row past the last in use.
        after: the segment that starts from the state after this one.
        is_last: whether that state is the final one of the sequence instead.
        sequence: the sequence, counted over all batch rows.
    """

    batch: Any
    begin: Any
    end: Any
    used: Any
    after: Any
    is_last: Any
    sequence: Any


@triton.jit
def find_segment_and_next(cu, slot, inputs):
    """Returns the ``Segment`` with number ``slot``, counted over all batch rows."""
    batch = slot // inputs.pieces
    piece = (slot % inputs.pieces).to(tl.int32)
    tile = piece * inputs.SEGMENT
    sequence = 0
    start = 0
    end = inputs.rows
    if cu is not None:
        cu += batch * (inputs.sequences + 1)
        sequence, start, end, tile = find_piece(
            cu, inputs.sequences, inputs.rows, piece, inputs.SEGMENT, inputs.LANES
        )
    if inputs.REVERSED:
        is_last = tile <= start
        after = slot - 1
    else:
        is_last = tile + inputs.SEGMENT >= end
        after = slot + 1
    end = tl.minimum(end, tile + inputs.SEGMENT)
    begin = tl.maximum(tile, start)
    used = end
    state_row = batch
    if cu is not None:
        # rows after the last sequence read as 0 and write 0
        used = tl.where(sequence < inputs.sequences, end, begin)
        state_row = batch * inputs.sequences + sequence
    return Segment(batch, begin, end, used, after, is_last, state_row)


@triton.jit
def store_pair_sums(z_read, z_reading, z, element, written):
    """Stores sums of ``z [row, row that reads it]`` over rows that read, and in parts over rows."""
    CHUNK: tl.constexpr = z.shape[0]
    tl.store(z_read + element, tl.sum(z, 1), mask=written)
    parts = tl.sum(tl.reshape(z, (DOWN, CHUNK // DOWN, CHUNK)), 1)
    part_at = element[None, :] * DOWN + tl.arange(0, DOWN)[:, None]
    tl.store(z_reading + part_at, parts, mask=written[None, :])


@triton.jit
def dot_states(starts, final, dstarts, size, inner, valid):
    """Returns <H, dH> of ``size`` elements, which are 0 from ``valid`` on.

    H is the start of the next segment for the first ``inner`` elements (all or none of them), the
    ``final`` state for the others.
    """
    # few elements at a time: addresses take registers as well
    e = tl.arange(0, 1024)
    total = tl.zeros([1024], tl.float32)
    for first in tl.range(0, size, 1024):
        n = first + e
        h = tl.load(starts + n, mask=n < inner, other=0.0)
        h += tl.load(final + n, mask=(n >= inner) & (n < valid), other=0.0)
        total += h * tl.load(dstarts + n, mask=n < valid, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def backward_kv(
    inputs, dstarts, starts, final, cu, dkey, dvalue, state_dot, leaving, z_read, z_reading
):
    """Writes the gradients of keys and values of one segment and head.

    For the gate's gradient, None without: X at the end of the segment (``state_dot``), b
    (``leaving``), and Z summed over the rows that read a row (``z_read``) and over the rows that a
    row reads (``z_reading``). Sums across warps are left to the reader, in ACROSS and DOWN parts.
    """
    heads, kv_heads, dim, columns = inputs.heads, inputs.kv_heads, inputs.dim, inputs.columns
    CHUNK: tl.constexpr = inputs.CHUNK
    DIM: tl.constexpr = inputs.DIM
    COLUMNS: tl.constexpr = inputs.COLUMNS
    MAPS: tl.constexpr = inputs.MAPS
    DTYPE: tl.constexpr = inputs.DTYPE
    PRECISION: tl.constexpr = inputs.PRECISION
    program = tl.program_id(0)
    head = program % heads
    kv_head = head // (heads // kv_heads)
    slot = (program // heads).to(tl.int64)
    segment = find_segment_and_next(cu, slot, inputs)
    begin, end, used = segment.begin, segment.end, segment.used
    steps = tl.maximum((end - begin + CHUNK - 1) // CHUNK, 0)

    d = tl.arange(0, DIM)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    valid_dim = tl.where(used > begin, dim, 0)
    state_element = d * columns + c
    size = dim * columns
    dstarts += (slot * heads + head) * size
    if state_dot is not None:
        starts += (segment.after * heads + head) * size
        final += (segment.sequence * heads + head) * size
        valid = tl.where(used > begin, size, 0)
        dot = dot_states(starts, final, dstarts, size, tl.where(segment.is_last, 0, valid), valid)
        tl.store(state_dot + slot * heads + head, dot)
    dstate = tl.load(dstarts + state_element, mask=(c < columns) & (d < valid_dim), other=0.0)
    base = segment.batch * inputs.rows + begin
    length = used - begin
    q_rows = HeadRows(inputs.query, head, heads, dim)
    k_rows = HeadRows(inputs.key, kv_head, kv_heads, dim)
    v_rows = HeadRows(inputs.value, kv_head, kv_heads, columns)
    do_rows = HeadRows(inputs.dout, head, heads, columns)
    dk_rows = HeadRows(dkey, head, heads, dim)
    dv_rows = HeadRows(dvalue, head, heads, columns)
    chunk_row = tl.arange(0, CHUNK)
    i = chunk_row[:, None]
    j = chunk_row[None, :]
    for t in tl.range(0, steps, disable_licm=True):
        if inputs.REVERSED:
            at = t * CHUNK
        else:
            at = (steps - 1 - t) * CHUNK
        row = base + at
        chunk = ChunkOfSegment(base, length, at, row, end - begin)
        q = load_chunk_rows(q_rows, chunk, 0, CHUNK, DIM, MAPS).to(DTYPE)
        k = load_chunk_rows(k_rows, chunk, 0, CHUNK, DIM, MAPS).to(DTYPE)
        v = load_chunk_rows(v_rows, chunk, 0, CHUNK, COLUMNS, MAPS).to(DTYPE)
        do = load_chunk_rows(do_rows, chunk, 0, CHUNK, COLUMNS, MAPS).to(DTYPE)
        if inputs.high_sums is not None:
            high, low, since, until, chunk_decay = load_chunk_sums(
                inputs.high_sums, inputs.low_sums, inputs.gate_totals, row * heads + head,
                slot * (inputs.SEGMENT // CHUNK) + at // CHUNK, head, heads, length - at,
                not inputs.REVERSED, CHUNK, MAPS,
            )  # fmt: skip
            row_decay = tl.exp(since)
        else:
            row_decay = tl.zeros([CHUNK], tl.float32) + 1.0
        # matmuls that need rows in registers come first: they are read from shared memory where
        # they are loaded, and would wait in registers
        dstate_operand = dstate.to(DTYPE)
        dv = tl.dot(k, dstate_operand, input_precision=PRECISION) * row_decay[:, None]
        written = end - begin - at
        element = row * heads + head + chunk_row * heads
        if state_dot is not None:
            dots = tl.reshape(dv * v.to(tl.float32), (CHUNK, ACROSS, COLUMNS // ACROSS))
            at_parts = element[:, None] * ACROSS + tl.arange(0, ACROSS)[None, :]
            tl.store(leaving + at_parts, tl.sum(dots, 2), mask=chunk_row[:, None] < written)
        if inputs.high_sums is not None:
            do_end = (do.to(tl.float32) * (tl.exp(until) * inputs.scale)[:, None]).to(DTYPE)
            dstate = dstate * tl.exp(chunk_decay)
            dstate = tl.dot(tl.trans(q), do_end, dstate, input_precision=PRECISION)
        else:
            dstate += tl.dot(tl.trans(q), do, input_precision=PRECISION) * inputs.scale

        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        p = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        if inputs.high_sums is not None:
            decays = pair_decays(high, low, not inputs.REVERSED, CHUNK)
        elif inputs.REVERSED:
            decays = tl.where(i >= j, 1.0, 0.0)
        else:
            decays = tl.where(i <= j, 1.0, 0.0)
        s = s * decays
        if state_dot is not None:
            z = tl.where(i == j, 0.0, s * p) * inputs.scale
            store_pair_sums(z_read, z_reading, z, element, chunk_row < written)
        p = p * decays

        # matmuls of their own: one accumulator would tie the layouts of two
        dv += tl.dot(s.to(DTYPE), do, input_precision=PRECISION) * inputs.scale
        store_chunk_rows(dv_rows, dv, chunk, 0, CHUNK, COLUMNS, MAPS)
        dk = tl.dot(v, tl.trans(dstate_operand), input_precision=PRECISION) * row_decay[:, None]
        dk += tl.dot(p.to(DTYPE), q, input_precision=PRECISION) * inputs.scale
        store_chunk_rows(dk_rows, dk, chunk, 0, CHUNK, DIM, MAPS)


@dataclass(frozen=True)
class BackwardKv(ScalarGradientLaunch):
    """Launch of ``backward_kv``; ``gated``: also write what ``gate_gradient_rows`` reads."""

    kernel = backward_kv
    batching: ClassVar = {
        **ScalarGradientLaunch.batching,
        **dict.fromkeys(("dstarts", "starts", "final"), BATCHED),
    }

    gated: bool
    key_dtype: str
    value_dtype: str

    def outputs(self):
        p = self.problem
        rows = (p.batch, p.rows, p.heads)
        outputs = {
            "dkey": struct(self.key_dtype, *rows, p.dim),
            "dvalue": struct(self.value_dtype, *rows, p.value_dim),
            "state_dot": struct("float32", self.segments, p.heads),
            "leaving": struct("float32", *rows, tiles.ACROSS),
            "z_read": struct("float32", *rows, 1),
            "z_reading": struct("float32", *rows, tiles.DOWN),
        }
        written = list(outputs) if self.gated else ["dkey", "dvalue"]
        return {name: kind if name in written else None for name, kind in outputs.items()}

    def grid(self, target):
        return (self.segments * self.problem.heads,)

    def options(self, target):
        large = width(self.problem.dim) * width(self.problem.value_dim) > 64 * 64
        stages = min(self.tiles.num_stages, 2)  # three do not fit
        return {"num_warps": 8 if large else 4, "num_stages": stages}

    def arguments(self, target):
        return {"inputs": self.chunk_inputs(target, width(self.problem.value_dim))}

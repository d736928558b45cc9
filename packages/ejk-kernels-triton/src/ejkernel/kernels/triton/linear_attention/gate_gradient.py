"""The gradient of one log decay a row and head, from states before every chunk.

The gate of row r decays every pair of a row s before it in time and a row t not before it. With
Z[t, s] = scale (q_t k_s) (do_t v_s) D[t, s], the sum over all such pairs is, chunk by chunk,

    dg_r = sum over t >= r, s < r in the chunk of Z[t, s]
         + sum over t >= r of scale exp(since_t) (q_t H) do_t        s before the chunk
         + sum over s < r of exp(until_s) (k_s dH) v_s               t after the chunk
         + exp(chunk) sum of H . dH                                  both outside

H being the state before the chunk and dH the gradient of the one after it, which ``chunk_loop``
stored. The first line is a sum over rows less one over columns, both of the same float32 values and
without the diagonal, which no gate decays. No accumulation runs past a chunk, so that strong decays
and long sequences lose nothing; the other three lines subtract nothing.

Work split: one chunk of one head a program, value columns one block after another.

Bound: q, k, v, do and two states a chunk are read: memory. 2 x 8192 rows, 16 heads of 128, chunks
of 64, bfloat16: 268 + 268 MB = 0.125 ms on an H200; storing the states takes another 0.06 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, struct
from ejkernel.kernels.triton.linear_attention.gates import load_chunk_sums, pair_decays
from ejkernel.kernels.triton.linear_attention.launch import ScalarGradientLaunch
from ejkernel.kernels.triton.linear_attention.rows import (
    POINTERS,
    HeadRows,
    find_chunk,
    load_chunk_rows,
)
from ejkernel.kernels.triton.linear_attention.tiles import width


@triton.jit
def gate_gradient(inputs, states, dstates, cu, dgate):
    """Writes the gradient of the gates of one chunk and head."""
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
    chunk = find_chunk(cu, slot, inputs, CHUNK, inputs.SEGMENT, inputs.LANES)
    at, length, row = chunk.at, chunk.length, chunk.row
    chunk_row = tl.arange(0, CHUNK)

    high, low, since, until, chunk_decay = load_chunk_sums(
        inputs.high_sums, inputs.low_sums, inputs.gate_totals, row * heads + head, slot, head,
        heads, length - at, inputs.REVERSED, CHUNK, POINTERS,
    )  # fmt: skip
    q_rows = HeadRows(inputs.query, head, heads, dim)
    k_rows = HeadRows(inputs.key, kv_head, kv_heads, dim)
    v_rows = HeadRows(inputs.value, kv_head, kv_heads, columns)
    do_rows = HeadRows(inputs.dout, head, heads, columns)
    q = load_chunk_rows(q_rows, chunk, 0, CHUNK, DIM, MAPS).to(DTYPE)
    k = load_chunk_rows(k_rows, chunk, 0, CHUNK, DIM, MAPS).to(DTYPE)
    d = tl.arange(0, DIM)[:, None]
    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    reached = tl.zeros([CHUNK], tl.float32)
    leaving = tl.zeros([CHUNK], tl.float32)
    outside = 0.0
    state_at = (slot * heads + head) * dim * columns
    # chunks without rows have no states
    valid_dim = tl.where(at < length, dim, 0)
    for column in tl.range(0, columns, COLUMNS):
        c = (column + tl.arange(0, COLUMNS))[None, :]
        v = load_chunk_rows(v_rows, chunk, column, CHUNK, COLUMNS, MAPS).to(DTYPE)
        do = load_chunk_rows(do_rows, chunk, column, CHUNK, COLUMNS, MAPS).to(DTYPE)
        element = d * columns + c
        inside = (d < valid_dim) & (c < columns)
        h = tl.load(states + state_at + element, mask=inside, other=0.0)
        dh = tl.load(dstates + state_at + element, mask=inside, other=0.0)
        outside += tl.sum(tl.sum(h.to(tl.float32) * dh.to(tl.float32), 0), 0)
        qh = tl.dot(q, h.to(DTYPE), input_precision=PRECISION)
        kh = tl.dot(k, dh.to(DTYPE), input_precision=PRECISION)
        reached += tl.sum(qh * do.to(tl.float32), 1)
        leaving += tl.sum(kh * v.to(tl.float32), 1)
        products = tl.dot(do, tl.trans(v), products, input_precision=PRECISION)

    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    z = tl.dot(q, tl.trans(k), input_precision=PRECISION) * products
    z = tl.where(i == j, 0.0, z * pair_decays(high, low, inputs.REVERSED, CHUNK)) * inputs.scale
    since = tl.sum(z, 1) - tl.sum(z, 0) + reached * tl.exp(since) * inputs.scale
    before = leaving * tl.exp(until)
    if inputs.REVERSED:
        is_after = j <= i
    else:
        is_after = j >= i
    # the two in one layout before they become rows
    dg = tl.sum(tl.where(is_after, since[None, :], before[None, :]), 1) + outside * tl.exp(
        chunk_decay
    )
    tl.store(
        dgate + row * heads + head + chunk_row * heads, dg, mask=chunk_row < chunk.size - chunk.at
    )


@dataclass(frozen=True)
class GateGradient(ScalarGradientLaunch):
    """Launch of ``gate_gradient``."""

    kernel = gate_gradient
    batching: ClassVar = {**ScalarGradientLaunch.batching, "states": BATCHED, "dstates": BATCHED}

    def outputs(self):
        p = self.problem
        return {"dgate": struct("float32", p.batch, p.rows, p.heads)}

    def grid(self, target):
        return (self.chunks * self.problem.heads,)

    def arguments(self, target):
        block = min(self.tiles.columns, 32, width(self.problem.value_dim))
        return {"inputs": self.chunk_inputs(target, block)}

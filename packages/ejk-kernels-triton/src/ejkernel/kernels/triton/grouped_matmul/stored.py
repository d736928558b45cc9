"""Grouped matrix product with matrices stored as 8-bit numbers.

Math, for the rows r of group i, whose matrix is w_i, accumulated in float32:

    out[r] = scale_i * (lhs[r] @ w_i) (+ existing[r]);  scale_i: one number a column, or none

Work split: that of ``forward``, of the transposed product, w_i^T lhs^T: the tile's columns are the
rows that a matrix instruction has at least 64 of, so a group of few rows pays for 16. The numbers
go from shared memory to registers, become those of lhs there, and are operands as they stand: two
neighbours at a time (``common.eight_bit``), which are two columns of the result, or two places of
the sum where matrices are transposed.

Bound: the bytes of the matrices in use where groups are small: 128 x 2048 x 768 are 0.20 GB,
0.047 ms at 4.3 TB/s, half of what they are in bfloat16. Reached on an H200 with 8 rows a group:
87% (0.054 ms; 0.052 of float8_e4m3fn; 0.096 in bfloat16), with 64 rows 0.068 ms (0.108).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from ejkernel.kernels.triton.common.eight_bit import pair_operands
from ejkernel.kernels.triton.grouped_matmul.forward import store_rest, store_tile
from ejkernel.kernels.triton.grouped_matmul.groups import (
    lane_rows,
    matrix_of,
    read_tile,
    row_tile,
)
from ejkernel.kernels.triton.grouped_matmul.tiles import (
    Problem,
    Tiles,
    launched,
    tensor_map,
    uses_maps,
)
from ejkernel.kernels.triton.launch import In, Launch, Out, TensorMap, inputs
from ejkernel.kernels.triton.targets import Target, instructions


@triton.jit
def grouped_stored(
    lhs,
    rhs,
    scale,
    sizes,
    offset,
    existing,
    out,
    rows,
    inner,
    columns,
    given,
    batches,
    each,
    held,
    offset_step,
    held_step,
    KIND: tl.constexpr,
    PTX: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TMA: tl.constexpr,
    LANES: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    starts, ends = lane_rows(sizes, given, rows, LANES, WIDE)
    matrices = matrix_of(
        tl.arange(0, LANES), offset, batches, each, held, offset_step, held_step
    )  # fmt: skip
    row_tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    until = tl.cumsum(tl.where(matrices >= 0, row_tiles, 0), 0)
    across = (columns + BLOCK_N - 1) // BLOCK_N
    steps = (inner + BLOCK_K - 1) // BLOCK_K
    HALF_N: tl.constexpr = BLOCK_N // 2
    HALF_K: tl.constexpr = BLOCK_K // 2

    for t in tl.range(program, tl.max(until, 0) * across, programs, flatten=FLATTEN):
        lane, row, row_end, column = row_tile(t, until, ends, across, BLOCK_M, BLOCK_N, BAND)
        matrix = matrix_of(lane, offset, batches, each, held, offset_step, held_step)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for step in tl.range(0, steps):
            k = step * BLOCK_K
            if TMA:
                a = lhs.load([row, k])
                if TRANSPOSED:
                    pairs = rhs.load([matrix * columns + column, k // 2])
                else:
                    pairs = rhs.load([matrix * inner + k, column // 2])
            else:
                a = read_tile(lhs, row, row_end, k, inner, BLOCK_M, BLOCK_K)
                base = rhs + matrix.to(tl.int64) * inner * (columns // 2)
                if TRANSPOSED:
                    base = rhs + matrix.to(tl.int64) * columns * (inner // 2)
                    pairs = read_tile(base, column, columns, k // 2, inner // 2, BLOCK_N, HALF_K)
                else:
                    pairs = read_tile(base, k, inner, column // 2, columns // 2, BLOCK_K, HALF_N)
            if TRANSPOSED:
                even, odd = pair_operands(pairs, KIND, PTX, a.dtype)
                a_even, a_odd = tl.split(tl.reshape(a, (BLOCK_M, HALF_K, 2)))
                acc = tl.dot(even, tl.trans(a_even), acc, input_precision=PRECISION)
                acc = tl.dot(odd, tl.trans(a_odd), acc, input_precision=PRECISION)
            else:
                even, odd = pair_operands(tl.trans(pairs), KIND, PTX, a.dtype)
                w = tl.permute(tl.join(even, odd), (2, 0, 1))
                w = tl.reshape(w, (BLOCK_N, BLOCK_K))
                acc = tl.dot(w, tl.trans(a), acc, input_precision=PRECISION)
        if TRANSPOSED:
            tile = tl.trans(acc)
        else:
            tile = tl.permute(tl.reshape(acc, (2, HALF_N, BLOCK_M)), (2, 1, 0))
            tile = tl.reshape(tile, (BLOCK_M, BLOCK_N))
        if scale is not None:
            c = column + tl.arange(0, BLOCK_N)
            at = scale + matrix.to(tl.int64) * columns + c
            tile = tile * tl.load(at, mask=c < columns, other=0.0)[None, :]
        store_tile(out, existing, tile, row, row_end, column, columns, BLOCK_M, 1)

    store_rest(
        program, programs, out, existing, matrices, row_tiles, ends, across, columns, BLOCK_M,
        BLOCK_N, 1,
    )  # fmt: skip


def launch(
    p: Problem, t: Tiles, target: Target, offsets: int, existing: bool, scaled: bool
) -> Launch:
    """Of operands lhs, rhs, sizes, then the offset, what is added and the scale if given."""
    # a tile that leaves its matrix reads the next one, times 0, which an infinite number survives
    maps = p.inner % t.block_k == 0 and uses_maps(p, target)
    matrices = (1 if p.shared else p.batch) * p.held
    shape, block = (matrices * p.inner, p.columns // 2), (t.block_k, t.block_n // 2)
    if p.transposed:
        shape, block = (matrices * p.columns, p.inner // 2), (t.block_n, t.block_k // 2)
    given = {"sizes": True, "offset": offsets, "existing": existing, "scale": scaled}
    arguments: dict[str, Any] = {
        "lhs": tensor_map(0, (p.batch * p.rows, p.inner), (t.block_m, t.block_k), maps),
        "rhs": TensorMap(1, shape, block, view="int16") if maps else In(1, "int16"),
        **inputs(given, first=2),
        "out": Out(0),
        "offset_step": int(offsets > 1),
        "KIND": p.stored,
        "PTX": instructions(target),
        "TMA": maps,
        "FLATTEN": maps,
    }
    return launched(grouped_stored, p, t, target, arguments, interpreted={"PTX": 0})

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

from ejkernel.kernels.triton.bound_launch import BoundLaunch, In, Out, TensorMap
from ejkernel.kernels.triton.common.eight_bit import pair_operands
from ejkernel.kernels.triton.grouped_matmul.forward import store_rest, store_tile
from ejkernel.kernels.triton.grouped_matmul.groups import lane_rows, matrix_of, read_tile, row_tile
from ejkernel.kernels.triton.grouped_matmul.tiles import (
    Problem,
    Tiles,
    launched,
    tensor_map,
    uses_maps,
)
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.plan import inputs
from ejkernel.kernels.triton.targets import Target, instructions


@triton.jit
def grouped_stored(
    lhs, rhs, scale, sizes, offset, existing, out, of, KIND: tl.constexpr, PTX: tl.constexpr
):
    inner, columns = of.inner, of.columns
    program, programs = tl.program_id(0), tl.num_programs(0)
    starts, ends = lane_rows(sizes, of)
    matrices = matrix_of(tl.arange(0, of.LANES), offset, of)
    row_tiles = (ends - starts + of.BLOCK_M - 1) // of.BLOCK_M
    until = tl.cumsum(tl.where(matrices >= 0, row_tiles, 0), 0)
    across = (columns + of.BLOCK_N - 1) // of.BLOCK_N
    steps = (inner + of.BLOCK_K - 1) // of.BLOCK_K
    HALF_N: tl.constexpr = of.BLOCK_N // 2
    HALF_K: tl.constexpr = of.BLOCK_K // 2

    for t in tl.range(program, tl.max(until, 0) * across, programs, flatten=of.FLATTEN):
        lane, row, row_end, column = row_tile(t, until, ends, across, of)
        matrix = matrix_of(lane, offset, of)
        acc = tl.zeros([of.BLOCK_N, of.BLOCK_M], tl.float32)
        for step in tl.range(0, steps):
            k = step * of.BLOCK_K
            if of.TMA:
                a = lhs.load([row, k])
                if of.TRANSPOSED:
                    pairs = rhs.load([matrix * columns + column, k // 2])
                else:
                    pairs = rhs.load([matrix * inner + k, column // 2])
            else:
                a = read_tile(lhs, row, row_end, k, inner, of.BLOCK_M, of.BLOCK_K)
                base = rhs + matrix.to(tl.int64) * inner * (columns // 2)
                if of.TRANSPOSED:
                    base = rhs + matrix.to(tl.int64) * columns * (inner // 2)
                    pairs = read_tile(base, column, columns, k // 2, inner // 2, of.BLOCK_N, HALF_K)
                else:
                    pairs = read_tile(base, k, inner, column // 2, columns // 2, of.BLOCK_K, HALF_N)
            if of.TRANSPOSED:
                even, odd = pair_operands(pairs, KIND, PTX, a.dtype)
                a_even, a_odd = tl.split(tl.reshape(a, (of.BLOCK_M, HALF_K, 2)))
                acc = tl.dot(even, tl.trans(a_even), acc, input_precision=of.PRECISION)
                acc = tl.dot(odd, tl.trans(a_odd), acc, input_precision=of.PRECISION)
            else:
                even, odd = pair_operands(tl.trans(pairs), KIND, PTX, a.dtype)
                w = tl.permute(tl.join(even, odd), (2, 0, 1))
                w = tl.reshape(w, (of.BLOCK_N, of.BLOCK_K))
                acc = tl.dot(w, tl.trans(a), acc, input_precision=of.PRECISION)
        if of.TRANSPOSED:
            tile = tl.trans(acc)
        else:
            tile = tl.permute(tl.reshape(acc, (2, HALF_N, of.BLOCK_M)), (2, 1, 0))
            tile = tl.reshape(tile, (of.BLOCK_M, of.BLOCK_N))
        if scale is not None:
            c = column + tl.arange(0, of.BLOCK_N)
            at = scale + matrix.to(tl.int64) * columns + c
            tile = tile * tl.load(at, mask=c < columns, other=0.0)[None, :]
        store_tile(out, existing, tile, row, row_end, column, columns, of.BLOCK_M, 1)

    store_rest(
        program, programs, out, existing, matrices, row_tiles, ends, across, columns, of.BLOCK_M,
        of.BLOCK_N, 1,
    )  # fmt: skip


def launch(
    p: Problem, t: Tiles, target: Target, offsets: int, existing: bool, scaled: bool
) -> BoundLaunch:
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
        "KIND": p.stored,
        "PTX": instructions(target),
    }
    return launched(
        grouped_stored, p, t, target, arguments, offsets=offsets, maps=maps, interpreted={"PTX": 0}
    )

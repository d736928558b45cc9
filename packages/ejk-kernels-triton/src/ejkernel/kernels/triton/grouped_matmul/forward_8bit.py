"""Grouped matmul with matrices stored in 8 bits.

Math, for the rows r of group i, whose matrix is w_i, accumulated in float32:

    out[r] = scale_i * (lhs[r] @ w_i) (+ existing[r]);  scale_i: one value a column, or none

Work split: as ``forward``, of the transposed matmul, w_i^T lhs^T: the tile's columns are the rows
that a matrix instruction has at least 64 of, so a group of few rows pays for 16. The values go from
shared memory to registers, are converted to the dtype of lhs there, and are operands in registers:
two neighbours at a time (``common.eight_bit``), which are two columns of the result, or two entries
of the contracted axis where matrices are transposed.

Bound: the bytes of the matrices in use where groups are small: 128 x 2048 x 768 are 0.20 GB,
0.047 ms at 4.3 TB/s, half of the bytes in bfloat16. Reached on an H200 with 8 rows a group: 87%
(0.054 ms; 0.052 with float8_e4m3fn; 0.096 in bfloat16), with 64 rows 0.068 ms (0.108).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.bound_launch import In, TensorMap
from ejkernel.kernels.triton.common.eight_bit import convert_pairs_to
from ejkernel.kernels.triton.grouped_matmul.forward import store_tile, store_unmatched
from ejkernel.kernels.triton.grouped_matmul.groups import (
    find_matrix,
    find_row_tile,
    lane_rows,
    load_tile,
)
from ejkernel.kernels.triton.grouped_matmul.launch import GroupedLaunch
from ejkernel.kernels.triton.grouped_matmul.tiles import uses_maps
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, SHARED, struct
from ejkernel.kernels.triton.targets import ptx_level


@triton.jit
def grouped_matmul_8bit(
    lhs,
    rhs,
    scale,
    group_sizes,
    offset,
    existing,
    out,
    params,
    KIND: tl.constexpr,
    PTX: tl.constexpr,
):
    """Multiplies the rows of every group by the 8-bit matrix of the group."""
    inner, columns = params.inner, params.columns
    program, programs = tl.program_id(0), tl.num_programs(0)
    starts, ends = lane_rows(group_sizes, params)
    matrices = find_matrix(tl.arange(0, params.LANES), offset, params)
    row_tiles = (ends - starts + params.BLOCK_M - 1) // params.BLOCK_M
    until = tl.cumsum(tl.where(matrices >= 0, row_tiles, 0), 0)
    across = (columns + params.BLOCK_N - 1) // params.BLOCK_N
    steps = (inner + params.BLOCK_K - 1) // params.BLOCK_K
    HALF_N: tl.constexpr = params.BLOCK_N // 2
    HALF_K: tl.constexpr = params.BLOCK_K // 2

    for t in tl.range(program, tl.max(until, 0) * across, programs, flatten=params.FLATTEN):
        lane, row, row_end, column = find_row_tile(t, until, ends, across, params)
        matrix = find_matrix(lane, offset, params)
        acc = tl.zeros([params.BLOCK_N, params.BLOCK_M], tl.float32)
        for step in tl.range(0, steps):
            k = step * params.BLOCK_K
            if params.TMA:
                a = lhs.load([row, k])
                if params.TRANSPOSED:
                    pairs = rhs.load([matrix * columns + column, k // 2])
                else:
                    pairs = rhs.load([matrix * inner + k, column // 2])
            else:
                a = load_tile(lhs, row, row_end, k, inner, params.BLOCK_M, params.BLOCK_K)
                base = rhs + matrix.to(tl.int64) * inner * (columns // 2)
                if params.TRANSPOSED:
                    base = rhs + matrix.to(tl.int64) * columns * (inner // 2)
                    pairs = load_tile(
                        base, column, columns, k // 2, inner // 2, params.BLOCK_N, HALF_K
                    )
                else:
                    pairs = load_tile(
                        base, k, inner, column // 2, columns // 2, params.BLOCK_K, HALF_N
                    )
            if params.TRANSPOSED:
                even, odd = convert_pairs_to(pairs, KIND, PTX, a.dtype)
                a_even, a_odd = tl.split(tl.reshape(a, (params.BLOCK_M, HALF_K, 2)))
                acc = tl.dot(even, tl.trans(a_even), acc, input_precision=params.PRECISION)
                acc = tl.dot(odd, tl.trans(a_odd), acc, input_precision=params.PRECISION)
            else:
                even, odd = convert_pairs_to(tl.trans(pairs), KIND, PTX, a.dtype)
                w = tl.permute(tl.join(even, odd), (2, 0, 1))
                w = tl.reshape(w, (params.BLOCK_N, params.BLOCK_K))
                acc = tl.dot(w, tl.trans(a), acc, input_precision=params.PRECISION)
        if params.TRANSPOSED:
            tile = tl.trans(acc)
        else:
            tile = tl.permute(tl.reshape(acc, (2, HALF_N, params.BLOCK_M)), (2, 1, 0))
            tile = tl.reshape(tile, (params.BLOCK_M, params.BLOCK_N))
        if scale is not None:
            c = column + tl.arange(0, params.BLOCK_N)
            at = scale + matrix.to(tl.int64) * columns + c
            tile = tile * tl.load(at, mask=c < columns, other=0.0)[None, :]
        store_tile(out, existing, tile, row, row_end, column, columns, params.BLOCK_M, 1)

    store_unmatched(
        program, programs, out, existing, matrices, row_tiles, ends, across, columns,
        params.BLOCK_M, params.BLOCK_N, 1,
    )  # fmt: skip


@dataclass(frozen=True)
class GroupedForward8Bit(GroupedLaunch):
    """Launch of ``grouped_matmul_8bit``."""

    kernel = grouped_matmul_8bit
    batching: ClassVar = {
        **GroupedLaunch.batching,
        **{"lhs": BATCHED, "existing": BATCHED, "rhs": SHARED, "scale": SHARED},
    }
    shared_together = (frozenset({"rhs", "scale"}),)

    def outputs(self):
        p = self.problem
        return {"out": struct(p.out, p.batch * p.rows, p.columns)}

    def interpreter_arguments(self, target):
        return {"PTX": 0}

    def arguments(self, target):
        p, t, index = self.problem, self.tiles, self.names.index("rhs")
        # a tile that leaves its matrix reads the next one, times 0: infinity would become NaN
        maps = p.inner % t.block_k == 0 and uses_maps(p, target)
        rhs = In(index, "int16")
        if maps:
            matrices = (1 if self.shares_matrices else p.batch) * p.held
            shape, block = (matrices * p.inner, p.columns // 2), (t.block_k, t.block_n // 2)
            if p.transposed:
                shape, block = (matrices * p.columns, p.inner // 2), (t.block_n, t.block_k // 2)
            rhs = TensorMap(index, shape, block, view="int16")
        return {
            "lhs": self.rows_operand("lhs", p.inner, maps),
            "rhs": rhs,
            "params": self.params(target, maps),
            "KIND": p.stored,
            "PTX": ptx_level(target),
        }

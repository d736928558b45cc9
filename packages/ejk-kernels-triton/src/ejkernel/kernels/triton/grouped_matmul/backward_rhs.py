"""Grouped matmul, the gradient of the matrices: the rows of a group are the contracted axis.

Math, for the rows r of the group of matrix i, accumulated in float32:

    dw_i = sum over r of outer(lhs[r], dout[r])          (its transpose for transposed matrices)

Work split: a tile is BLOCK_M by BLOCK_N of one matrix and loops over the rows of its group BLOCK_K
at a time, so a tile has one program and its accumulation one order: two calls give the same bits.
Matrices of groups without rows are written 0. Each program takes every P-th tile; tiles of a matrix
follow each other in bands of BAND, so that programs that run together share columns of lhs and dout
in the L2 cache. The copy engine loads full steps, the last one of a group too: its descriptor says
where the group ends, and it fills the step with zeros. So the loop has one matmul, the only one
with this accumulator. A second one for the last step, with rows loaded and masked by the threads,
costs 35%: the assembler then lets no two matmuls of the loop follow each other (sm_90: 4 waits a
step, not 1).

A tile leaves through the copy engine too: the threads put it into shared memory and go on to the
next tile, whose matmuls run during the copy. Stores by the threads took 0.01 to 0.5 ms more (256
groups below: 4.07 ms, then 3.80). There is shared memory for half a tile: the other half waits
until the copy engine has read the first. LATE: as 16-bit values in registers, until the next tile's
first matmul runs (4.01 ms, then 3.70 in the same run). Steps of 32 rows, with more of them in
flight, waste less at the ends of groups and take 5 to 25% longer all the same.

Bound, bfloat16 on an H200 (989 TFLOP/s at most, copies 4.3 TB/s): 16384 rows, 4096 x 14336 in
8 groups, 1.92 TFLOP = 1.95 ms: arithmetic. 65536 rows, 7168 x 2048 in 256 groups: as many FLOPs,
and 8.7 GB, 2.03 ms, nearly all of them results, on a GPU that must do both at once. 8192 rows,
2048 x 768 in 128 groups: 0.45 GB, 0.105 ms: memory, one step of work a tile. Groups that end inside
a step pay for all of it, half a step a tile on average. Reached, with even groups and with Zipf's:
78 and 76% (2.49, 2.57 ms), 55 and 46% (3.70, 4.38 ms), 83 and 70% (0.127, 0.151 ms).

Sources: Gale et al. 2022, "MegaBlocks" (arXiv 2211.15841), section 3; ``bound_launch.runs_map``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.bound_launch import MAP_ROWS as _MAP_ROWS
from ejkernel.kernels.triton.bound_launch import Out, TensorMap, runs_map
from ejkernel.kernels.triton.grouped_matmul.forward import split_columns, store_tile
from ejkernel.kernels.triton.grouped_matmul.groups import (
    find_matrix,
    lane_range,
    lane_rows,
    load_tile,
    matrix_lane,
)
from ejkernel.kernels.triton.grouped_matmul.launch import GroupedLaunch
from ejkernel.kernels.triton.grouped_matmul.tiles import uses_maps
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, struct

MAP_ROWS = tl.constexpr(_MAP_ROWS)


@triton.jit
def _find_tile(t, down, across, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr):
    """Returns the matrix, first row and first column of tile ``t``: bands of BAND, rows first."""
    matrix = t // (down * across)
    index = t - matrix * down * across
    band = index // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    index = index - band * BAND * across
    return matrix, (band * BAND + index % height) * BLOCK_M, index // height * BLOCK_N


@triton.jit
def _load_run(source, end, length, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads a tile at row ``row`` of a run, 0 outside the run (see ``bound_launch.runs_map``)."""
    tile = source.load([MAP_ROWS, end, row - length + MAP_ROWS, column])
    return tl.reshape(tile, (ROWS, COLUMNS))


@triton.jit
def _store_map(out, tile, matrix, m, n):
    """Stores a tile by the copy engine, which skips elements outside the matrix."""
    block = tl.reshape(tile, (1, tile.shape[0], tile.shape[1])).to(out.dtype)
    out.store([matrix.to(tl.int32), m, n], block)


@triton.jit
def _store_map_parts(out, tile, matrix, m, n, PARTS: tl.constexpr):
    """Stores a tile by the copy engine in one part or two."""
    if PARTS == 1:
        _store_map(out, tile, matrix, m, n)
    else:
        HALF: tl.constexpr = tile.shape[1] // 2
        left, right = split_columns(tile)
        _store_map(out, left, matrix, m, n)
        _store_map(out, right, matrix, m, n + HALF)


@triton.jit
def _tile_count(tiles, program, programs):
    """Returns the number of the first ``tiles`` tiles that a program has."""
    return tl.maximum(tiles - program + programs - 1, 0) // programs


@triton.jit
def grouped_matmul_drhs(a_map, b_map, a, b, group_sizes, offset, out, params, LATE: tl.constexpr):
    """Writes the gradients of the matrices; LATE: half of a tile leaves during the next one."""
    inner, columns = params.inner, params.columns
    program, programs = tl.program_id(0), tl.num_programs(0)
    starts, ends = lane_rows(group_sizes, params)
    down = (inner + params.BLOCK_M - 1) // params.BLOCK_M
    across = (columns + params.BLOCK_N - 1) // params.BLOCK_N
    size = (inner * columns).to(tl.int64)
    tiles = down * across
    end = params.batches * params.matrices * tiles

    if params.TMA:
        # one loop over the steps of all tiles, so that the next tile's rows are in flight while
        # this one is written; a tile without rows has one step, of zeros
        lane = tl.arange(0, params.LANES)
        matrix = find_matrix(lane, offset, params)
        own_tiles = _tile_count(matrix * tiles + tiles, program, programs) - _tile_count(
            matrix * tiles, program, programs
        )
        extra_steps = tl.maximum((ends - starts + params.BLOCK_K - 1) // params.BLOCK_K, 1) - 1
        steps = _tile_count(end, program, programs) + tl.sum(
            tl.where(matrix >= 0, own_tiles * extra_steps, 0), 0
        )
        t = program - programs
        step = -1
        last = -1
        length = 0
        row_end = 0
        matrix = 0
        m = 0
        n = 0
        acc = tl.zeros([params.BLOCK_M, params.BLOCK_N], tl.float32)
        if LATE:
            # one step more, without a tile, for the pending half of the last one
            steps += tl.minimum(steps, 1)
            HALF: tl.constexpr = params.BLOCK_N // 2
            pending = tl.zeros([params.BLOCK_M, HALF], out.dtype)
            pending_matrix = 0
            pending_m = 0
            pending_n = -1
            # 0, unknown to the compiler: it then sets a register in one instruction, not two (256
            # groups: 3.85 ms, then 3.70 in the same run)
            zero = (program >> 30).to(tl.float32)
        for _ in tl.range(0, steps):
            # a select, as with an increment at the end the loads are not pipelined
            step = tl.where(step == last, 0, step + 1)
            if step == 0:
                t += programs
                matrix, m, n = _find_tile(
                    t, down, across, params.BLOCK_M, params.BLOCK_N, params.BAND
                )
                if LATE:
                    matrix = tl.minimum(matrix, params.batches * params.matrices - 1)
                index = matrix_lane(matrix, offset, params)
                row, row_end = lane_range(index, starts, ends)
                length = row_end - row
                if LATE:
                    length = tl.where(t < end, length, 0)
                last = tl.maximum((length + params.BLOCK_K - 1) // params.BLOCK_K, 1) - 1
            x = _load_run(
                a_map, row_end, length, step * params.BLOCK_K, m, params.BLOCK_K, params.BLOCK_M
            )
            y = _load_run(
                b_map, row_end, length, step * params.BLOCK_K, n, params.BLOCK_K, params.BLOCK_N
            )
            # the only matmul with this accumulator (see above)
            acc = tl.dot(tl.trans(x), y, acc, input_precision=params.PRECISION)
            if LATE:
                # Triton puts this before the matmul: the one of step 0 runs meanwhile
                if (step == tl.minimum(last, 1)) & (pending_n >= 0):
                    _store_map(out, pending, pending_matrix, pending_m, pending_n)
                    pending_n -= columns  # nothing is pending
                if (step == last) & (t < end) & (pending_n < 0):
                    left, right = split_columns(acc)
                    _store_map(out, left, matrix, m, n)
                    pending = right.to(out.dtype)
                    pending_matrix = matrix.to(tl.int32)
                    pending_m = m
                    pending_n = n + HALF
                    acc = tl.full([params.BLOCK_M, params.BLOCK_N], zero, tl.float32)
            elif step == last:
                _store_map_parts(out, acc, matrix, m, n, params.PARTS)
                acc = tl.zeros([params.BLOCK_M, params.BLOCK_N], tl.float32)
    else:
        for t in tl.range(program, end, programs):
            matrix, m, n = _find_tile(t, down, across, params.BLOCK_M, params.BLOCK_N, params.BAND)
            index = matrix_lane(matrix, offset, params)
            row, row_end = lane_range(index, starts, ends)
            acc = tl.zeros([params.BLOCK_M, params.BLOCK_N], tl.float32)
            for at in tl.range(row, row_end, params.BLOCK_K):
                x = load_tile(a, at, row_end, m, inner, params.BLOCK_K, params.BLOCK_M)
                y = load_tile(b, at, row_end, n, columns, params.BLOCK_K, params.BLOCK_N)
                acc = tl.dot(tl.trans(x), y, acc, input_precision=params.PRECISION)
            store_tile(
                out + matrix * size, None, acc, m, inner, n, columns, params.BLOCK_M, params.PARTS
            )  # fmt: skip


@dataclass(frozen=True)
class GroupedDrhs(GroupedLaunch):
    """Launch of ``grouped_matmul_drhs``."""

    kernel = grouped_matmul_drhs
    batching: ClassVar = {**GroupedLaunch.batching, "lhs": BATCHED, "dout": BATCHED}

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of a matrix as it is stored."""
        p = self.problem
        return (p.columns, p.inner) if p.transposed else (p.inner, p.columns)

    def outputs(self):
        p = self.problem
        return {"out": struct(p.dtype, p.batch * p.held, *self.matrix_shape)}

    def arguments(self, target):
        p, t, (down, across) = self.problem, self.tiles, self.matrix_shape
        maps = uses_maps(p, target) and p.batch * p.rows < _MAP_ROWS
        a, b = map(self.operand, ("dout", "lhs") if p.transposed else ("lhs", "dout"))
        sizes = {"inner": down, "columns": across, "matrix_stride": None}
        arguments = {
            **dict.fromkeys(("a", "b", "a_map", "b_map")),
            "params": self.params(target, maps, **sizes),
            "LATE": maps and t.late,
        }
        if not maps or a is None or b is None:
            return arguments | {"a": a, "b": b, "out": Out(0)}
        tile = (1, t.block_m, t.block_n // t.parts)
        return arguments | {
            "a_map": runs_map(a.index, down, (t.block_k, t.block_m)),
            "b_map": runs_map(b.index, across, (t.block_k, t.block_n)),
            "out": TensorMap(0, (p.batch * p.held, down, across), tile, result=True),
        }

"""Grouped matrix product, gradient of the matrices: the rows of a group are what is summed over.

Math, for the rows r of the group of matrix i, accumulated in float32:

    dw_i = sum over r of outer(lhs[r], dout[r])          (its transpose for transposed matrices)

Work split: a tile is BLOCK_M by BLOCK_N of one matrix and walks the rows of its group BLOCK_K at a
time, so a tile has one program and its sum one order: two runs give the same bits. Matrices of
groups without rows are written 0. Programs take tiles in turn; tiles of a matrix follow each other
in bands of BAND, so that programs that run together share columns of lhs and dout in the L2 cache.
The copy engine reads whole steps, the last one of a group too: it is told where the group ends and
fills the step with zeros. So the loop holds one product and nothing but that product adds to the
sums. A second one for the last step, with rows read and masked by the threads, costs 35%: the
assembler then lets no two products of the loop follow each other (sm_90: 4 waits a step, not 1).

A tile leaves through the copy engine too: the threads put it into shared memory and go on to the
next tile, whose products run while it travels. Stores by the threads took 0.01 to 0.5 ms more (256
groups below: 4.07 ms, then 3.80). There is shared memory for half a tile: the other half waits for
the copy engine to have read the first. LATE: as numbers of 16 bits in registers, until the next
tile's first product runs (4.01 ms, then 3.70 in the same run). Steps of 32 rows, with more of them
in flight, waste less at the ends of groups and take 5 to 25% longer all the same.

Bound, bfloat16 on an H200 (989 TFLOP/s at most, copies 4.3 TB/s): 16384 rows, 4096 x 14336 in
8 groups, 1.92 TFLOP = 1.95 ms: arithmetic. 65536 rows, 7168 x 2048 in 256 groups: as many
operations, and 8.7 GB, 2.03 ms, nearly all of them results, in a chip that must do both at once.
8192 rows, 2048 x 768 in 128 groups: 0.45 GB, 0.105 ms: memory, one step of work a tile. Groups that
end inside a step pay for all of it, half a step a tile on average; no other price. Reached, of even
and of Zipf's groups: 78 and 76% (2.49, 2.57 ms), 55 and 46% (3.70, 4.38 ms), 83 and 70% (0.127,
0.151 ms).

Sources: Gale et al. 2022, "MegaBlocks" (arXiv 2211.15841), section 3; ``launch.runs_map``.
"""

from __future__ import annotations

from typing import Any

from ejkernel.kernels.triton.bound_launch import RUNS as _RUNS
from ejkernel.kernels.triton.bound_launch import BoundLaunch, In, Out, TensorMap, runs_map
from ejkernel.kernels.triton.grouped_matmul.forward import in_halves, store_tile
from ejkernel.kernels.triton.grouped_matmul.groups import (
    lane_of,
    lane_rows,
    matrix_of,
    read_tile,
    rows_of,
)
from ejkernel.kernels.triton.grouped_matmul.tiles import Problem, Tiles, launched, uses_maps
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.plan import inputs
from ejkernel.kernels.triton.targets import Target

RUNS = tl.constexpr(_RUNS)


@triton.jit
def _place(t, down, across, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr):
    """(matrix, first row, first column) of tile ``t``: bands of BAND, rows first."""
    matrix = t // (down * across)
    index = t - matrix * down * across
    band = index // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    index = index - band * BAND * across
    return matrix, (band * BAND + index % height) * BLOCK_M, index // height * BLOCK_N


@triton.jit
def _run(source, end, length, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile from row ``row`` of a run on, 0 outside the run (see ``launch.runs_map``)."""
    tile = source.load([RUNS, end, row - length + RUNS, column])
    return tl.reshape(tile, (ROWS, COLUMNS))


@triton.jit
def _copy_out(out, tile, matrix, m, n):
    """A tile by the copy engine, which leaves out what lies outside the matrix."""
    whole = tl.reshape(tile, (1, tile.shape[0], tile.shape[1])).to(out.dtype)
    out.store([matrix.to(tl.int32), m, n], whole)


@triton.jit
def _copy_parts(out, tile, matrix, m, n, PARTS: tl.constexpr):
    """``_copy_out`` in one part or two."""
    if PARTS == 1:
        _copy_out(out, tile, matrix, m, n)
    else:
        HALF: tl.constexpr = tile.shape[1] // 2
        left, right = in_halves(tile)
        _copy_out(out, left, matrix, m, n)
        _copy_out(out, right, matrix, m, n + HALF)


@triton.jit
def _taken(tiles, program, programs):
    """How many of the first ``tiles`` tiles fall to a program."""
    return tl.maximum(tiles - program + programs - 1, 0) // programs


@triton.jit
def grouped_weights(a_map, b_map, a, b, sizes, offset, out, of, LATE: tl.constexpr):
    inner, columns = of.inner, of.columns
    program, programs = tl.program_id(0), tl.num_programs(0)
    starts, ends = lane_rows(sizes, of)
    down = (inner + of.BLOCK_M - 1) // of.BLOCK_M
    across = (columns + of.BLOCK_N - 1) // of.BLOCK_N
    size = (inner * columns).to(tl.int64)
    tiles = down * across
    end = of.batches * of.held * tiles

    if of.TMA:
        # one loop over the steps of all tiles, so that the next tile's rows are on their way while
        # this one is written; a tile without rows has one step, of zeros
        lane = tl.arange(0, of.LANES)
        matrix = matrix_of(lane, offset, of)
        mine = _taken(matrix * tiles + tiles, program, programs) - _taken(
            matrix * tiles, program, programs
        )
        more = tl.maximum((ends - starts + of.BLOCK_K - 1) // of.BLOCK_K, 1) - 1
        steps = _taken(end, program, programs) + tl.sum(tl.where(matrix >= 0, mine * more, 0), 0)
        t = program - programs
        step = -1
        last = -1
        length = 0
        row_end = 0
        matrix = 0
        m = 0
        n = 0
        acc = tl.zeros([of.BLOCK_M, of.BLOCK_N], tl.float32)
        if LATE:
            # one step more, of no tile, for what the last tile kept
            steps += tl.minimum(steps, 1)
            HALF: tl.constexpr = of.BLOCK_N // 2
            kept = tl.zeros([of.BLOCK_M, HALF], out.dtype)
            kept_of = 0
            kept_m = 0
            kept_n = -1
            # 0, which the compiler cannot know: it sets a register to it in one instruction, not
            # two (256 groups: 3.85 ms, then 3.70 in the same run)
            zero = (program >> 30).to(tl.float32)
        for _ in tl.range(0, steps):
            # written as a choice: with the count raised at the end the loads are not pipelined
            step = tl.where(step == last, 0, step + 1)
            if step == 0:
                t += programs
                matrix, m, n = _place(t, down, across, of.BLOCK_M, of.BLOCK_N, of.BAND)
                if LATE:
                    matrix = tl.minimum(matrix, of.batches * of.held - 1)
                here = lane_of(matrix, offset, of)
                row, row_end = rows_of(here, starts, ends)
                length = row_end - row
                if LATE:
                    length = tl.where(t < end, length, 0)
                last = tl.maximum((length + of.BLOCK_K - 1) // of.BLOCK_K, 1) - 1
            x = _run(a_map, row_end, length, step * of.BLOCK_K, m, of.BLOCK_K, of.BLOCK_M)
            y = _run(b_map, row_end, length, step * of.BLOCK_K, n, of.BLOCK_K, of.BLOCK_N)
            # the only product that these sums see (see the head)
            acc = tl.dot(tl.trans(x), y, acc, input_precision=of.PRECISION)
            if LATE:
                # Triton puts this before the product: that of step 0 runs meanwhile
                if (step == tl.minimum(last, 1)) & (kept_n >= 0):
                    _copy_out(out, kept, kept_of, kept_m, kept_n)
                    kept_n -= columns  # nothing is kept
                if (step == last) & (t < end) & (kept_n < 0):
                    left, right = in_halves(acc)
                    _copy_out(out, left, matrix, m, n)
                    kept = right.to(out.dtype)
                    kept_of = matrix.to(tl.int32)
                    kept_m = m
                    kept_n = n + HALF
                    acc = tl.full([of.BLOCK_M, of.BLOCK_N], zero, tl.float32)
            elif step == last:
                _copy_parts(out, acc, matrix, m, n, of.PARTS)
                acc = tl.zeros([of.BLOCK_M, of.BLOCK_N], tl.float32)
    else:
        for t in tl.range(program, end, programs):
            matrix, m, n = _place(t, down, across, of.BLOCK_M, of.BLOCK_N, of.BAND)
            here = lane_of(matrix, offset, of)
            row, row_end = rows_of(here, starts, ends)
            acc = tl.zeros([of.BLOCK_M, of.BLOCK_N], tl.float32)
            for at in tl.range(row, row_end, of.BLOCK_K):
                x = read_tile(a, at, row_end, m, inner, of.BLOCK_K, of.BLOCK_M)
                y = read_tile(b, at, row_end, n, columns, of.BLOCK_K, of.BLOCK_N)
                acc = tl.dot(tl.trans(x), y, acc, input_precision=of.PRECISION)
            store_tile(
                out + matrix * size, None, acc, m, inner, n, columns, of.BLOCK_M, of.PARTS
            )  # fmt: skip


def launch(p: Problem, t: Tiles, target: Target, offsets: int) -> BoundLaunch:
    """Of operands lhs, dout, sizes, then the offset if there is one (see ``forward.launch``)."""
    maps = uses_maps(p, target) and p.batch * p.rows < RUNS.value
    a, b = (1, 0) if p.transposed else (0, 1)
    down, across = (p.columns, p.inner) if p.transposed else (p.inner, p.columns)
    out = TensorMap(
        0, (p.batch * p.held, down, across), (1, t.block_m, t.block_n // t.parts), result=True
    )
    arguments: dict[str, Any] = {
        "a_map": runs_map(a, down, (t.block_k, t.block_m)) if maps else None,
        "b_map": runs_map(b, across, (t.block_k, t.block_n)) if maps else None,
        "a": None if maps else In(a),
        "b": None if maps else In(b),
        **inputs({"sizes": True, "offset": offsets}, first=2),
        "out": out if maps else Out(0),
        "LATE": maps and t.late,
    }
    of = {"offsets": offsets, "maps": maps, "inner": down, "columns": across, "held_step": None}
    return launched(grouped_weights, p, t, target, arguments, **of)

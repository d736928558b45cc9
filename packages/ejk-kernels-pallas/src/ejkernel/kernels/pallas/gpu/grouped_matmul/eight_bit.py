"""Grouped matmul on Hopper with matrices stored in 8 bits.

Math, for the rows r of group i, whose matrix is w_i, accumulated in float32:

    out[r] = scale_i * (lhs[r] @ w_i);  scale_i: one value a column, or none

The gradient of lhs is the same with transposed matrices. Rows without a matrix become 0.

Work split: one program a multiprocessor takes tile after tile of ``tall`` rows by 128 columns from
a counter in device memory (``tile_queue``). One warpgroup is scheduler and producer: it takes
tiles, publishes them, and copies 64 of the contracted axis of both operands per step by TMA. Two
consumers own 64 columns each and multiply the transposed matrices: their columns are the rows of
the matmul, whose left operand is in registers. So a consumer converts exactly what it multiplies,
once for all rows of the tile, and no 16-bit copy is written to shared memory: 24 KB more traffic a
step there would be as much as the matmuls leave. While the tensor cores work on a step, the
consumer converts the next one to other registers; two steps of the loop have an operand each.

Tiles begin at a full group of 8 rows, as copies do. Rows of other groups are multiplied, even if
they are NaN, and not stored.

Bound: as ``triton/grouped_matmul/forward``, with half of the bytes of matrices. 16384 rows, 4096 x
14336 in 8 groups are 1.92 TFLOP = 1.95 ms at 989 TFLOP/s. A step of 256 rows takes 1024 cycles of
the tensor cores, in which a warp that converts issues about 90 of its 512 instructions, and 40 KB
from L2 (48 KB for 128 x 256 in bfloat16).

Reached: 2.79 ms, and 2.84 for the gradient of lhs, next to 2.84 and 2.75 of bfloat16 matrices in
the same run (Zipf's groups 2.87 and 2.87, 2.90 and 2.84). A consumer that waited for a step before
it went on to the next took 3.31 ms where this took 2.50; bands of 4 and of 16 row tiles 2.69 and
2.81. A group's last tile takes the time of 256 rows: with groups of 256 rows on average that differ
at random 1.08 of the time of bfloat16, whose tiles have 128.

Sources: Gale et al. 2022, "MegaBlocks" (arXiv 2211.15841), section 3; Shah et al. 2024,
FlashAttention-3 (arXiv 2407.08608), section 3.1 (warp specialisation).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.registers import LAYOUT, ROW, read, spread
from ejkernel.kernels.pallas.gpu.common.tma import COPY_ROWS, tiled
from ejkernel.kernels.pallas.gpu.common.warps import OWN_BARRIERS
from ejkernel.kernels.pallas.gpu.grouped_matmul.fragments import (
    DEPTH,
    LINE,
    ROWS,
    in_fragment_order,
    load_fragment,
    stage_result,
    store_staged,
)
from ejkernel.kernels.pallas.gpu.grouped_matmul.tile_queue import TileQueue

F32 = jnp.float32
CONSUMERS = 2
ACROSS = ROWS * CONSUMERS  # columns of a tile
STEPS = 2  # of the loop, each with its own operand in registers
MULTIPLE = max(ACROSS, STEPS * DEPTH)  # of which both axes of a matrix are
REGISTERS = {"producer": 40, "consumer": 232}  # of a thread
COPIES = 2  # of a step


class Cursor(NamedTuple):
    """An entry of ``sizes``, its rows ``start`` .. ``end``, and the number of tiles before it.

    An entry is a group, or the rows of a call that no group owns, which follow its groups.
    """

    entry: Any
    start: Any
    end: Any
    tiles: Any

    @property
    def first(self) -> Any:
        """The first row that is copied."""
        return lax.div(self.start, COPY_ROWS) * COPY_ROWS


class Tile(NamedTuple):
    """A tile of the result.

    Attributes:
        steps: steps of the contracted axis, 0 for rows without a matrix, -1 past the last tile.
        row: the first row that is copied.
        start, end: rows of its group.
        column: its first column.
        matrix: number of its matrix.
    """

    steps: Any
    row: Any
    start: Any
    end: Any
    column: Any
    matrix: Any


@dataclass(frozen=True)
class EightBitMatmul(TileQueue):
    """The kernel for static sizes.

    Attributes:
        rows: of lhs and the result.
        inner, columns: of a matrix, multiples of 128.
        batch, groups, matrices: calls, groups and matrices of each.
        shared: whether all calls have the same matrices.
        transposed: whether matrices are ``[columns, inner]``.
        dtype: of lhs and the result.
        stored: of the matrices.
        cores: multiprocessors.
        tall: rows of a tile.
        stages: steps in shared memory.
        band: row tiles of a band.
    """

    rows: int
    inner: int
    columns: int
    batch: int
    groups: int
    matrices: int
    shared: bool
    transposed: bool
    dtype: str
    stored: str
    cores: int
    tall: int = 256
    stages: int = 4
    band: int = 8

    tile_of: ClassVar = Tile
    published: ClassVar = len(Tile._fields)

    @property
    def programs(self) -> int:
        return self.cores

    # ---- tile order -------------------------------------------------------------------------

    @property
    def across(self) -> int:
        """Tiles in a row of tiles."""
        return self.columns // ACROSS

    @property
    def entries(self) -> int:
        return self.batch * (self.groups + 1)

    def exists(self, tile: Tile) -> Any:
        return tile.steps >= 0

    def first_cursor(self) -> Cursor:
        zero = jnp.int32(0)
        return Cursor(zero - 1, zero, zero, zero)

    def row_tiles(self, c: Cursor) -> Any:
        """Returns the number of row tiles of an entry."""
        tiles = lax.div(c.end - c.first + self.tall - 1, self.tall)
        return jnp.where(c.end > c.start, tiles, 0)

    def seek(self, r: Any, cursor: Cursor, number: Any) -> Cursor:
        """Advances the cursor to the entry of tile ``number``, or past the last entry."""
        sizes = r.sizes.shape[0]

        def is_before(c: Cursor) -> Any:
            past = c.tiles + self.row_tiles(c) * self.across <= number
            return (c.entry < self.entries) & past

        def advance(c: Cursor) -> Cursor:
            entry = c.entry + 1
            size = jnp.clip(r.sizes[jnp.minimum(entry, sizes - 1)], 0, self.rows - c.end)
            # of a single call the remaining rows have no size
            end = jnp.where(entry < sizes, c.end + size, self.rows)
            return Cursor(entry, c.end, end, c.tiles + self.row_tiles(c) * self.across)

        return lax.while_loop(is_before, advance, cursor)

    def find_tile(self, r: Any, number: Any, cursor: Cursor) -> tuple[Tile, Cursor]:
        """Returns tile ``number``, and the cursor at its entry, which only advances.

        Tiles of an entry are in bands of row tiles, rows first.
        """
        c = self.seek(r, cursor, number)
        call = lax.div(c.entry, self.groups + 1)
        group = c.entry - call * (self.groups + 1)
        matrix = group
        if hasattr(r, "offset"):
            matrix = group - r.offset[jnp.minimum(call, r.offset.shape[0] - 1)]
        exists = (group < self.groups) & (matrix >= 0) & (matrix < self.matrices)
        steps = jnp.where(exists, self.inner // DEPTH, 0)
        steps = jnp.where(c.entry < self.entries, steps, -1)
        matrix = jnp.where(exists, matrix if self.shared else call * self.matrices + matrix, 0)
        index = number - c.tiles
        band = lax.div(index, self.band * self.across)
        height = jnp.minimum(self.row_tiles(c) - band * self.band, self.band)
        height = jnp.maximum(height, 1)  # past the last tile
        index = index - band * (self.band * self.across)
        row = c.first + (band * self.band + lax.rem(index, height)) * self.tall
        column = lax.div(index, height) * ACROSS
        return Tile(steps, row, c.start, c.end, column, matrix), c

    # ---- copies -----------------------------------------------------------------------------

    def produce(self, r: Any) -> None:
        """Takes tiles and copies their operands: the part of the warpgroup that is the producer."""
        plgpu.set_max_registers(REGISTERS["producer"], action="decrease")

        def per_tile(tile: Tile, n: Any, carry: Any) -> Any:
            rows = pl.ds(pl.multiple_of(tile.row, COPY_ROWS), self.tall)
            columns = pl.ds(pl.multiple_of(tile.column, ACROSS), ACROSS)

            def copy_step(s: Any, carry: Any) -> Any:
                slot = lax.rem(n + s, self.stages)
                pl.when(n + s >= self.stages)(lambda: plgpu.barrier_wait(r.empty.at[slot]))
                depth, full = pl.ds(s * DEPTH, DEPTH), r.full.at[slot]
                plgpu.copy_gmem_to_smem(r.lhs.at[rows, depth], r.lhs_smem.at[slot], full)
                part = (columns, depth) if self.transposed else (depth, columns)
                rhs = r.rhs.at[(tile.matrix, *part)]
                plgpu.copy_gmem_to_smem(rhs, r.rhs_smem.at[slot], full)
                return carry

            return lax.fori_loop(0, tile.steps, copy_step, carry)

        tiles, steps, _ = self.schedule_tiles(r, per_tile, jnp.int32(0))
        self.wait_for_consumers(r, tiles, steps, self.stages)

    # ---- consumers --------------------------------------------------------------------------

    def load_step(self, r: Any, n: Any) -> jax.Array:
        """Waits for step n of this program; returns this warpgroup's columns, converted."""
        slot = lax.rem(n, self.stages)
        plgpu.barrier_wait(r.full.at[slot])
        wg = lax.axis_index("wg")
        rhs = r.rhs_smem.at[slot]
        return load_fragment(rhs, wg, self.stored, self.dtype, transposed=self.transposed)

    def multiply_step(self, r: Any, acc: Any, columns: jax.Array, n: Any) -> None:
        """Starts the matmul of step n of this program."""
        plgpu.wgmma(acc, columns, r.lhs_smem.at[lax.rem(n, self.stages)].T)

    def consume(self, r: Any) -> None:
        """Multiplies and stores 64 columns of every tile: the part of a consumer."""
        plgpu.set_max_registers(REGISTERS["consumer"], action="increase")
        wg = lax.axis_index("wg")

        def release(n: Any) -> None:
            plgpu.barrier_arrive(r.empty.at[lax.rem(n, self.stages)])

        def per_tile(tile: Tile, n: Any, follow: Any, carry: Any) -> Any:
            column = pl.multiple_of(tile.column + wg * ROWS, ROWS)
            if hasattr(r, "scale"):
                scale = read(r.scale.at[tile.matrix, pl.ds(column, ROWS)], ROW, optimized=False)

            def no_columns() -> jax.Array:
                return plgpu.layout_cast(jnp.zeros((ROWS, DEPTH), self.dtype), LAYOUT)

            # registers of an operand must not be written behind the zeros of the accumulator: ptxas
            # would wait for every matmul before the next
            first = lax.cond(tile.steps > 0, lambda: self.load_step(r, n), no_columns)

            def accumulate(acc: Any) -> Any:
                def add_steps(i: Any, even: jax.Array) -> jax.Array:
                    at = n + STEPS * i
                    self.multiply_step(r, acc, even, at)
                    plgpu.wgmma_wait(1)
                    pl.when(i > 0)(lambda: release(at - 1))
                    odd = self.load_step(r, at + 1)
                    self.multiply_step(r, acc, odd, at + 1)
                    plgpu.wgmma_wait(1)
                    release(at)
                    has_next = STEPS * (i + 1) < tile.steps
                    return lax.cond(has_next, lambda: self.load_step(r, at + STEPS), lambda: even)

                lax.fori_loop(0, lax.div(tile.steps, STEPS), add_steps, first)
                plgpu.wgmma_wait(0)
                pl.when(tile.steps > 0)(lambda: release(n + tile.steps - 1))
                return follow(), acc[...]

            following, x = pl.run_scoped(accumulate, plgpu.ACC((ROWS, self.tall), F32))
            if hasattr(r, "scale"):
                x = x * spread(scale, x.shape, 0)
            self.store(r, tile, column, x)
            return following, carry

        self.follow_tiles(r, per_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def store(self, r: Any, tile: Tile, column: Any, x: jax.Array) -> None:
        """Stores ``x [64 columns, rows]`` of a tile: the rows of its group."""
        staged = r.staged.at[lax.axis_index("wg")]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        stage_result(staged, x)
        plgpu.commit_smem()
        first_row = pl.multiple_of(tile.row, COPY_ROWS)
        out = r.out.at[pl.ds(first_row, self.tall), pl.ds(column, ROWS)]
        first, last = tile.start - tile.row, tile.end - tile.row
        is_full = (first <= 0) & (last >= self.tall)
        pl.when(is_full)(lambda: plgpu.copy_smem_to_gmem(staged, out))
        pl.when(jnp.logical_not(is_full))(lambda: store_staged(out, staged, first, last))

    # ---- launch -----------------------------------------------------------------------------

    def _scratch(self) -> dict[str, Any]:
        dtype = jnp.dtype(self.dtype)
        rhs, line = ((DEPTH, ACROSS), LINE)
        if self.transposed:
            rhs, line = (ACROSS, DEPTH), DEPTH
        return {
            "lhs_smem": tiled((self.stages, self.tall, DEPTH), dtype),
            "rhs_smem": tiled((self.stages, *rhs), jnp.int8, line),
            "staged": tiled((CONSUMERS, self.tall, ROWS), dtype),
            "full": plgpu.Barrier(num_arrivals=COPIES, num_barriers=self.stages),
            "empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=self.stages),
            **self.queue_scratch(CONSUMERS),
        }

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        sizes: jax.Array,
        offset: jax.Array | None = None,
        scale: jax.Array | None = None,
    ) -> jax.Array:
        """Returns ``[rows, columns]`` of lhs ``[rows, inner]`` and 8-bit matrices.

        sizes int32 ``[groups]``, of several calls ``[batch * (groups + 1)]``, with the rows of each
        that no group owns; offset ``[1]`` or ``[batch]``: the group of the first matrix; scale
        float32 ``[matrices, columns]``.
        """
        inputs = {"lhs": lhs, "rhs": lax.bitcast_convert_type(rhs, jnp.int8), "sizes": sizes}
        if offset is not None:
            inputs["offset"] = offset
        if scale is not None:
            inputs["scale"] = in_fragment_order(scale)

        def body(*refs: Any, **scratch: Any) -> None:
            r = SimpleNamespace(**dict(zip((*inputs, "out"), refs, strict=True)), **scratch)
            r.counter = pl.get_global(plgpu.SemaphoreType.REGULAR)
            wg = lax.axis_index("wg")
            pl.when(wg == CONSUMERS)(lambda: self.produce(r))
            pl.when(wg < CONSUMERS)(lambda: self.consume(r))

        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((self.rows, self.columns), self.dtype),
            scratch_types=self._scratch(),
            grid=(self.programs,),
            grid_names=("program",),
            num_threads=CONSUMERS + 1,
            thread_name="wg",
            kernel_name="grouped_matmul_8bit",
            compiler_params=OWN_BARRIERS,
        )
        return kernel(*inputs.values())

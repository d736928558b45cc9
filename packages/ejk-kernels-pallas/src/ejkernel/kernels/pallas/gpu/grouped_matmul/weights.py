"""Gradient of the matrices of a grouped matmul on Hopper: a matmul over the rows of each group.

Math, for the rows r of the group of matrix i, accumulated in float32:

    dw_i = sum over r of outer(lhs[r], dout[r])          (its transpose for transposed matrices)

Work split: one program a multiprocessor takes tile after tile of 128 x 256 of the matrices from a
counter in device memory, in the order of the Triton kernel: the program of a tile differs from run
to run, the order of its additions does not. One warpgroup is scheduler and producer: it takes
tiles, publishes them to the others, and copies 64 rows of both operands per step by TMA, without a
transpose. Two consumers own 64 x 256 of a tile each, and wait for the producer only. A finished
tile is kept as 16-bit values in registers, and is stored piece by piece during the first steps of
the next tile: the epilogue costs only the rounding and the zeros of the next accumulator.

Copies move full groups of 8 rows. A step whose rows begin or end inside of a copied block arrives
at another barrier: the producer sets the rows outside to 0, even if they are NaN, and only then
hands the step over, after it has started the next copy. Steps without such rows skip all of this. A
matrix without rows takes no step and is written 0.

The producer computes the row range of a group by adding up the sizes as it goes, because the
matrices of its tiles never decrease: no launch before this one.

Bound, bfloat16 on an H200 (989 TFLOP/s at most, copies 4.3 TB/s): 65536 rows, 7168 x 2048 in 256
groups: 1.92 TFLOP = 1.95 ms and 8.7 GB = 2.03 ms, nearly all of them results. 8192 rows, 2048 x 768
in 128 groups: 0.45 GB, 0.105 ms: memory, one step of work a tile. A step is 1024 cycles of the
tensor cores, 40 KB of shared memory read for each warpgroup in half of that, and 48 KB from L2.
16384 rows, 4096 x 14336 in 8 groups: 1.95 ms: arithmetic. Reached, of even and of Zipf's groups: 84
and 82% (2.32, 2.39 ms; 8 groups), 66 and 56% (3.07, 3.65 ms; 256), 87 and 83% (0.120, 0.127 ms;
128), where the kernel for every GPU takes 2.48 and 2.55, 3.52 and 4.21, 0.127 and 0.152. Of Zipf's
256 groups the counter took 4.30 ms to 3.92, and clearing rows of other groups without reading them
to 3.65; of 128 the counter, four steps in memory and that clearing took 0.147 to 0.127.

Time of short tiles (128 even groups, in a variant without the counter: 0.128 ms; the following
experiments are wrong on purpose): groups without rows 0.097, with half of the programs 0.107; every
tile reads the same rows 0.103; nothing is written 0.083. So neither a program's work nor writing is
the limit, but reading other rows at the same time. Programs at 4 positions of the order at once
take 0.145, each at its own position 0.169. Rows of later groups brought to L2 ahead: 7 us more.
Zipf's 256 groups, long and short ones alternating by the counter: no change.

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

from ejkernel.kernels.pallas.gpu.common.registers import LAYOUT
from ejkernel.kernels.pallas.gpu.common.rows import clear_rows
from ejkernel.kernels.pallas.gpu.common.tma import COPY_ROWS, tiled
from ejkernel.kernels.pallas.gpu.common.warps import OWN_BARRIERS
from ejkernel.kernels.pallas.gpu.grouped_matmul.tile_queue import TileQueue

F32 = jnp.float32
ROWS = 64  # of a step, and of the accumulator of one warpgroup
CONSUMERS = 2
DOWN, ACROSS = ROWS * CONSUMERS, 256  # of a tile
PIECE = 64  # columns that are stored together, at least
PARTS = 2  # steps of the next tile during which a tile is stored
REGISTERS = {"producer": 56, "consumer": 224}  # of a thread
COPIES = 2  # of a step


class Cursor(NamedTuple):
    """An entry of ``sizes`` and its rows ``start`` .. ``end``.

    An entry is a group, or the rows of a call that no group owns, which follow its groups.
    """

    entry: Any
    start: Any
    end: Any


class Tile(NamedTuple):
    """A tile of a matrix.

    Attributes:
        number: number of the tile in the order of ``origin_of``.
        steps: steps of 64 rows from ``first`` to the last row of its group.
        start, end: rows of its group; not published.
    """

    number: Any
    steps: Any
    start: Any = None
    end: Any = None

    @property
    def first(self) -> Any:
        """The first row that is copied."""
        return pl.multiple_of(lax.div(self.start, COPY_ROWS) * COPY_ROWS, COPY_ROWS)


@dataclass(frozen=True)
class Weights(TileQueue):
    """The kernel for static sizes.

    Attributes:
        rows: of both operands.
        down, across: of a matrix, multiples of 64.
        batch, groups, held: calls, groups and matrices of each.
        dtype: of operands and result.
        cores: multiprocessors.
        stages: steps in shared memory, at least 3: the next step is started before one with rows of
            other groups is handed over; a step's memory is free when the next step has begun.
        staged: pieces of a warpgroup whose stores may be in flight.
        piece: columns that are stored together, 64, 128 or 256.
        band: row tiles of a band.
    """

    rows: int
    down: int
    across: int
    batch: int
    groups: int
    held: int
    dtype: str
    cores: int
    stages: int = 4
    staged: int = 2
    piece: int = PIECE
    band: int = 16

    def __post_init__(self) -> None:
        if self.stages < 3:
            raise ValueError(f"stages: {self.stages}, of which at least 3 are needed")

    tile_of: ClassVar = Tile
    published: ClassVar = 2

    # ---- tile order -------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        """Tiles of a matrix."""
        return -(-self.down // DOWN), -(-self.across // ACROSS)

    @property
    def tiles(self) -> int:
        down, across = self.shape
        return self.batch * self.held * down * across

    @property
    def programs(self) -> int:
        return min(self.cores, self.tiles)

    def origin_of(self, t: Any) -> tuple[Any, Any, Any]:
        """(matrix, first row, first column) of tile ``t``: bands of row tiles, rows first."""
        down, across = self.shape
        matrix = lax.div(t, down * across)
        index = t - matrix * (down * across)
        band = lax.div(index, self.band * across)
        height = jnp.minimum(down - band * self.band, self.band)
        index = index - band * (self.band * across)
        row = band * self.band + lax.rem(index, height)
        return matrix, row * DOWN, lax.div(index, height) * ACROSS

    def seek(self, r: Any, cursor: Cursor, entry: Any) -> Cursor:
        """Advances the cursor to ``entry``."""

        def advance(c: Cursor) -> Cursor:
            size = jnp.clip(r.sizes[c.entry + 1], 0, self.rows)
            return Cursor(c.entry + 1, c.end, jnp.minimum(c.end + size, self.rows))

        return lax.while_loop(lambda c: c.entry < entry, advance, cursor)

    def first_cursor(self) -> Cursor:
        zero = jnp.int32(0)
        return Cursor(zero - 1, zero, zero)

    def exists(self, tile: Tile) -> Any:
        return tile.number < self.tiles

    def find_tile(self, r: Any, number: Any, cursor: Cursor) -> tuple[Tile, Cursor]:
        """Returns tile ``number``, and the cursor at its group.

        The cursor only advances: the groups of the tiles that a program takes never decrease. Past
        the last tile the rows are the last tile's.
        """
        matrix = self.origin_of(jnp.minimum(number, self.tiles - 1))[0]
        call = lax.div(matrix, self.held)
        group = matrix - call * self.held
        if hasattr(r, "offset"):
            group = group + r.offset[call if r.offset.shape[0] > 1 else 0]
        exists = (group >= 0) & (group < self.groups)
        entry = call * (self.groups + 1) + group
        cursor = self.seek(r, cursor, jnp.where(exists, entry, cursor.entry))
        end = jnp.where(exists, cursor.end, cursor.start)
        ahead = end - lax.div(cursor.start, COPY_ROWS) * COPY_ROWS
        steps = jnp.where(end > cursor.start, lax.div(ahead + ROWS - 1, ROWS), 0)
        return Tile(number, steps, cursor.start, end), cursor

    # ---- copies -----------------------------------------------------------------------------

    def produce(self, r: Any) -> None:
        """Takes tiles and copies their rows: the part of the warpgroup that is the producer."""
        plgpu.set_max_registers(REGISTERS["producer"], action="decrease")

        def hand_over(slot: Any, low: Any, high: Any) -> None:
            """Clears the rows of other groups in a step and hands it over."""
            plgpu.barrier_wait(r.full_partial.at[slot])
            for operand in (r.a_smem, r.b_smem):
                clear_rows(operand.at[slot], low, high)
            plgpu.commit_smem()
            for _ in range(COPIES):
                plgpu.barrier_arrive(r.full.at[slot])

        def per_tile(tile: Tile, n: Any, waiting: Any) -> Any:
            _, down, across = self.origin_of(tile.number)

            def copy_step(s: Any, waiting: Any) -> Any:
                slot = lax.rem(n + s, self.stages)
                row = tile.first + s * ROWS
                low, high = tile.start - row, tile.end - row
                is_partial = (low > 0) | (high < ROWS)
                pl.when(n + s >= self.stages)(lambda: plgpu.barrier_wait(r.empty.at[slot]))

                def start(barrier: Any) -> None:
                    rows = pl.ds(row, ROWS)
                    a = r.a.at[rows, pl.ds(down, DOWN)]
                    plgpu.copy_gmem_to_smem(a, r.a_smem.at[slot], barrier.at[slot])
                    b = r.b.at[rows, pl.ds(across, ACROSS)]
                    plgpu.copy_gmem_to_smem(b, r.b_smem.at[slot], barrier.at[slot])

                pl.when(is_partial)(lambda: start(r.full_partial))
                pl.when(jnp.logical_not(is_partial))(lambda: start(r.full))
                pl.when(waiting[0] >= 0)(lambda: hand_over(*waiting))
                return jnp.where(is_partial, slot, -1), low, high

            # no tile is published before all steps of earlier tiles are handed over
            has_waiting = waiting[0] >= 0
            pl.when(has_waiting & (tile.steps == 0))(lambda: hand_over(*waiting))
            waiting = (jnp.where(tile.steps == 0, -1, waiting[0]), *waiting[1:])
            return lax.fori_loop(0, tile.steps, copy_step, waiting)

        zero = jnp.int32(0)
        tiles, steps, waiting = self.schedule_tiles(r, per_tile, (zero - 1, zero, zero))
        pl.when(waiting[0] >= 0)(lambda: hand_over(*waiting))
        self.wait_for_consumers(r, tiles, steps, self.stages)

    # ---- consumers --------------------------------------------------------------------------

    def consume(self, r: Any) -> None:
        """Multiplies and stores 64 rows of every tile: the part of a consumer."""
        plgpu.set_max_registers(REGISTERS["consumer"], action="increase")
        wg = lax.axis_index("wg")

        def store_part(finished: jax.Array, t: Any, part: int) -> None:
            """Hands a part of a finished tile to TMA."""
            matrix, m, n = self.origin_of(t)
            m = m + wg * ROWS
            # whether a tile may reach past the matrix
            may_overhang = self.down % DOWN or self.across % ACROSS
            pieces = ACROSS // self.piece
            for i in range(-(-part * pieces // PARTS), -(-(part + 1) * pieces // PARTS)):
                column = n + i * self.piece

                def piece(i: int = i, column: Any = column) -> None:
                    staged = r.staged.at[wg, i % self.staged]
                    ahead = 0 if may_overhang else self.staged - 1
                    plgpu.wait_smem_to_gmem(ahead, wait_read_only=True)
                    staged[...] = finished[:, i * self.piece : (i + 1) * self.piece]
                    plgpu.commit_smem()
                    target = (matrix, pl.ds(m, ROWS), pl.ds(column, self.piece))
                    plgpu.copy_smem_to_gmem(staged, r.out.at[target])

                if may_overhang:
                    pl.when((m < self.down) & (column < self.across))(piece)
                else:
                    piece()

        def per_tile(tile: Tile, n: Any, follow: Any, carry: Any) -> Any:
            steps = tile.steps
            finished, finished_t = carry
            new = finished_t < 0  # no tile is finished yet

            def accumulate(acc: Any) -> Any:
                def add_step(s: Any, carry: Any) -> Any:
                    slot = lax.rem(n + s, self.stages)
                    plgpu.barrier_wait(r.full.at[slot])
                    columns = r.a_smem.at[slot, :, pl.ds(wg * ROWS, ROWS)]
                    plgpu.wgmma(acc, columns.T, r.b_smem.at[slot])
                    for i in range(PARTS):
                        has_part = (s == i) & jnp.logical_not(new)
                        pl.when(has_part)(lambda i=i: store_part(finished, finished_t, i))
                    plgpu.wgmma_wait(1)

                    @pl.when(s > 0)
                    def release() -> None:
                        plgpu.barrier_arrive(r.empty.at[lax.rem(n + s - 1, self.stages)])

                    return carry

                lax.fori_loop(0, steps, add_step, jnp.int32(0))
                for i in range(PARTS):
                    has_part = (steps <= i) & jnp.logical_not(new)
                    pl.when(has_part)(lambda i=i: store_part(finished, finished_t, i))
                following = follow()
                return following, acc[...].astype(self.dtype)

            following, finished = pl.run_scoped(accumulate, plgpu.ACC((ROWS, ACROSS), F32))
            last = lax.rem(n + steps - 1, self.stages)
            pl.when(steps > 0)(lambda: plgpu.barrier_arrive(r.empty.at[last]))
            return following, (finished, tile.number)

        finished = plgpu.layout_cast(jnp.zeros((ROWS, ACROSS), self.dtype), LAYOUT)
        finished, t = self.follow_tiles(r, per_tile, (finished, jnp.int32(-1)))
        for i in range(PARTS):
            store_part(finished, t, i)
        plgpu.wait_smem_to_gmem(0)

    # ---- launch -----------------------------------------------------------------------------

    def _scratch(self) -> dict[str, Any]:
        dtype = jnp.dtype(self.dtype)
        return {
            "a_smem": tiled((self.stages, ROWS, DOWN), dtype),
            "b_smem": tiled((self.stages, ROWS, ACROSS), dtype),
            "staged": tiled((CONSUMERS, self.staged, ROWS, self.piece), dtype),
            "full": plgpu.Barrier(num_arrivals=COPIES, num_barriers=self.stages),
            "full_partial": plgpu.Barrier(num_arrivals=COPIES, num_barriers=self.stages),
            "empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=self.stages),
            **self.queue_scratch(CONSUMERS),
        }

    def __call__(
        self, a: jax.Array, b: jax.Array, sizes: jax.Array, offset: jax.Array | None = None
    ) -> jax.Array:
        """Returns ``[batch * held, down, across]`` of a ``[rows, down]`` and b ``[rows, across]``.

        a is lhs and b is dout, but for transposed matrices a is dout and b is lhs. sizes int32
        ``[groups]``, of several calls ``[batch * (groups + 1)]``, with the rows of each that no
        group owns; offset ``[1]`` or ``[batch]``: the group of the first matrix.
        """
        inputs = {"a": a, "b": b, "sizes": sizes}
        if offset is not None:
            inputs["offset"] = offset

        def body(*refs: Any, **scratch: Any) -> None:
            r = SimpleNamespace(**dict(zip((*inputs, "out"), refs, strict=True)), **scratch)
            r.counter = pl.get_global(plgpu.SemaphoreType.REGULAR)
            wg = lax.axis_index("wg")
            pl.when(wg == CONSUMERS)(lambda: self.produce(r))
            pl.when(wg < CONSUMERS)(lambda: self.consume(r))

        matrices = (self.batch * self.held, self.down, self.across)
        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(matrices, self.dtype),
            scratch_types=self._scratch(),
            grid=(self.programs,),
            grid_names=("program",),
            num_threads=CONSUMERS + 1,
            thread_name="wg",
            kernel_name="grouped_weights",
            compiler_params=OWN_BARRIERS,
        )
        return kernel(*inputs.values())

"""Grouped matrix product on Hopper, gradient of the matrices: rows are what is summed over.

Math, for the rows r of the group of matrix i, accumulated in float32:

    dw_i = sum over r of outer(lhs[r], dout[r])          (its transpose for transposed matrices)

Work split: one program a multiprocessor takes tile after tile of 128 x 256 of the matrices from a
counter in device memory, in the order of the Triton kernel: who computes a tile differs from run to
run, how it is summed does not. One warpgroup is scheduler and producer: it takes tiles, publishes
which to the others, and copies 64 rows of both operands a step by TMA, both as they lie. Two others
own 64 x 256 of a tile each, and wait for nobody but the first. A finished tile is kept as 16-bit
numbers in registers, and leaves piece by piece while the first steps of the next tile are
multiplied: of a tile's end only the rounding and the zeros of the next sums are seen.

Copies move whole groups of 8 rows. A run of rows that begins or ends inside of what is copied
arrives at another barrier: the warpgroup that copies sets the rows outside to 0, whatever they
were, and only then hands the step over, after it has started the next copy. Steps without such rows
know nothing of this. A matrix without rows takes no step and is written 0.

Where a group's rows lie the warpgroup that copies finds by adding up the sizes as it walks, from
tiles whose matrices never fall: no launch before this one.

Bound, bfloat16 on an H200 (989 TFLOP/s at most, copies 4.3 TB/s): 65536 rows, 7168 x 2048 in 256
groups: 1.92 TFLOP = 1.95 ms and 8.7 GB = 2.03 ms, nearly all of them results. 8192 rows, 2048 x 768
in 128 groups: 0.45 GB, 0.105 ms: memory, one step of work a tile. A step is 1024 cycles of the
tensor cores, 40 KB of shared memory read for each warpgroup in half of that, and 48 KB from L2.
16384 rows, 4096 x 14336 in 8 groups: 1.95 ms: arithmetic. Reached, of even and of Zipf's groups: 84
and 82% (2.32, 2.39 ms; 8 groups), 66 and 56% (3.07, 3.65 ms; 256), 87 and 83% (0.120, 0.127 ms;
128), where the kernel for every GPU takes 2.48 and 2.55, 3.52 and 4.21, 0.127 and 0.152. Of Zipf's
256 groups the counter took 4.30 ms to 3.92, and to 3.65 that rows of others are written and not
read; of 128 the counter, four steps in memory and those rows took 0.147 to 0.127.

Where the time of short tiles goes (128 even groups, in a form without the counter: 0.128 ms; all
that follows is wrong on purpose): groups without rows 0.097, with half of the programs 0.107; every
tile reads the same rows 0.103; nothing is written 0.083. So neither a program's own work nor
writing is the limit, but reading other rows beside it. Programs at 4 places of the order at once
take 0.145, each at a place of its own 0.169. Rows of later groups brought to L2 ahead: 7 us more.
Zipf's 256 groups, long and short ones in turns by the counter: no change.

Sources: Gale et al. 2022, "MegaBlocks" (arXiv 2211.15841), section 3; Shah et al. 2024,
FlashAttention-3 (arXiv 2407.08608), section 3.1 (warp specialisation).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.registers import LAYOUT
from ejkernel.kernels.pallas.gpu.common.rows import clear_rows
from ejkernel.kernels.pallas.gpu.common.tickets import taken_by_warpgroup
from ejkernel.kernels.pallas.gpu.common.tma import GROUP, tiled
from ejkernel.kernels.pallas.gpu.common.warps import OWN_BARRIERS

F32 = jnp.float32
ROWS = 64  # of a step, and of the sums of one warpgroup
CONSUMERS = 2
DOWN, ACROSS = ROWS * CONSUMERS, 256  # of a tile
PIECE = 64  # columns that leave together, at least
PARTS = 2  # steps of the next tile during which a tile leaves
REGISTERS = {"copies": 56, "sums": 224}  # of a thread
COPIES = 2  # of a step
TILES_AHEAD = 4  # that the scheduler may have published before all consumers have read them


class Cursor(NamedTuple):
    """A lane (a group, or the rows that those of a call leave) and its rows."""

    lane: Any
    start: Any
    end: Any


class Tile(NamedTuple):
    """Its group's rows are ``start`` .. ``end``; ``steps`` times 64 of them are multiplied."""

    number: Any
    start: Any
    end: Any
    steps: Any

    @property
    def first(self) -> Any:
        """The first row that is copied."""
        return pl.multiple_of(lax.div(self.start, GROUP) * GROUP, GROUP)


@dataclass(frozen=True)
class Weights:
    """The kernel of one form.

    Attributes:
        rows: of both operands.
        down, across: of a matrix, multiples of 64.
        batch, groups, held: calls, groups and matrices of each.
        dtype: of operands and result.
        cores: multiprocessors.
        stages: steps in shared memory, at least 3: the next step is started before one with rows of
            others is handed over, and a step's memory is free when the one after it has begun.
        staged: pieces of a warpgroup's that may be on their way out.
        piece: columns that leave together, 64, 128 or 256.
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

    # ---- the walk ---------------------------------------------------------------------------

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

    def place(self, t: Any) -> tuple[Any, Any, Any]:
        """(matrix, first row, first column) of tile ``t``: bands of row tiles, rows first."""
        down, across = self.shape
        matrix = lax.div(t, down * across)
        index = t - matrix * (down * across)
        band = lax.div(index, self.band * across)
        height = jnp.minimum(down - band * self.band, self.band)
        index = index - band * (self.band * across)
        row = band * self.band + lax.rem(index, height)
        return matrix, row * DOWN, lax.div(index, height) * ACROSS

    def seek(self, r: Any, cursor: Cursor, lane: Any) -> Cursor:
        """The cursor at ``lane``, which is not behind it."""

        def on(c: Cursor) -> Cursor:
            size = jnp.clip(r.sizes[c.lane + 1], 0, self.rows)
            return Cursor(c.lane + 1, c.end, jnp.minimum(c.end + size, self.rows))

        return lax.while_loop(lambda c: c.lane < lane, on, cursor)

    def tile(self, r: Any, number: Any, cursor: Cursor) -> tuple[Tile, Cursor]:
        """A tile (past the last one: with the rows of the last), and the cursor at its group."""
        matrix = self.place(jnp.minimum(number, self.tiles - 1))[0]
        call = lax.div(matrix, self.held)
        group = matrix - call * self.held
        if hasattr(r, "offset"):
            group = group + r.offset[call if r.offset.shape[0] > 1 else 0]
        exists = (group >= 0) & (group < self.groups)
        lane = call * (self.groups + 1) + group
        cursor = self.seek(r, cursor, jnp.where(exists, lane, cursor.lane))
        end = jnp.where(exists, cursor.end, cursor.start)
        ahead = end - lax.div(cursor.start, GROUP) * GROUP
        steps = jnp.where(end > cursor.start, lax.div(ahead + ROWS - 1, ROWS), 0)
        return Tile(number, cursor.start, end, steps), cursor

    def schedule_tiles(self, r: Any, body: Callable[..., Any], carry: Any) -> tuple[Any, Any, Any]:
        """Takes tiles and publishes them: (tiles, steps, carry) after ``carry = body(tile, n,
        carry)`` of all, n steps before the tile.
        """

        def publish(i: Any, tile: Tile) -> None:
            place = lax.rem(i, TILES_AHEAD)
            pl.when(i >= TILES_AHEAD)(lambda: plgpu.barrier_wait(r.tile_free.at[place]))
            r.next_tiles[place, 0] = tile.number
            r.next_tiles[place, 1] = tile.steps
            plgpu.barrier_arrive(r.tile_ready.at[place])

        def one(state: Any) -> Any:
            i, n, tile, cursor, carry = state
            carry = body(tile, n, carry)
            # while what the body began to copy is on its way
            taken = taken_by_warpgroup(r.counter, r.next_tiles, lax.rem(i + 1, TILES_AHEAD), True)
            following, cursor = self.tile(r, self.programs + taken, cursor)
            publish(i + 1, following)
            return i + 1, n + tile.steps, following, cursor, carry

        zero = jnp.int32(0)
        first = self.tile(r, lax.axis_index("program"), Cursor(zero - 1, zero, zero))
        publish(zero, first[0])
        start = (zero, zero, *first, carry)
        i, n, _, _, carry = lax.while_loop(lambda s: s[2].number < self.tiles, one, start)
        return i, n, carry

    def follow_tiles(self, r: Any, body: Callable[..., Any], carry: Any) -> Any:
        """``carry`` after ``following, carry = body(number, steps, n, follow, carry)`` of all tiles
        that are taken, ``following = follow()``.
        """

        def receive(i: Any) -> tuple[Any, Any]:
            place = lax.rem(i, TILES_AHEAD)
            plgpu.barrier_wait(r.tile_ready.at[place])
            number, steps = r.next_tiles[place, 0], r.next_tiles[place, 1]
            plgpu.barrier_arrive(r.tile_free.at[place])
            return number, steps

        def one(state: Any) -> Any:
            i, n, (number, steps), carry = state
            following, carry = body(number, steps, n, lambda: receive(i + 1), carry)
            return i + 1, n + steps, following, carry

        zero = jnp.int32(0)
        start = (zero, zero, receive(zero), carry)
        return lax.while_loop(lambda s: s[2][0] < self.tiles, one, start)[3]

    # ---- copies -----------------------------------------------------------------------------

    def copy(self, r: Any) -> None:
        plgpu.set_max_registers(REGISTERS["copies"], action="decrease")

        def hand_over(slot: Any, low: Any, high: Any) -> None:
            """A step that has rows of others, once they are 0."""
            plgpu.barrier_wait(r.some.at[slot])
            for operand in (r.a, r.b):
                clear_rows(operand.at[slot], low, high)
            plgpu.commit_smem()
            for _ in range(COPIES):
                plgpu.barrier_arrive(r.ready.at[slot])

        def per_tile(tile: Tile, n: Any, waiting: Any) -> Any:
            _, down, across = self.place(tile.number)

            def step(s: Any, waiting: Any) -> Any:
                slot = lax.rem(n + s, self.stages)
                row = tile.first + s * ROWS
                low, high = tile.start - row, tile.end - row
                some = (low > 0) | (high < ROWS)
                pl.when(n + s >= self.stages)(lambda: plgpu.barrier_wait(r.free.at[slot]))

                def start(barrier: Any) -> None:
                    rows = pl.ds(row, ROWS)
                    a = r.lhs.at[rows, pl.ds(down, DOWN)]
                    plgpu.copy_gmem_to_smem(a, r.a.at[slot], barrier.at[slot])
                    b = r.dout.at[rows, pl.ds(across, ACROSS)]
                    plgpu.copy_gmem_to_smem(b, r.b.at[slot], barrier.at[slot])

                pl.when(some)(lambda: start(r.some))
                pl.when(jnp.logical_not(some))(lambda: start(r.ready))
                pl.when(waiting[0] >= 0)(lambda: hand_over(*waiting))
                return jnp.where(some, slot, -1), low, high

            # no tile is published before all steps of those before are there
            held = waiting[0] >= 0
            pl.when(held & (tile.steps == 0))(lambda: hand_over(*waiting))
            waiting = (jnp.where(tile.steps == 0, -1, waiting[0]), *waiting[1:])
            return lax.fori_loop(0, tile.steps, step, waiting)

        zero = jnp.int32(0)
        tiles, steps, waiting = self.schedule_tiles(r, per_tile, (zero - 1, zero, zero))
        pl.when(waiting[0] >= 0)(lambda: hand_over(*waiting))
        # nobody signals to a program that has left
        for slot in range(self.stages):
            pl.when(slot < steps)(lambda slot=slot: plgpu.barrier_wait(r.free.at[slot]))
        for place in range(TILES_AHEAD):
            pl.when(place <= tiles)(lambda place=place: plgpu.barrier_wait(r.tile_free.at[place]))

    # ---- sums -------------------------------------------------------------------------------

    def add(self, r: Any) -> None:
        plgpu.set_max_registers(REGISTERS["sums"], action="increase")
        wg = lax.axis_index("wg")

        def leave(kept: jax.Array, t: Any, part: int) -> None:
            """Hands a part of a finished tile to TMA."""
            matrix, m, n = self.place(t)
            m = m + wg * ROWS
            # whether there are pieces that nobody writes
            some = self.down % DOWN or self.across % ACROSS
            pieces = ACROSS // self.piece
            for i in range(-(-part * pieces // PARTS), -(-(part + 1) * pieces // PARTS)):
                column = n + i * self.piece

                def piece(i: int = i, column: Any = column) -> None:
                    staged = r.staged.at[wg, i % self.staged]
                    ahead = 0 if some else self.staged - 1
                    plgpu.wait_smem_to_gmem(ahead, wait_read_only=True)
                    staged[...] = kept[:, i * self.piece : (i + 1) * self.piece]
                    plgpu.commit_smem()
                    there = (matrix, pl.ds(m, ROWS), pl.ds(column, self.piece))
                    plgpu.copy_smem_to_gmem(staged, r.out.at[there])

                if some:
                    pl.when((m < self.down) & (column < self.across))(piece)
                else:
                    piece()

        def per_tile(t: Any, steps: Any, n: Any, follow: Any, carry: Any) -> Any:
            kept, kept_t = carry
            new = kept_t < 0  # nothing is kept yet

            def sums(acc: Any) -> Any:
                def step(s: Any, carry: Any) -> Any:
                    slot = lax.rem(n + s, self.stages)
                    plgpu.barrier_wait(r.ready.at[slot])
                    rows = r.a.at[slot, :, pl.ds(wg * ROWS, ROWS)]
                    plgpu.wgmma(acc, rows.T, r.b.at[slot])
                    for i in range(PARTS):
                        there = (s == i) & jnp.logical_not(new)
                        pl.when(there)(lambda i=i: leave(kept, kept_t, i))
                    plgpu.wgmma_wait(1)

                    @pl.when(s > 0)
                    def release() -> None:
                        plgpu.barrier_arrive(r.free.at[lax.rem(n + s - 1, self.stages)])

                    return carry

                lax.fori_loop(0, steps, step, jnp.int32(0))
                for i in range(PARTS):
                    there = (steps <= i) & jnp.logical_not(new)
                    pl.when(there)(lambda i=i: leave(kept, kept_t, i))
                following = follow()
                return following, acc[...].astype(self.dtype)

            following, kept = pl.run_scoped(sums, plgpu.ACC((ROWS, ACROSS), F32))
            last = lax.rem(n + steps - 1, self.stages)
            pl.when(steps > 0)(lambda: plgpu.barrier_arrive(r.free.at[last]))
            return following, (kept, t)

        kept = plgpu.layout_cast(jnp.zeros((ROWS, ACROSS), self.dtype), LAYOUT)
        kept, t = self.follow_tiles(r, per_tile, (kept, jnp.int32(-1)))
        for i in range(PARTS):
            leave(kept, t, i)
        plgpu.wait_smem_to_gmem(0)

    # ---- launch -----------------------------------------------------------------------------

    def _scratch(self) -> dict[str, Any]:
        dtype = jnp.dtype(self.dtype)
        return {
            "a": tiled((self.stages, ROWS, DOWN), dtype),
            "b": tiled((self.stages, ROWS, ACROSS), dtype),
            "staged": tiled((CONSUMERS, self.staged, ROWS, self.piece), dtype),
            "ready": plgpu.Barrier(num_arrivals=COPIES, num_barriers=self.stages),
            "some": plgpu.Barrier(num_arrivals=COPIES, num_barriers=self.stages),
            "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=self.stages),
            # number, steps, none, what was taken
            "next_tiles": plgpu.SMEM((TILES_AHEAD, 4), jnp.int32),
            "tile_ready": plgpu.Barrier(num_barriers=TILES_AHEAD),
            "tile_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=TILES_AHEAD),
        }

    def __call__(
        self, lhs: jax.Array, dout: jax.Array, sizes: jax.Array, offset: jax.Array | None = None
    ) -> jax.Array:
        """``[batch * held, down, across]`` of lhs ``[rows, down]`` and dout ``[rows, across]``.

        sizes int32 ``[groups]``, of several calls ``[batch * (groups + 1)]``, with the rows that
        the groups of each leave; offset ``[1]`` or ``[batch]``.
        """
        inputs = {"lhs": lhs, "dout": dout, "sizes": sizes}
        if offset is not None:
            inputs["offset"] = offset

        def body(*refs: Any, **scratch: Any) -> None:
            r = SimpleNamespace(**dict(zip((*inputs, "out"), refs, strict=True)), **scratch)
            r.counter = pl.get_global(plgpu.SemaphoreType.REGULAR)
            wg = lax.axis_index("wg")
            pl.when(wg == CONSUMERS)(lambda: self.copy(r))
            pl.when(wg < CONSUMERS)(lambda: self.add(r))

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

"""The mainloop of the forward kernel: the loop of a consumer over the key blocks of its tiles.

A step issues the matmul of q with the next key block and the matmul of p with the values of the
current one, then does the softmax of the next block while the second matmul runs. The loop goes on
across tiles: the first matmul of the next tile is issued with the last of this one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.eight_bit import to_8_bit
from ejkernel.kernels.pallas.gpu.common.registers import LAYOUT, read
from ejkernel.kernels.pallas.gpu.common.rows import scale_rows
from ejkernel.kernels.pallas.gpu.flash_attention.forward_softmax import (
    F32,
    ROWS,
    block_scalars,
    softmax,
    start,
)
from ejkernel.kernels.pallas.gpu.flash_attention.tile_scheduler import NextTile


class Counts(NamedTuple):
    """Tiles and key blocks that a program has begun: they number its buffers."""

    tiles: Any
    blocks: Any


FROM_START = Counts(0, 0)


class Step(NamedTuple):
    """State that a consumer carries from one step of the mainloop to the next.

    The step accumulates the values of block j, whose probabilities are known, and computes the
    probabilities of the block after it.

    Attributes:
        i: number of the tile in its program.
        ahead: the next tile.
        tile: the tile.
        j: key block of the tile; over lists, the step in its list (``ListLoader.key_block``).
        n: number of the key block in its program.
        q_regs: the columns of q that are kept in registers, or None.
        p: probabilities of the block.
        state: maximum and sum of each row (``softmax``).
    """

    i: Any
    ahead: NextTile
    tile: Any
    j: Any
    n: Any
    q_regs: Any
    p: Any
    state: tuple


class TileLoop:
    """The mainloop of a consumer: all tiles of its program, 64 rows in this warpgroup."""

    def __init__(self, kernel: Any, r: Any, start_at: Counts) -> None:
        self.kernel, self.r, self.start_at = kernel, r, start_at
        self.rows = pl.ds(lax.axis_index("wg") * ROWS, ROWS)

    def run(self) -> Counts:
        """Computes the tiles; returns what the program has loaded at the end."""
        return pl.run_scoped(
            self.accumulate, plgpu.ACC((ROWS, self.kernel.form.problem.value_dim), F32)
        )

    def accumulate(self, o_acc: Any) -> Counts:
        """Computes the tiles with the accumulator of the outputs."""
        r, form = self.r, self.kernel.form

        def has_work(step: Step) -> Any:
            return (step.ahead.number >= 0) | (step.j > step.tile.start)

        last = lax.while_loop(has_work, lambda step: self.step(step, o_acc), self.first_step())
        slot = lax.rem(last.n, form.tiles.stages)
        plgpu.wgmma(o_acc, last.p, self.values(slot))
        self.finish_tile(last, o_acc[...])
        plgpu.wait_smem_to_gmem(0)
        if form.unshifted:  # the buffer is used again if a tile is
            plgpu.barrier_arrive(r.v_empty.at[slot])
        if form.tiles.cluster > 1:  # no program exits while another may still signal to it
            plgpu.barrier_arrive(r.done.at[0])
            plgpu.barrier_wait(r.done.at[0])
        return Counts(last.i + 1, last.n + 1)

    def first_step(self) -> Step:
        """Computes the probabilities of the first tile's first block."""
        r, kernel = self.r, self.kernel
        form, scheduler, t = kernel.form, kernel.scheduler, kernel.form.tiles
        tile = scheduler.tile(r, scheduler.first_tile(r))
        j = tile.stop - 1
        i, n = (jnp.int32(x) for x in self.start_at)
        q_slot, slot = lax.rem(i, t.q_stages), lax.rem(n, t.stages)
        plgpu.barrier_wait(r.q_full.at[q_slot])
        plgpu.barrier_wait(r.k_full.at[slot])
        q_regs = self.load_q(i)

        def multiply(s_acc: Any) -> jax.Array:
            self.multiply_keys(s_acc, q_regs, i, n)
            return s_acc[...]

        s = pl.run_scoped(multiply, plgpu.ACC((ROWS, t.block_kv), F32))
        plgpu.barrier_arrive(r.k_empty.at[slot])
        pl.when(j == tile.start)(lambda: plgpu.barrier_arrive(r.q_empty.at[q_slot]))
        scalars = block_scalars(form, r, tile, j)
        p, state, _ = softmax(kernel, r, s, tile, j, scalars, start(form))
        plgpu.barrier_wait(r.v_full.at[slot])
        kernel.loader.prepare_values(r, tile, j, slot)
        second = jnp.int32(1)
        if scheduler.prefetches_late:
            read_next = lambda: scheduler.read_ahead(r, second)  # noqa: E731
            # unused: this tile has more steps, and its last one reads ahead
            ahead = lax.cond(j == tile.start, read_next, lambda: NextTile(second - 1))
        else:
            ahead = scheduler.read_ahead(r, second)
        return Step(i, ahead, tile, j, n, q_regs, self.convert(p), state)

    def step(self, now: Step, o_acc: Any) -> Step:
        """Accumulates the values of a block under the softmax of the next one."""
        r, kernel = self.r, self.kernel
        form, scheduler, t = kernel.form, kernel.scheduler, kernel.form.tiles
        slot, next_slot = lax.rem(now.n, t.stages), lax.rem(now.n + 1, t.stages)
        ends_tile = now.j == now.tile.start  # the next block is the next tile's first
        i = now.i + ends_tile.astype(jnp.int32)

        def read_after_next() -> NextTile:
            return scheduler.read_ahead(r, now.i + 2 - self.start_at.tiles, now.ahead.following)

        ahead = None  # read under the matmuls
        if form.read or scheduler.prefetches_late:
            tile = lax.cond(ends_tile, lambda: scheduler.tile_of(r, now.ahead), lambda: now.tile)
        else:
            tile, ahead = lax.cond(
                ends_tile,
                lambda: (scheduler.tile_of(r, now.ahead), read_after_next()),
                lambda: (now.tile, now.ahead),
            )
        j = jnp.where(ends_tile, tile.stop - 1, now.j - 1)
        scalars = block_scalars(form, r, tile, j)
        q_slot = lax.rem(i, t.q_stages)
        pl.when(ends_tile)(lambda: plgpu.barrier_wait(r.q_full.at[q_slot]))
        q_regs = lax.cond(ends_tile, lambda: self.load_q(i), lambda: now.q_regs)
        plgpu.barrier_wait(r.k_full.at[next_slot])

        def prefetch_tile() -> NextTile:
            if ahead is not None:
                return ahead
            if not scheduler.prefetches_late:
                return lax.cond(ends_tile, read_after_next, lambda: now.ahead)
            return lax.cond(
                j == tile.start,
                lambda: scheduler.read_ahead(r, i + 1 - self.start_at.tiles),
                lambda: now.ahead,
            )

        def overlap(s_acc: Any) -> tuple[Any, jax.Array, tuple]:
            """Returns the next tile, and probabilities and row state of the next block."""
            self.multiply_keys(s_acc, q_regs, i, now.n + 1)
            plgpu.wgmma(o_acc, now.p, self.values(slot))
            following = prefetch_tile()  # reads here overlap the matmuls
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
            plgpu.barrier_arrive(r.k_empty.at[next_slot])
            is_last = j == tile.start
            pl.when(is_last)(lambda: plgpu.barrier_arrive(r.q_empty.at[q_slot]))
            before = lax.cond(ends_tile, lambda: start(form), lambda: now.state)
            p, state, alpha = softmax(kernel, r, s, tile, j, scalars, before)
            # this wait ends the basic block: the exponentials stay before the next wait
            plgpu.barrier_wait(r.v_full.at[next_slot])
            o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
            plgpu.barrier_arrive(r.v_empty.at[slot])

            def finish() -> jax.Array:
                self.finish_tile(now, o)
                return jnp.zeros_like(o)

            o_acc[...] = lax.cond(ends_tile, finish, lambda: self.rescale(o, alpha))
            kernel.loader.prepare_values(r, tile, j, next_slot)
            return following, self.convert(p), state

        following, p, state = pl.run_scoped(overlap, plgpu.ACC((ROWS, t.block_kv), F32))
        return Step(i, following, tile, j, now.n + 1, q_regs, p, state)

    def load_q(self, i: Any) -> Any:
        """Loads the columns of tile i's queries that are kept in registers."""
        t = self.kernel.form.tiles
        if not t.q_held:
            return None
        slot = lax.rem(i, t.q_stages)
        return read(self.r.q_smem.at[slot, self.rows, pl.ds(0, t.q_held)], LAYOUT)

    def multiply_keys(self, s_acc: Any, q_regs: Any, i: Any, n: Any) -> None:
        """Starts the matmuls of the queries of tile i with key block n of the program."""
        t, dim = self.kernel.form.tiles, self.kernel.form.problem.dim
        q, k = self.r.q_smem.at[lax.rem(i, t.q_stages)], self.r.k_smem.at[lax.rem(n, t.stages)]
        if t.q_held:
            plgpu.wgmma(s_acc, q_regs, k.at[:, pl.ds(0, t.q_held)].T)
        if t.q_held < dim:
            others = pl.ds(t.q_held, dim - t.q_held)
            plgpu.wgmma(s_acc, q.at[self.rows, others], k.at[:, others].T)

    def values(self, slot: Any) -> Any:
        """Returns a value block as the right operand of a matmul."""
        v = self.r.v_smem.at[slot]
        return v.T if self.kernel.form.eight_bit else v

    def convert(self, p: jax.Array) -> jax.Array:
        """Returns probabilities in the dtype of the values."""
        form = self.kernel.form
        return to_8_bit(p) if form.eight_bit else p.astype(form.problem.dtype)

    def rescale(self, o: jax.Array, alpha: jax.Array | None) -> jax.Array:
        """Returns accumulators times the factors of their rows; None: all 1."""
        if alpha is None:
            return o
        if self.kernel.form.tiles.slack:
            return scale_rows(o, alpha)
        return o * lax.broadcast_in_dim(alpha, o.shape, [0])

    def finish_tile(self, last: Step, o: jax.Array) -> None:
        """Stores a tile after its last step; flags it where it has to be computed again."""
        wrong_rows = self.kernel.epilogue.finish(self.r, last.tile, o, last.state)
        if wrong_rows is not None:
            self.kernel.scheduler.flag(self.r, last.i, wrong_rows)

"""dk and dv over lists: programs that stay, and take key block after key block, as those of dq do.

Keys and values have two places in shared memory: those of the next block are copied while this one
is walked, and results leave from the place of their operands. A walk is over all heads that share
the keys. Where walks then are too few, a program has a part of the heads, and the sums of all are
added after: turns would be waited for, since programs take walks before they can begin them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.masks import row_of
from ejkernel.kernels.pallas.gpu.common.registers import COLUMN, read, spread
from ejkernel.kernels.pallas.gpu.common.rows import store_tile
from ejkernel.kernels.pallas.gpu.common.tma import padded_rows, tiled
from ejkernel.kernels.pallas.gpu.common.warps import for_one_warp, read_thread
from ejkernel.kernels.pallas.gpu.flash_attention.backward_kernel import logits
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import Plan
from ejkernel.kernels.pallas.gpu.flash_attention.backward_walk import (
    CONSUMERS,
    ROWS,
    copy_step,
    launch,
    next_place,
    walk_visits,
)

PLACES = 2  # of keys and values


def parts_of(plan: Plan) -> int:
    """Programs that share the heads of a key block, as few as leave two walks a program."""
    walks = plan.problem.batch * plan.problem.kv_heads * plan.n_kv
    parts = [n for n in range(1, plan.problem.group + 1) if plan.problem.group % n == 0]
    return next((n for n in parts if walks * n >= 2 * plan.cores), parts[-1])


class Program:
    """The key block at a place of (batch, key head, block, part of the heads), and its walk."""

    def __init__(self, plan: Plan, r: Any, place: Any) -> None:
        problem, parts = plan.problem, parts_of(plan)
        self.table, self.heads = r.lists, problem.group // parts
        self.part, place = lax.rem(place, parts), lax.div(place, parts)
        row, self.block = lax.div(place, plan.n_kv), lax.rem(place, plan.n_kv)
        self.kv_head, self.batch = lax.rem(row, problem.kv_heads), lax.div(row, problem.kv_heads)
        self.first = self.kv_head * problem.group + self.part * self.heads

    def walk(self, of_head: Callable[[Any], Callable[..., None]]) -> Any:
        """As ``walk_visits``, with the step that ``of_head`` gives for each head."""

        def one_head(n: Any, before: Any) -> Any:
            h = self.first + n
            step = of_head(h)
            at = (*row_of(self.table, self.batch, h), self.block)
            onwards = lambda i, t, masked: step(i, before + t, masked)  # noqa: E731
            return before + walk_visits(self.table, at, onwards)

        if self.heads == 1:
            return one_head(0, 0)
        return lax.fori_loop(0, self.heads, one_head, jnp.int32(0))


def queue_key_gradients(plan: Plan, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """(dk, dv) of what ``fused`` takes, with lists, bits and an order in place of ranges."""
    problem, tiles = plan.problem, plan.tiles
    dtype, dim, value_dim = jnp.dtype(problem.dtype), problem.dim, problem.value_dim
    block_q, block_kv, stages = tiles.block_q, tiles.block_kv, tiles.stages
    parts = parts_of(plan)
    count = problem.batch * problem.kv_heads * plan.n_kv * parts
    shape = (ROWS, block_q)

    def with_rows(r: Any) -> Any:
        """The rows' numbers by name: they share one piece of memory, with numbers of places.

        Those are float32 there, exact up to 2^24: the keys of so many blocks would fit no card.
        """
        named = {
            "lse_s": r.rows_s.at[pl.ds(0, stages)],
            "delta_s": r.rows_s.at[pl.ds(stages, stages)],
        }
        return SimpleNamespace(**vars(r), **named)

    def consume(r: Any, _: None, wg: Any) -> None:
        r = with_rows(r)
        rows = pl.ds(wg * ROWS, ROWS)

        def arrived(number: Any) -> Any:
            kv = lax.rem(number, PLACES)
            plgpu.barrier_wait(r.kv_full.at[kv])
            return r.rows_s[2 * stages, kv].astype(jnp.int32)

        def one_block(carry: Any) -> Any:
            place, number, before = carry
            program = Program(plan, r, place)
            b, j = program.batch, program.block
            kv = lax.rem(number, PLACES)
            first_row = j * block_kv + wg * ROWS

            def give_back() -> None:
                """The place of the block before, from which its results have left by now."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(r.kv_empty.at[1 - kv])

            def accumulate(dk_acc: Any, dv_acc: Any) -> tuple[jax.Array, jax.Array, Any]:
                def of_head(h: Any) -> Callable[..., None]:
                    large = plan.lse_in_sum and r.large[b, h] != 0
                    return functools.partial(step, h, large)

                def step(h: Any, large: Any, i: Any, t: Any, masked: Any) -> None:
                    n = before + t
                    slot = lax.rem(n, stages)
                    mine = pl.ds(lax.div(read_thread(), 128) * ROWS, ROWS)

                    def products(s_acc: Any, dp_acc: Any) -> None:
                        plgpu.barrier_wait(r.q_full.at[slot])
                        plgpu.barrier_wait(r.do_full.at[slot])
                        if plan.lse_in_sum:
                            s_acc[...] = spread(read(r.lse_s.at[slot], COLUMN), shape, 1)
                        dp_acc[...] = spread(read(r.delta_s.at[slot], COLUMN), shape, 1)
                        plgpu.wgmma(s_acc, r.k_s.at[kv, mine], r.q_s.at[slot].T)
                        plgpu.wgmma(dp_acc, r.v_s.at[kv, mine], r.do_s.at[slot].T)
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

                        @pl.when(n > 0)  # dk and dv of the step before are done with its tiles
                        def _() -> None:
                            last = lax.rem(n + stages - 1, stages)
                            plgpu.barrier_arrive(r.q_empty.at[last])
                            plgpu.barrier_arrive(r.do_empty.at[last])

                        pl.when((t == 0) & (number > 0))(give_back)
                        x, tanh = logits(plan, r, (b, h), j, first_row, large, s, i, masked)
                        if not plan.lse_in_sum:
                            x = x + spread(read(r.lse_s.at[slot], COLUMN), shape, 1)
                        p = jnp.exp2(x)
                        plgpu.wgmma(dv_acc, p.astype(dtype), r.do_s.at[slot])
                        ds = p * plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                        if tanh is not None:
                            ds = ds * (1.0 - tanh * tanh)
                        plgpu.wgmma(dk_acc, ds.astype(dtype), r.q_s.at[slot])

                    pl.run_scoped(products, plgpu.ACC(shape), plgpu.ACC(shape))

                steps = program.walk(of_head)
                plgpu.wgmma_wait(0)
                return dk_acc[...], dv_acc[...], steps

            dk, dv, steps = pl.run_scoped(
                accumulate, plgpu.ACC((ROWS, dim)), plgpu.ACC((ROWS, value_dim))
            )
            sums = ((dk * problem.scale, r.k_s, r.dk), (dv, r.v_s, r.dv))
            out = (b, pl.ds(first_row, ROWS), program.kv_head)
            pl.when((steps == 0) & (number > 0))(give_back)
            if parts > 1:
                for total, _, ref in sums:
                    store_tile(ref.at[program.part, *out], total)
            else:
                for total, staged, _ in sums:  # only this warpgroup read these rows
                    staged.at[kv, rows][...] = total.astype(dtype)
                plgpu.commit_smem()
                for _, staged, ref in sums:
                    plgpu.copy_smem_to_gmem(staged.at[kv, rows], ref.at[out])
            return arrived(number + 1), number + 1, before + steps

        zero = jnp.int32(0)
        lax.while_loop(lambda carry: carry[0] >= 0, one_block, (arrived(zero), zero, zero))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def produce(r: Any, counter: Any) -> None:
        r = with_rows(r)

        def place_of(n: Any) -> Any:
            return r.order[0, lax.div(n, parts)] * parts + lax.rem(n, parts)

        def announce(place: Any, number: Any) -> Any:
            kv = lax.rem(number, PLACES)
            pl.when(number >= PLACES)(lambda: plgpu.barrier_wait(r.kv_empty.at[kv]))
            r.rows_s[2 * stages, kv] = place.astype(jnp.float32)
            return kv

        def one_block(carry: Any) -> Any:
            place, number, before = carry
            program = Program(plan, r, place)
            kv = announce(place, number)
            at = (program.batch, pl.ds(program.block * block_kv, block_kv), program.kv_head)
            plgpu.copy_gmem_to_smem(r.k.at[at], r.k_s.at[kv], r.kv_full.at[kv])
            plgpu.copy_gmem_to_smem(r.v.at[at], r.v_s.at[kv], r.kv_full.at[kv])

            def of_head(h: Any) -> Callable[..., None]:
                def step(i: Any, t: Any, masked: Any) -> None:
                    del masked
                    copy_step(r, program.batch, h, i, before + t, block_q, stages)

                return step

            steps = program.walk(of_head)
            return next_place(counter, count, place_of), number + 1, before + steps

        zero = jnp.int32(0)
        start = (next_place(counter, count, place_of), zero, zero)
        _, number, _ = lax.while_loop(lambda carry: carry[0] >= 0, one_block, start)
        kv = announce(jnp.int32(-1), number)
        for _ in range(2):
            plgpu.barrier_arrive(r.kv_full.at[kv])

    def move(r: Any, _: None, wg: Any) -> None:
        counter = pl.get_global(plgpu.SemaphoreType.REGULAR)
        for_one_warp(lambda: produce(r, counter))

    barrier = plgpu.Barrier
    scratch = {
        "k_s": tiled((PLACES, block_kv, dim), dtype),
        "v_s": tiled((PLACES, block_kv, value_dim), dtype),
        "q_s": tiled((stages, block_q, dim), dtype),
        "do_s": tiled((stages, block_q, value_dim), dtype),
        "rows_s": plgpu.SMEM((2 * stages + 1, block_q), jnp.float32),
        "kv_full": barrier(num_arrivals=2, num_barriers=PLACES),
        "kv_empty": barrier(num_arrivals=CONSUMERS, num_barriers=PLACES),
        "q_full": barrier(num_arrivals=2, num_barriers=stages),  # q and lse
        "do_full": barrier(num_arrivals=2, num_barriers=stages),  # do and delta
        "q_empty": barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        "do_empty": barrier(num_arrivals=CONSUMERS, num_barriers=stages),
    }
    rows = plan.n_kv * block_kv if parts > 1 else padded_rows(problem.kv_len)
    lead, kind = ((parts,), jnp.float32) if parts > 1 else ((), dtype)
    kv_shape = (*lead, problem.batch, rows, problem.kv_heads)
    outputs = {
        "dk": jax.ShapeDtypeStruct((*kv_shape, dim), kind),
        "dv": jax.ShapeDtypeStruct((*kv_shape, value_dim), kind),
    }
    programs, name = min(plan.cores, count), "flash_attention_backward_dkv"
    sums = launch(name, programs, lambda r: None, [consume], move, operands, outputs, scratch)
    return tuple(x.sum(0) for x in sums) if parts > 1 else sums

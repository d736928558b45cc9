"""dk and dv over lists: a persistent kernel that takes key blocks from a work counter, like dq.

Keys and values are double-buffered in shared memory: the next block is copied while this one is
processed, and results are stored from the buffers of their operands. A work unit covers all heads
that share the keys. With too few units each has a part of the heads, and XLA adds the partial
results: adding in a fixed order would stall, since programs take units before they begin them.
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
from ejkernel.kernels.pallas.gpu.flash_attention.backward_common import (
    CONSUMERS,
    ROWS,
    copy_step,
    for_each_visit,
    launch_backward,
    next_unit,
)
from ejkernel.kernels.pallas.gpu.flash_attention.backward_kernel import logits
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import Plan

KV_BUFFERS = 2  # of keys and values


def parts_of(plan: Plan) -> int:
    """Returns the parts of the heads of a key block: the fewest with two units per program."""
    units = plan.problem.batch * plan.problem.kv_heads * plan.n_kv
    parts = [n for n in range(1, plan.problem.group + 1) if plan.problem.group % n == 0]
    return next((n for n in parts if units * n >= 2 * plan.cores), parts[-1])


class Program:
    """Work unit (batch, key head, block, part of the heads) and the query blocks it visits."""

    def __init__(self, plan: Plan, r: Any, unit: Any) -> None:
        problem, parts = plan.problem, parts_of(plan)
        self.table, self.heads = r.lists, problem.group // parts
        self.part, unit = lax.rem(unit, parts), lax.div(unit, parts)
        row, self.block = lax.div(unit, plan.n_kv), lax.rem(unit, plan.n_kv)
        self.kv_head, self.batch = lax.rem(row, problem.kv_heads), lax.div(row, problem.kv_heads)
        self.first = self.kv_head * problem.group + self.part * self.heads

    def for_each_block(self, of_head: Callable[[Any], Callable[..., None]]) -> Any:
        """Runs ``for_each_visit`` for every head, with the step ``of_head(head)``."""

        def one_head(n: Any, before: Any) -> Any:
            h = self.first + n
            step = of_head(h)
            at = (*row_of(self.table, self.batch, h), self.block)
            onwards = lambda i, t, masked: step(i, before + t, masked)  # noqa: E731
            return before + for_each_visit(self.table, at, onwards)

        if self.heads == 1:
            return one_head(0, 0)
        return lax.fori_loop(0, self.heads, one_head, jnp.int32(0))


def queue_key_gradients(plan: Plan, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Returns (dk, dv) for operands of ``FusedKernel`` with lists, bits and order for ranges."""
    problem, tiles = plan.problem, plan.tiles
    dtype, dim, value_dim = jnp.dtype(problem.dtype), problem.dim, problem.value_dim
    block_q, block_kv, stages = tiles.block_q, tiles.block_kv, tiles.stages
    parts = parts_of(plan)
    count = problem.batch * problem.kv_heads * plan.n_kv * parts
    shape = (ROWS, block_q)

    def with_rows(r: Any) -> Any:
        """Returns references with the row values by name; they share memory with unit indices.

        Indices are float32 there, exact up to 2^24: keys of more blocks would fit no GPU.
        """
        named = {
            "neg_lse_smem": r.rows_smem.at[pl.ds(0, stages)],
            "neg_delta_smem": r.rows_smem.at[pl.ds(stages, stages)],
        }
        return SimpleNamespace(**vars(r), **named)

    def consume(r: Any, _: None, wg: Any) -> None:
        r = with_rows(r)
        rows = pl.ds(wg * ROWS, ROWS)

        def arrived(number: Any) -> Any:
            kv = lax.rem(number, KV_BUFFERS)
            plgpu.barrier_wait(r.kv_full.at[kv])
            return r.rows_smem[2 * stages, kv].astype(jnp.int32)

        def one_block(carry: Any) -> Any:
            unit, number, before = carry
            program = Program(plan, r, unit)
            b, j = program.batch, program.block
            kv = lax.rem(number, KV_BUFFERS)
            first_row = j * block_kv + wg * ROWS

            def give_back() -> None:
                """Frees the buffers of the previous block, whose results are stored by now."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(r.kv_empty.at[1 - kv])

            def accumulate(dk_acc: Any, dv_acc: Any) -> tuple[jax.Array, jax.Array, Any]:
                def of_head(h: Any) -> Callable[..., None]:
                    large = plan.lse_in_sum and r.large[b, h] != 0
                    return functools.partial(add_block, h, large)

                def add_block(h: Any, large: Any, i: Any, t: Any, masked: Any) -> None:
                    n = before + t
                    slot = lax.rem(n, stages)
                    mine = pl.ds(lax.div(read_thread(), 128) * ROWS, ROWS)

                    def matmuls(s_acc: Any, dp_acc: Any) -> None:
                        plgpu.barrier_wait(r.q_full.at[slot])
                        plgpu.barrier_wait(r.do_full.at[slot])
                        if plan.lse_in_sum:
                            s_acc[...] = spread(read(r.neg_lse_smem.at[slot], COLUMN), shape, 1)
                        dp_acc[...] = spread(read(r.neg_delta_smem.at[slot], COLUMN), shape, 1)
                        plgpu.wgmma(s_acc, r.k_smem.at[kv, mine], r.q_smem.at[slot].T)
                        plgpu.wgmma(dp_acc, r.v_smem.at[kv, mine], r.do_smem.at[slot].T)
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

                        @pl.when(n > 0)  # dk and dv of the step before are done with its tiles
                        def _() -> None:
                            last = lax.rem(n + stages - 1, stages)
                            plgpu.barrier_arrive(r.q_empty.at[last])
                            plgpu.barrier_arrive(r.do_empty.at[last])

                        pl.when((t == 0) & (number > 0))(give_back)
                        x, tanh = logits(plan, r, (b, h), j, first_row, large, s, i, masked)
                        if not plan.lse_in_sum:
                            x = x + spread(read(r.neg_lse_smem.at[slot], COLUMN), shape, 1)
                        p = jnp.exp2(x)
                        plgpu.wgmma(dv_acc, p.astype(dtype), r.do_smem.at[slot])
                        ds = p * plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                        if tanh is not None:
                            ds = ds * (1.0 - tanh * tanh)
                        plgpu.wgmma(dk_acc, ds.astype(dtype), r.q_smem.at[slot])

                    pl.run_scoped(matmuls, plgpu.ACC(shape), plgpu.ACC(shape))

                steps = program.for_each_block(of_head)
                plgpu.wgmma_wait(0)
                return dk_acc[...], dv_acc[...], steps

            dk, dv, steps = pl.run_scoped(
                accumulate, plgpu.ACC((ROWS, dim)), plgpu.ACC((ROWS, value_dim))
            )
            results = ((dk * problem.scale, r.k_smem, r.dk), (dv, r.v_smem, r.dv))
            out = (b, pl.ds(first_row, ROWS), program.kv_head)
            pl.when((steps == 0) & (number > 0))(give_back)
            if parts > 1:
                for total, _, ref in results:
                    store_tile(ref.at[program.part, *out], total)
            else:
                for total, staged, _ in results:  # only this warpgroup read these rows
                    staged.at[kv, rows][...] = total.astype(dtype)
                plgpu.commit_smem()
                for _, staged, ref in results:
                    plgpu.copy_smem_to_gmem(staged.at[kv, rows], ref.at[out])
            return arrived(number + 1), number + 1, before + steps

        zero = jnp.int32(0)
        lax.while_loop(lambda carry: carry[0] >= 0, one_block, (arrived(zero), zero, zero))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def produce(r: Any, counter: Any) -> None:
        r = with_rows(r)

        def unit_of(n: Any) -> Any:
            return r.order[0, lax.div(n, parts)] * parts + lax.rem(n, parts)

        def announce(unit: Any, number: Any) -> Any:
            kv = lax.rem(number, KV_BUFFERS)
            pl.when(number >= KV_BUFFERS)(lambda: plgpu.barrier_wait(r.kv_empty.at[kv]))
            r.rows_smem[2 * stages, kv] = unit.astype(jnp.float32)
            return kv

        def one_block(carry: Any) -> Any:
            unit, number, before = carry
            program = Program(plan, r, unit)
            kv = announce(unit, number)
            at = (program.batch, pl.ds(program.block * block_kv, block_kv), program.kv_head)
            plgpu.copy_gmem_to_smem(r.k.at[at], r.k_smem.at[kv], r.kv_full.at[kv])
            plgpu.copy_gmem_to_smem(r.v.at[at], r.v_smem.at[kv], r.kv_full.at[kv])

            def of_head(h: Any) -> Callable[..., None]:
                def copy_block(i: Any, t: Any, masked: Any) -> None:
                    del masked
                    copy_step(r, program.batch, h, i, before + t, block_q, stages)

                return copy_block

            steps = program.for_each_block(of_head)
            return next_unit(counter, count, unit_of), number + 1, before + steps

        zero = jnp.int32(0)
        start = (next_unit(counter, count, unit_of), zero, zero)
        _, number, _ = lax.while_loop(lambda carry: carry[0] >= 0, one_block, start)
        kv = announce(jnp.int32(-1), number)
        for _ in range(2):
            plgpu.barrier_arrive(r.kv_full.at[kv])

    def move(r: Any, _: None, wg: Any) -> None:
        counter = pl.get_global(plgpu.SemaphoreType.REGULAR)
        for_one_warp(lambda: produce(r, counter))

    barrier = plgpu.Barrier
    scratch = {
        "k_smem": tiled((KV_BUFFERS, block_kv, dim), dtype),
        "v_smem": tiled((KV_BUFFERS, block_kv, value_dim), dtype),
        "q_smem": tiled((stages, block_q, dim), dtype),
        "do_smem": tiled((stages, block_q, value_dim), dtype),
        "rows_smem": plgpu.SMEM((2 * stages + 1, block_q), jnp.float32),
        "kv_full": barrier(num_arrivals=2, num_barriers=KV_BUFFERS),
        "kv_empty": barrier(num_arrivals=CONSUMERS, num_barriers=KV_BUFFERS),
        "q_full": barrier(num_arrivals=2, num_barriers=stages),  # q and neg_lse
        "do_full": barrier(num_arrivals=2, num_barriers=stages),  # do and neg_delta
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
    results = launch_backward(
        name, programs, lambda r: None, [consume], move, operands, outputs, scratch
    )
    return tuple(x.sum(0) for x in results) if parts > 1 else results

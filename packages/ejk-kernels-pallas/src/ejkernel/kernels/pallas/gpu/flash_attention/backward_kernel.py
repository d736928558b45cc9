"""The fused backward kernel: dq, dk and dv in one loop over the tiles, five matmuls a tile.

Over lists dq, and dk with dv, have separate kernels: key blocks reach a query block in no fixed
order there, and programs would wait to add to dq in order (measured: 0.96 ms for 0.57 ms of work).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.masks import row_of
from ejkernel.kernels.pallas.gpu.common.registers import COLUMN, read, spread
from ejkernel.kernels.pallas.gpu.common.tma import padded_rows, tiled
from ejkernel.kernels.pallas.gpu.common.warps import for_each_warp, read_thread
from ejkernel.kernels.pallas.gpu.flash_attention.backward_common import (
    CONSUMERS,
    ROWS,
    WRITERS,
    copy_step,
    dq_operands,
    hand_over,
    launch_backward,
    logits,
    wait_for_parts,
)
from ejkernel.kernels.pallas.gpu.flash_attention.backward_pipelined import add_ahead, copy_ahead
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import Plan


class Program:
    """Work of one program; its warps loop over the same tiles in the same order."""

    def __init__(self, plan: Plan, r: Any) -> None:
        problem = plan.problem
        self.plan, self.r = plan, r
        n_turns = plan.n_q + (plan.n_kv if plan.shares_keys else 0)
        turns = plgpu.SemaphoreType.REGULAR((problem.batch, problem.heads, n_turns))
        self.turns = pl.get_global(turns)
        row, self.block, self.descending = plan.locate(lax.axis_index("item"))
        self.head, self.batch = lax.rem(row, problem.heads), lax.div(row, problem.heads)
        self.kv_head = lax.div(self.head, problem.group)
        self.sharer = lax.rem(self.head, problem.group)  # of the heads that share k and v
        if plan.circular:
            self.team = lax.div(self.block, plan.team)
            self.member = lax.rem(self.block, plan.team)

    def blocks(self) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
        """(number of steps, function from a step to its query block and whether it has a mask)."""
        plan = self.plan
        if plan.circular:

            def circular_at(t: Any) -> tuple[Any, Any]:
                i = self.member * plan.stride + t
                return lax.select(i >= plan.n_q, i - plan.n_q, i), False

            return plan.n_q, circular_at
        table = self.r.ranges
        at = (*row_of(table, self.batch, self.head), self.block)
        start, full_start, full_stop, stop = (table[*at, c] for c in range(4))
        length = lax.max(stop - start, 0)

        def block_at(t: Any) -> tuple[Any, Any]:
            i = start + t
            if plan.descending:
                i = lax.select(self.descending, stop - 1 - t, i)
            return i, (i < full_start) | (i >= full_stop)

        return length, block_at

    def for_each_block(self, step: Callable[..., None], first: int = 0, every: int = 1) -> Any:
        """``step(query block, count of steps before, whether a mask is needed)``; their number.

        Step ``first`` and each ``every``-th after it; the number is of all.
        """
        length, block_at = self.blocks()

        def one_block(t: Any, carry: None) -> None:
            n = first + every * t
            i, masked = block_at(n)
            step(i, n, masked)
            return carry

        lax.fori_loop(0, lax.div(length - first + every - 1, every), one_block, None)
        return length

    def turn(self, i: Any) -> Any:
        """Returns the number of key blocks that add to query block i before this one."""
        plan = self.plan
        if not plan.circular:
            row = row_of(self.r.visitors, self.batch, self.head)
            if not plan.descending:
                return self.r.visitors[*row, 0, i] - self.block
            visitor = self.r.visitors[*row, self.descending.astype(jnp.int32), i]
            return lax.select(self.descending, self.block - visitor, visitor - self.block)
        size = lax.min(plan.n_kv - self.team * plan.team, plan.team)
        # the last of the team that begins at this block or before
        last = lax.div(i, plan.stride)
        first_round = lax.min(last, size - 1) - self.member
        rank = lax.select(self.member <= last, first_round, size + last - self.member)
        return self.team * plan.team + rank


def fused(plan: Plan, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Returns (dq, dk, dv) of q, k, v, do, neg_lse, neg_delta, tables and ids.

    Tables are ``ranges`` and ``visitors`` of ``visit_tables``. -lse and -delta are float32
    ``[batch, heads, whole q blocks]``, negated so that accumulators can start from them, and -inf
    in rows that see nothing and rows past the end. -lse counts in ``units`` where accumulators
    start from it (``plan.lse_in_sum``), otherwise in base 2. Then two operands more: ``large``,
    int32 ``[batch, heads]``, and ``late``, the -lse that is added later where ``large`` is not 0.
    Ids are padded to whole blocks, other lengths to eight rows, of dk and dv too. dq is float32
    ``[batch, whole q blocks, heads, dim]``, not scaled, unwritten where no key block visits; dk and
    dv are float32 too where heads share k and v.
    """
    problem, tiles = plan.problem, plan.tiles
    dtype = jnp.dtype(problem.dtype)
    block_q, block_kv, stages = tiles.block_q, tiles.block_kv, tiles.stages
    dim, value_dim = problem.dim, problem.value_dim
    shape = (ROWS, block_q)
    by_rows, dq_columns = plan.dq_by_rows, plan.dq_columns

    def consume(r: Any, program: Program, wg: Any) -> None:
        b, h, j = program.batch, program.head, program.block
        plgpu.barrier_wait(r.kv_full)
        rows = pl.ds(wg * ROWS, ROWS)
        first_row = j * block_kv + wg * ROWS
        large = plan.lse_in_sum and r.large[b, h] != 0

        def accumulate(dk_acc: Any, dv_acc: Any) -> tuple[jax.Array, jax.Array]:
            if tiles.pipelined:
                add_ahead(plan, r, program, wg, large, dk_acc, dv_acc)
                return dk_acc[...], dv_acc[...]

            def add_block(i: Any, n: Any, masked: Any) -> None:
                slot, ds_slot = lax.rem(n, stages), lax.rem(n, 2)
                thread = read_thread()
                warpgroup = lax.div(thread, 128)
                mine = pl.ds(warpgroup * ROWS, ROWS)

                def key_side(s_acc: Any, dp_acc: Any) -> None:
                    plgpu.barrier_wait(r.q_full.at[slot])
                    plgpu.barrier_wait(r.do_full.at[slot])
                    if plan.lse_in_sum:
                        neg_lse = read(r.neg_lse_smem.at[slot], COLUMN)
                        s_acc[...] = spread(neg_lse, shape, 1)
                    neg_delta = read(r.neg_delta_smem.at[slot], COLUMN)
                    dp_acc[...] = spread(neg_delta, shape, 1)
                    plgpu.wgmma(s_acc, r.k_smem.at[mine], r.q_smem.at[slot].T)
                    plgpu.wgmma(dp_acc, r.v_smem.at[mine], r.do_smem.at[slot].T)
                    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                    x, tanh = logits(plan, r, (b, h), j, first_row, large, s, i, masked)
                    if not plan.lse_in_sum:
                        neg_lse = read(r.neg_lse_smem.at[slot], COLUMN)
                        x = x + spread(neg_lse, shape, 1)
                    p = jnp.exp2(x)
                    plgpu.wgmma(dv_acc, p.astype(dtype), r.do_smem.at[slot])
                    ds = p * plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                    if tanh is not None:
                        ds = ds * (1.0 - tanh * tanh)
                    ds = ds.astype(dtype)
                    # the other slot may still be read for the dq of the step before
                    r.ds_smem.at[ds_slot, rows][...] = ds
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(r.ds_full)
                    plgpu.wgmma(dk_acc, ds, r.q_smem.at[slot])
                    plgpu.barrier_wait(r.ds_full)

                pl.run_scoped(key_side, plgpu.ACC(shape), plgpu.ACC(shape))

                def query_side(dq_acc: Any) -> None:
                    plgpu.wgmma(dq_acc, *dq_operands(plan, r, ds_slot, thread, warpgroup, mine))
                    part = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
                    plgpu.barrier_arrive(r.q_empty.at[slot])
                    plgpu.barrier_arrive(r.do_empty.at[slot])
                    hand_over(plan, r, wg, n, part)

                pl.run_scoped(query_side, plgpu.ACC((ROWS, dq_columns)))

            steps = program.for_each_block(add_block)
            plgpu.wgmma_wait(0)
            if plan.shares_keys:  # whose parts go through the same memory
                wait_for_parts(plan, r, steps)
            return dk_acc[...], dv_acc[...]

        dk_sum, dv_sum = pl.run_scoped(
            accumulate, plgpu.ACC((ROWS, dim)), plgpu.ACC((ROWS, value_dim))
        )
        results = ((dk_sum * problem.scale, r.k_smem, r.dk), (dv_sum, r.v_smem, r.dv))
        out = (b, pl.ds(first_row, ROWS), program.kv_head)

        def add() -> None:
            """Adds this head's part to dk and dv, in the order of the heads that share them."""
            mine = program.turns.at[b, program.kv_head * problem.group, plan.n_q + j]
            before = CONSUMERS * program.sharer
            plgpu.semaphore_wait(mine, before, decrement=False, memory_scope="gpu")
            for total, _, ref in results:
                for c in range(0, total.shape[1], dq_columns):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    r.dq_smem.at[wg][...] = total[:, c : c + dq_columns]
                    plgpu.commit_smem()
                    part = ref.at[*out, pl.ds(c, dq_columns)]
                    send = functools.partial(plgpu.copy_smem_to_gmem, r.dq_smem.at[wg], part)
                    pl.when(before == 0)(send)
                    pl.when(before > 0)(functools.partial(send, reduction_op="add"))
            plgpu.wait_smem_to_gmem(0)
            plgpu.semaphore_signal(mine, 1, memory_scope="gpu")

        def write_final() -> None:
            # both warpgroups read all of k for dq: its buffer is free when both are done
            plgpu.barrier_arrive(r.done)
            plgpu.barrier_wait(r.done)
            for total, staged, _ in results:
                staged.at[rows][...] = total.astype(dtype)
            plgpu.commit_smem()
            for _, staged, ref in results:
                plgpu.copy_smem_to_gmem(staged.at[rows], ref.at[out])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        add() if plan.shares_keys else write_final()

    def produce(r: Any, program: Program) -> None:
        b, h = program.batch, program.head
        at = (b, pl.ds(program.block * block_kv, block_kv), program.kv_head)
        plgpu.copy_gmem_to_smem(r.k.at[at], r.k_smem, r.kv_full)
        plgpu.copy_gmem_to_smem(r.v.at[at], r.v_smem, r.kv_full)

        def copy_block(i: Any, n: Any, masked: Any) -> None:
            del masked
            if tiles.pipelined:
                copy_ahead(plan, r, b, h, i, n)
            else:
                copy_step(r, b, h, i, n, block_q, stages)

        program.for_each_block(copy_block)

    def write(r: Any, program: Program, writer: int) -> None:
        """Adds the parts of dq of every step to global memory, of every second in each warp.

        A part is added, and the next program told, about a step after it was handed over: one warp
        would keep the consumers waiting.
        """
        b, h = program.batch, program.head

        def write_block(i: Any, n: Any, masked: Any) -> None:
            del masked
            turn, turns = program.turn(i), program.turns.at[b, h, i]
            slot = lax.rem(n, tiles.dq_stages)

            def part(c: int) -> Any:
                if by_rows:
                    return r.dq.at[b, pl.ds(i * block_q + c * ROWS, ROWS), h]
                return r.dq.at[b, pl.ds(i * block_q, ROWS), h, pl.ds(c * dq_columns, dq_columns)]

            def send(**options: Any) -> None:
                for c in range(CONSUMERS):
                    options["commit_group"] = c == CONSUMERS - 1
                    plgpu.copy_smem_to_gmem(r.dq_smem.at[slot * CONSUMERS + c], part(c), **options)

            plgpu.barrier_wait(r.dq_full.at[writer])
            plgpu.semaphore_wait(turns, turn, decrement=False, memory_scope="gpu")
            pl.when(turn == 0)(send)
            pl.when(turn > 0)(functools.partial(send, reduction_op="add"))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(r.dq_empty.at[slot])
            plgpu.wait_smem_to_gmem(0)
            plgpu.semaphore_signal(turns, 1, memory_scope="gpu")

        program.for_each_block(write_block, writer, WRITERS)

    def move(r: Any, program: Program, wg: Any) -> None:
        del wg

        def warp(index: Any) -> None:
            pl.when(index == 0)(lambda: produce(r, program))
            for writer in range(WRITERS):
                pl.when(index == 1 + writer)(functools.partial(write, r, program, writer))

        for_each_warp(warp)

    barrier = plgpu.Barrier
    scratch = {
        "k_smem": tiled((block_kv, dim), dtype),
        "v_smem": tiled((block_kv, value_dim), dtype),
        "q_smem": tiled((tiles.q_buffers, block_q, dim), dtype),
        "do_smem": tiled((stages, block_q, value_dim), dtype),
        "neg_lse_smem": plgpu.SMEM((tiles.q_buffers, block_q), jnp.float32),
        "neg_delta_smem": plgpu.SMEM((stages, block_q), jnp.float32),
        "dq_smem": tiled((tiles.dq_stages * CONSUMERS, ROWS, dq_columns), jnp.float32),
        "ds_smem": tiled((2, block_kv, block_q), dtype),
        "kv_full": barrier(num_arrivals=2),
        "q_full": barrier(num_arrivals=2, num_barriers=tiles.q_buffers),  # q and neg_lse
        "do_full": barrier(num_arrivals=2, num_barriers=stages),  # do and neg_delta
        "q_empty": barrier(num_arrivals=CONSUMERS, num_barriers=tiles.q_buffers),
        "do_empty": barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        "ds_full": barrier(num_arrivals=CONSUMERS),
        "dq_full": barrier(num_arrivals=CONSUMERS, num_barriers=WRITERS),
        "dq_empty": barrier(num_arrivals=1, num_barriers=tiles.dq_stages),
        "done": barrier(num_arrivals=CONSUMERS),
    }
    kv_shape = (problem.batch, padded_rows(problem.kv_len), problem.kv_heads)
    sum_dtype = jnp.float32 if plan.shares_keys else dtype
    outputs = {
        "dq": jax.ShapeDtypeStruct(
            (problem.batch, plan.n_q * block_q, problem.heads, dim), jnp.float32
        ),
        "dk": jax.ShapeDtypeStruct((*kv_shape, dim), sum_dtype),
        "dv": jax.ShapeDtypeStruct((*kv_shape, value_dim), sum_dtype),
    }
    name = f"flash_attention_backward{'_pipelined' if tiles.pipelined else ''}"
    programs = problem.batch * problem.heads * plan.n_kv
    make = functools.partial(Program, plan)
    return launch_backward(name, programs, make, [consume], move, operands, outputs, scratch)

"""The fused backward kernel: dq, dk and dv in one loop over the tiles, five matmuls a tile.

Over lists dq, and dk with dv, have separate kernels: key blocks reach a query block in no fixed
order there, and programs would wait to add to dq in order (measured: 0.96 ms for 0.57 ms of work).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.masks import row_of
from ejkernel.kernels.pallas.gpu.common.registers import COLUMN, read, spread
from ejkernel.kernels.pallas.gpu.common.tma import padded_rows, row_bytes, tiled
from ejkernel.kernels.pallas.gpu.common.warps import for_each_warp, read_thread
from ejkernel.kernels.pallas.gpu.flash_attention.backward_common import (
    CONSUMERS,
    ROWS,
    WRITERS,
    BackwardKernel,
    copy_step,
    dq_operands,
    hand_over,
    launch_backward,
    logits,
    wait_for_parts,
)
from ejkernel.kernels.pallas.gpu.flash_attention.backward_pipelined import add_ahead, copy_ahead
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import Plan


class KeyBlockProgram:
    """The key block of one program, and the query blocks that it visits.

    Its warps loop over the same tiles in the same order.
    """

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


class WarpgroupKeys(NamedTuple):
    """The 64 keys of a consumer warpgroup.

    Attributes:
        wg: index of the warpgroup.
        rows: its rows of the key block.
        first_row: its first key.
        adds_late: see ``logits``.
    """

    wg: Any
    rows: Any
    first_row: Any
    adds_late: Any


Results = Sequence[tuple[Any, Any, Any]]  # (accumulator, shared memory, output) of dk and of dv


@dataclass(frozen=True)
class FusedKernel(BackwardKernel):
    """The fused kernel: a program adds the tiles of one key block to dk and dv, and to dq."""

    # ---- consumers --------------------------------------------------------------------------

    def consume(self, r: Any, program: KeyBlockProgram, wg: Any) -> None:
        """Computes dk and dv of 64 keys, and hands over their parts of dq."""
        plan, problem = self.plan, self.plan.problem
        plgpu.barrier_wait(r.kv_full)
        rows = pl.ds(wg * ROWS, ROWS)
        first_row = program.block * plan.tiles.block_kv + wg * ROWS
        adds_late = plan.lse_in_sum and r.adds_late[program.batch, program.head] != 0
        keys = WarpgroupKeys(wg, rows, first_row, adds_late)

        def accumulate(dk_acc: Any, dv_acc: Any) -> tuple[jax.Array, jax.Array]:
            if plan.tiles.pipelined:
                add_ahead(plan, r, program, wg, adds_late, dk_acc, dv_acc)
                return dk_acc[...], dv_acc[...]
            add_block = functools.partial(self.add_block, r, program, keys, dk_acc, dv_acc)
            steps = program.for_each_block(add_block)
            plgpu.wgmma_wait(0)
            if plan.shares_keys:  # whose parts go through the same memory
                wait_for_parts(plan, r, steps)
            return dk_acc[...], dv_acc[...]

        dk, dv = pl.run_scoped(
            accumulate, plgpu.ACC((ROWS, problem.dim)), plgpu.ACC((ROWS, problem.value_dim))
        )
        dk_smem, dv_smem = r.k_smem.at[rows], r.v_smem.at[rows]
        if plan.key_columns > problem.dim:
            dk_smem = r.q_smem.at[wg]  # as wide as dk
        results = ((dk * problem.scale, dk_smem, r.dk), (dv, dv_smem, r.dv))
        if plan.shares_keys:
            self.add_results(r, program, keys, results)
        else:
            self.store_results(r, program, keys, results)

    def add_block(
        self, r: Any, program: KeyBlockProgram, keys: WarpgroupKeys, dk_acc: Any, dv_acc: Any,
        i: Any, n: Any, masked: Any,
    ) -> None:  # fmt: skip
        """Adds query block i, step n, to dk and dv, and hands over its part of dq."""
        plan, tiles = self.plan, self.plan.tiles
        shape = (ROWS, tiles.block_q)
        slot, ds_slot = lax.rem(n, tiles.stages), lax.rem(n, 2)
        thread = read_thread()
        warpgroup = lax.div(thread, 128)
        mine = pl.ds(warpgroup * ROWS, ROWS)

        def add_key_side(s_acc: Any, dp_acc: Any) -> None:
            plgpu.barrier_wait(r.q_full.at[slot])
            plgpu.barrier_wait(r.do_full.at[slot])
            if plan.lse_in_sum:
                neg_lse = read(r.neg_lse_smem.at[slot], COLUMN)
                s_acc[...] = spread(neg_lse, shape, 1)
            neg_delta = read(r.neg_delta_smem.at[slot], COLUMN)
            dp_acc[...] = spread(neg_delta, shape, 1)
            plgpu.wgmma(s_acc, plan.keys(r, mine), r.q_smem.at[slot].T)
            plgpu.wgmma(dp_acc, r.v_smem.at[mine], r.do_smem.at[slot].T)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
            head = (program.batch, program.head)
            block, first_row = program.block, keys.first_row
            x, tanh = logits(plan, r, head, block, first_row, keys.adds_late, s, i, masked)
            if not plan.lse_in_sum:
                neg_lse = read(r.neg_lse_smem.at[slot], COLUMN)
                x = x + spread(neg_lse, shape, 1)
            p = jnp.exp2(x)
            plgpu.wgmma(dv_acc, p.astype(self.dtype), r.do_smem.at[slot])
            ds = p * plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
            if tanh is not None:
                ds = ds * (1.0 - tanh * tanh)
            ds = ds.astype(self.dtype)
            # the other slot may still be read for the dq of the step before
            r.ds_smem.at[ds_slot, keys.rows][...] = ds
            plgpu.commit_smem()
            plgpu.barrier_arrive(r.ds_full)
            plgpu.wgmma(dk_acc, ds, r.q_smem.at[slot])
            plgpu.barrier_wait(r.ds_full)

        def hand_over_query_side(dq_acc: Any) -> None:
            plgpu.wgmma(dq_acc, *dq_operands(plan, r, ds_slot, thread, warpgroup, mine))
            part = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
            plgpu.barrier_arrive(r.q_empty.at[slot])
            plgpu.barrier_arrive(r.do_empty.at[slot])
            hand_over(plan, r, keys.wg, n, part)

        pl.run_scoped(add_key_side, plgpu.ACC(shape), plgpu.ACC(shape))
        pl.run_scoped(hand_over_query_side, plgpu.ACC((ROWS, plan.dq_columns)))

    def add_results(
        self, r: Any, program: KeyBlockProgram, keys: WarpgroupKeys, results: Results
    ) -> None:
        """Adds this head's part to dk and dv, in the order of the heads that share them."""
        plan = self.plan
        out = (program.batch, pl.ds(keys.first_row, ROWS), program.kv_head)
        first_head = program.kv_head * plan.problem.group
        mine = program.turns.at[program.batch, first_head, plan.n_q + program.block]
        before = CONSUMERS * program.sharer
        plgpu.semaphore_wait(mine, before, decrement=False, memory_scope="gpu")
        for total, _, ref in results:
            for c in range(0, total.shape[1], plan.dq_columns):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                values = total[:, c : c + plan.dq_columns]
                r.dq_smem.at[keys.wg, :, pl.ds(0, values.shape[1])][...] = values
                plgpu.commit_smem()
                part = ref.at[*out, pl.ds(c, plan.dq_columns)]
                send = functools.partial(plgpu.copy_smem_to_gmem, r.dq_smem.at[keys.wg], part)
                pl.when(before == 0)(send)
                pl.when(before > 0)(functools.partial(send, reduction_op="add"))
        plgpu.wait_smem_to_gmem(0)
        plgpu.semaphore_signal(mine, 1, memory_scope="gpu")

    def store_results(
        self, r: Any, program: KeyBlockProgram, keys: WarpgroupKeys, results: Results
    ) -> None:
        """Stores dk and dv through the memory of k, or of q, and of v."""
        out = (program.batch, pl.ds(keys.first_row, ROWS), program.kv_head)
        # both warpgroups read all of k for dq, and of q: their buffers are free when both are done
        plgpu.barrier_arrive(r.done)
        plgpu.barrier_wait(r.done)
        for total, staged, _ in results:
            staged[...] = total.astype(self.dtype)
        plgpu.commit_smem()
        for _, staged, ref in results:
            plgpu.copy_smem_to_gmem(staged, ref.at[out])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # ---- producer and writers ---------------------------------------------------------------

    def move(self, r: Any, program: KeyBlockProgram, wg: Any) -> None:
        """Runs the warp that copies operands, and those that add dq."""
        del wg

        def run_warp(index: Any) -> None:
            pl.when(index == 0)(lambda: self.produce(r, program))
            for writer in range(WRITERS):
                pl.when(index == 1 + writer)(functools.partial(self.write, r, program, writer))

        for_each_warp(run_warp)

    def produce(self, r: Any, program: KeyBlockProgram) -> None:
        """Copies the key block, then the query blocks that see it."""
        plan, tiles = self.plan, self.plan.tiles
        b, h = program.batch, program.head
        at = (b, pl.ds(program.block * tiles.block_kv, tiles.block_kv), program.kv_head)
        plgpu.copy_gmem_to_smem(r.k.at[at], r.k_smem, r.kv_full)
        plgpu.copy_gmem_to_smem(r.v.at[at], r.v_smem, r.kv_full)

        def copy_block(i: Any, n: Any, masked: Any) -> None:
            del masked
            if tiles.pipelined:
                copy_ahead(plan, r, b, h, i, n)
            else:
                copy_step(r, b, h, i, n, tiles.block_q, tiles.stages)

        program.for_each_block(copy_block)

    def write(self, r: Any, program: KeyBlockProgram, writer: int) -> None:
        """Adds the parts of dq of every step to global memory, of every second in each warp.

        A part is added, and the next program told, about a step after it was handed over: one warp
        would keep the consumers waiting.
        """
        plan, tiles = self.plan, self.plan.tiles
        b, h = program.batch, program.head

        def write_block(i: Any, n: Any, masked: Any) -> None:
            del masked
            turn, turns = program.turn(i), program.turns.at[b, h, i]
            slot = lax.rem(n, tiles.dq_stages)

            def part(c: int) -> Any:
                """Returns what consumer c computes of the block."""
                if plan.dq_by_rows:
                    return r.dq.at[b, pl.ds(i * tiles.block_q + c * ROWS, ROWS), h]
                columns = pl.ds(c * plan.dq_columns, plan.dq_columns)
                return r.dq.at[b, pl.ds(i * tiles.block_q, ROWS), h, columns]

            def send(**options: Any) -> None:
                for c in range(CONSUMERS):
                    options["commit_group"] = c == CONSUMERS - 1
                    source = r.dq_smem.at[slot * CONSUMERS + c]
                    plgpu.copy_smem_to_gmem(source, part(c), **options)

            plgpu.barrier_wait(r.dq_full.at[writer])
            plgpu.semaphore_wait(turns, turn, decrement=False, memory_scope="gpu")
            pl.when(turn == 0)(send)
            pl.when(turn > 0)(functools.partial(send, reduction_op="add"))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(r.dq_empty.at[slot])
            plgpu.wait_smem_to_gmem(0)
            plgpu.semaphore_signal(turns, 1, memory_scope="gpu")

        program.for_each_block(write_block, writer, WRITERS)

    # ---- launch -----------------------------------------------------------------------------

    def scratch(self) -> dict[str, Any]:
        """Returns shared memory and barriers by name, in the order of their addresses."""
        plan, tiles = self.plan, self.plan.tiles
        dim, value_dim = plan.problem.dim, plan.problem.value_dim
        block_q, block_kv, stages = tiles.block_q, tiles.block_kv, tiles.stages
        barrier, dtype = plgpu.Barrier, self.dtype
        dq_parts = tiles.dq_stages * CONSUMERS
        # the operands of a matmul have one pattern, and dq takes ds with columns of k
        row = row_bytes(dim, plan.dq_columns, itemsize=dtype.itemsize)
        dq_row = row_bytes(plan.dq_columns, itemsize=4)
        return {
            "k_smem": tiled((block_kv, plan.key_columns), dtype, row),
            "v_smem": tiled((block_kv, value_dim), dtype, row),
            "q_smem": tiled((tiles.q_buffers, block_q, dim), dtype, row),
            "do_smem": tiled((stages, block_q, value_dim), dtype, row),
            "neg_lse_smem": plgpu.SMEM((tiles.q_buffers, block_q), jnp.float32),
            "neg_delta_smem": plgpu.SMEM((stages, block_q), jnp.float32),
            "dq_smem": tiled((dq_parts, ROWS, plan.dq_columns), jnp.float32, dq_row),
            "ds_smem": tiled((2, block_kv, block_q), dtype, row),
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

    def outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the results by name."""
        plan, p = self.plan, self.plan.problem
        q_shape = (p.batch, plan.n_q * plan.tiles.block_q, p.heads)
        kv_shape = (p.batch, padded_rows(p.kv_len), p.kv_heads)
        columns, dtype = (p.dim, p.value_dim), self.dtype
        if plan.shares_keys:
            columns, dtype = tuple(map(plan.whole_parts, columns)), jnp.float32
        return {
            "dq": jax.ShapeDtypeStruct((*q_shape, plan.key_columns), jnp.float32),
            "dk": jax.ShapeDtypeStruct((*kv_shape, columns[0]), dtype),
            "dv": jax.ShapeDtypeStruct((*kv_shape, columns[1]), dtype),
        }

    def __call__(self, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """Returns (dq, dk, dv) of q, k, v, do, neg_lse, neg_delta, tables and ids.

        Tables are ``ranges`` and ``visitors`` of ``visit_tables``. -lse and -delta are float32
        ``[batch, heads, whole q blocks]``, negated so that accumulators can start from them, and
        -inf in rows that see nothing and rows past the end. -lse counts in ``units`` where
        accumulators start from it (``plan.lse_in_sum``), otherwise in base 2. Then two operands
        more: ``adds_late``, int32 ``[batch, heads]``, and ``late_neg_lse``, the -lse that is added
        later where ``adds_late`` is not 0. Ids are padded to whole blocks, other lengths to eight
        rows, of dk and dv too. dq is float32 ``[batch, whole q blocks, heads, dim]``, not scaled,
        unwritten where no key block visits; dk and dv are float32 too where heads share k and v.
        """
        plan, p = self.plan, self.plan.problem
        suffix = "_pipelined" if plan.tiles.pipelined else ""
        return launch_backward(
            f"flash_attention_backward{suffix}",
            p.batch * p.heads * plan.n_kv,
            functools.partial(KeyBlockProgram, plan),
            [self.consume],
            self.move,
            operands,
            self.outputs(),
            self.scratch(),
        )

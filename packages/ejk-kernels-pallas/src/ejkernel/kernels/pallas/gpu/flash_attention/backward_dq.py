"""dq of wide heads and of lists: a program owns 128 query rows and walks the key blocks they see.

Over lists heads of 128 go to ``backward_dq_queue``, whose programs walk for several such blocks.

Either consumer warpgroup owns 64 rows: s = q k^T and dp = do v^T, then ds in registers, the left
operand of dq += ds k. The last product of a step runs beside the first of the next.

Bound: 6 * q_len * kv_len * dim FLOPs a head on the tensor cores. q, do, two blocks of k and one
of v fill the shared memory at 256 columns; v is needed last and given back first.
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

from ejkernel.kernels.pallas.gpu.common.masks import ROW, read, row_of, spread
from ejkernel.kernels.pallas.gpu.common.tma import tiled, whole_rows
from ejkernel.kernels.pallas.gpu.common.warps import for_one_warp, thread_anew
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import OF_QUERIES, Plan, is_wide
from ejkernel.kernels.pallas.gpu.flash_attention.backward_walk import (
    CONSUMERS,
    ROWS,
    base2,
    hide,
    launch,
    needs_masks,
)
from ejkernel.kernels.pallas.gpu.flash_attention.lists import COUNTS

BLOCK_Q = OF_QUERIES.block_q
SHAPE = (ROWS, ROWS)  # queries by keys
MEMORY = 232448 - 2048  # of a block, less barriers

NARROW_STAGES = 3  # at 16k, one block in ten of 128, 2, 3 and 4 took 331, 322 and 332 us


def in_flight(problem: Any) -> tuple[int, int]:
    """Blocks of k and of v in flight; of v one where two do not fit."""
    if not is_wide(problem):
        return NARROW_STAGES, NARROW_STAGES
    rows = BLOCK_Q * (problem.dim + problem.value_dim) + ROWS * (2 * problem.dim)
    return 2, 2 if 2 * (rows + 2 * ROWS * problem.value_dim) <= MEMORY else 1


class Program:
    """A query block, of a program's number or at a place of (batch, head, block), and its walk."""

    def __init__(self, plan: Plan, r: Any, place: Any = None) -> None:
        problem, blocks = plan.problem, plan.n_q
        # JAX 0.10 has no number of the program where a single warp is at work
        item = lax.axis_index("item") if place is None else place
        self.plan, self.table = plan, r.lists if plan.listed else r.ranges
        if plan.listed and place is None:
            item = r.order[0, item]
        self.block = lax.rem(item, blocks)
        if not plan.listed:  # under a causal mask the last rows take longest: they go first
            self.block = blocks - 1 - self.block
        heads = lax.div(item, blocks)
        self.head = lax.rem(heads, problem.heads)
        self.batch = lax.div(heads, problem.heads)
        self.kv_head = lax.div(self.head, problem.group)
        self.last = plan.n_kv - 1

    def walk(self, step: Callable[..., None]) -> Any:
        """``step(key block, steps before, whether a mask is needed)``; their number."""
        at = (*row_of(self.table, self.batch, self.head), self.block)

        def visit(j: Any, n: Any, masked: Any) -> None:
            step(j, n, (masked | (j == self.last)) if self.plan.kv_tail else masked)

        if self.plan.listed:
            whole, count, first = (self.table[*at, c] for c in range(COUNTS + 1))

            def one(n: Any, carry: None) -> None:
                visit(self.table[*at, COUNTS + n], n, n >= whole)
                return carry

            # rows that see nothing have the block past the end alone
            count = lax.select(first > self.last, 0, count)
            lax.fori_loop(0, count, one, None)
            return count
        start, whole, whole_end, stop = (self.table[*at, c] for c in range(4))

        def upwards(j: Any, carry: None) -> None:
            visit(j, j - start, (j < whole) | (j >= whole_end))
            return carry

        lax.fori_loop(start, lax.max(start, stop), upwards, None)
        return lax.max(stop - start, 0)


def probabilities(
    plan: Plan, r: Any, program: Program, lse: Any, first_q: Any, s: jax.Array, j: Any, masked: Any
) -> jax.Array:
    """Those of the products of 64 rows with key block j, times the slope of a cap."""
    x, slope = base2(plan.problem, s, spread(lse, SHAPE, 0))
    if needs_masks(plan, r):
        at = ((program.batch, program.head), first_q, j * ROWS, (lax.div(first_q, ROWS), j))
        x = lax.cond(masked, lambda x: hide(plan, r, x, *at, by_key=False), lambda x: x, x)
    p = jnp.exp2(x)
    return p if slope is None else p * slope


def query_gradient(plan: Plan, operands: Mapping[str, jax.Array]) -> jax.Array:
    """dq of q, k, v, do, -lse in base 2, -delta, ranges or lists and bits, and ids.

    As for ``key_gradients``, but the row vectors and ids of queries cover whole blocks of 128, and
    ranges are those of key blocks of 64 for each of these.
    """
    problem = plan.problem
    dtype = jnp.dtype(problem.dtype)
    dim, value_dim = problem.dim, problem.value_dim
    k_count, v_count = in_flight(problem)

    def consume(r: Any, program: Program, wg: Any) -> None:
        rows = pl.ds(wg * ROWS, ROWS)
        first_q = program.block * BLOCK_Q + wg * ROWS
        at = (program.batch, program.head, pl.ds(first_q, ROWS))
        lse = read(r.lse.at[at], ROW, optimized=False)
        delta = read(r.delta.at[at], ROW, optimized=False)
        plgpu.barrier_wait(r.q_full)

        def accumulate(dq_acc: Any) -> jax.Array:
            def step(j: Any, n: Any, masked: Any) -> None:
                slot, v_slot = lax.rem(n, k_count), lax.rem(n, v_count)
                thread = thread_anew()
                mine = pl.ds(lax.div(thread, 128) * ROWS, ROWS)
                some_v = v_slot if v_count > 1 else lax.div(thread, 1024)
                plgpu.barrier_wait(r.k_full.at[slot])

                def with_scores(s_acc: Any) -> jax.Array:
                    plgpu.wgmma(s_acc, r.q_s.at[mine], r.k_s.at[slot].T)
                    plgpu.barrier_wait(r.v_full.at[v_slot])

                    def with_products(dp_acc: Any) -> jax.Array:
                        plgpu.wgmma(dp_acc, r.do_s.at[mine], r.v_s.at[some_v].T)
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

                        @pl.when(n > 0)  # the dq of the step before is done with its block
                        def _() -> None:
                            plgpu.barrier_arrive(r.k_empty.at[lax.rem(n + k_count - 1, k_count)])

                        p = probabilities(plan, r, program, lse, first_q, s, j, masked)
                        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                        plgpu.barrier_arrive(r.v_empty.at[v_slot])
                        return (p * (dp + spread(delta, SHAPE, 0))).astype(dtype)

                    return pl.run_scoped(with_products, plgpu.ACC(SHAPE))

                # a sum that begins right before its product needs no zeros in registers
                ds = pl.run_scoped(with_scores, plgpu.ACC(SHAPE))
                plgpu.wgmma(dq_acc, ds, r.k_s.at[slot])

            program.walk(step)
            plgpu.wgmma_wait(0)
            return dq_acc[...]

        dq = pl.run_scoped(accumulate, plgpu.ACC((ROWS, dim)))
        out = r.q_s.at[rows]  # only this warpgroup reads these rows
        out[...] = (dq * problem.scale).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, r.dq.at[program.batch, pl.ds(first_q, ROWS), program.head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def produce(r: Any, program: Program) -> None:
        b, kv_head = program.batch, program.kv_head
        at = (b, pl.ds(program.block * BLOCK_Q, BLOCK_Q), program.head)
        plgpu.copy_gmem_to_smem(r.q.at[at], r.q_s, r.q_full)
        plgpu.copy_gmem_to_smem(r.do.at[at], r.do_s, r.q_full)

        def step(j: Any, n: Any, masked: Any) -> None:
            del masked
            at = (b, pl.ds(j * ROWS, ROWS), kv_head)
            for tile, tile_s, full, empty, count in (
                (r.k, r.k_s, r.k_full, r.k_empty, k_count),
                (r.v, r.v_s, r.v_full, r.v_empty, v_count),
            ):
                slot = lax.rem(n, count)

                @pl.when(n >= count)
                def _(empty: Any = empty, slot: Any = slot) -> None:
                    plgpu.barrier_wait(empty.at[slot])

                plgpu.copy_gmem_to_smem(tile.at[at], tile_s.at[slot], full.at[slot])

        program.walk(step)

    def move(r: Any, program: Program, wg: Any) -> None:
        for_one_warp(lambda: produce(r, program))

    barrier = plgpu.Barrier
    scratch = {
        "do_s": tiled((BLOCK_Q, value_dim), dtype),
        "k_empty": barrier(num_arrivals=CONSUMERS, num_barriers=k_count),
        "k_full": barrier(num_barriers=k_count),
        "k_s": tiled((k_count, ROWS, dim), dtype),
        "q_full": barrier(num_arrivals=2),  # q and do
        "q_s": tiled((BLOCK_Q, dim), dtype),
        "v_empty": barrier(num_arrivals=CONSUMERS, num_barriers=v_count),
        "v_full": barrier(num_barriers=v_count),
        "v_s": tiled((v_count, ROWS, value_dim), dtype),
    }
    shape = (problem.batch, whole_rows(problem.q_len), problem.heads, dim)
    outputs = {"dq": jax.ShapeDtypeStruct(shape, dtype)}
    programs = problem.batch * problem.heads * plan.n_q
    make = functools.partial(Program, plan)
    name = "flash_attention_backward_dq"
    (dq,) = launch(name, programs, make, [consume], move, operands, outputs, scratch)
    return dq[:, : problem.q_len]

"""dq of wide heads and of lists: a persistent kernel that takes blocks of query rows.

The loop over a list is short, and to start and end a program costs as much as two of its steps of
128 keys. So the kernel is persistent, and a program takes the next block of the order when its
producer warp has copied all keys of the current one: the next keys are prefetched. At heads of 128
over lists q and do stay in registers, and their buffers are free for the next rows at once;
elsewhere dq is stored from the buffer of q first.

Either consumer warpgroup owns 64 rows: s = q k^T and dp = do v^T, then ds in registers, the left
operand of dq += ds k. The last matmul of a step overlaps the first of the next.

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

from ejkernel.kernels.pallas.gpu.common.masks import row_of
from ejkernel.kernels.pallas.gpu.common.registers import LAYOUT, ROW, read, spread
from ejkernel.kernels.pallas.gpu.common.tma import padded_rows, tiled
from ejkernel.kernels.pallas.gpu.common.warps import for_one_warp, read_thread
from ejkernel.kernels.pallas.gpu.flash_attention.backward_common import (
    CONSUMERS,
    ROWS,
    base2,
    hide,
    launch_backward,
    needs_masks,
    next_unit,
)
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import (
    OF_QUERIES,
    Plan,
    holds_rows,
    is_wide,
)
from ejkernel.kernels.pallas.gpu.flash_attention.lists import COUNTS

BLOCK_Q = OF_QUERIES.block_q
SHAPE = (ROWS, ROWS)  # queries by keys
MEMORY = 232448 - 2048  # of a program, without row values and barriers


def in_flight(problem: Any) -> tuple[int, int]:
    """Returns the blocks of k and v in flight; of v, freed first, one where two do not fit."""
    if not is_wide(problem):
        return 3, 2
    rows = BLOCK_Q * (problem.dim + problem.value_dim) + ROWS * (2 * problem.dim)
    return 2, 2 if 2 * (rows + 2 * ROWS * problem.value_dim) <= MEMORY else 1


class Program:
    """Work unit (batch, head, block): a query block and the key blocks it visits."""

    def __init__(self, plan: Plan, r: Any, unit: Any) -> None:
        problem, blocks = plan.problem, plan.n_q
        self.plan, self.table = plan, r.lists if plan.listed else r.ranges
        self.block = lax.rem(unit, blocks)
        if not plan.listed:  # under a causal mask the last rows take longest: they go first
            self.block = blocks - 1 - self.block
        heads = lax.div(unit, blocks)
        self.head = lax.rem(heads, problem.heads)
        self.batch = lax.div(heads, problem.heads)
        self.kv_head = lax.div(self.head, problem.group)
        self.last = plan.n_kv - 1

    def for_each_block(self, step: Callable[..., None]) -> Any:
        """``step(key block, steps before, whether a mask is needed)``; their number."""
        at = (*row_of(self.table, self.batch, self.head), self.block)

        def visit(j: Any, n: Any, masked: Any) -> None:
            step(j, n, (masked | (j == self.last)) if self.plan.kv_tail else masked)

        if self.plan.listed:
            full, count, first = (self.table[*at, c] for c in range(COUNTS + 1))

            def visit_listed(n: Any, carry: None) -> None:
                visit(self.table[*at, COUNTS + n], n, n >= full)
                return carry

            # rows that see nothing have the block past the end alone
            count = lax.select(first > self.last, 0, count)
            lax.fori_loop(0, count, visit_listed, None)
            return count
        start, full_start, full_stop, stop = (self.table[*at, c] for c in range(4))

        def upwards(j: Any, carry: None) -> None:
            visit(j, j - start, (j < full_start) | (j >= full_stop))
            return carry

        lax.fori_loop(start, lax.max(start, stop), upwards, None)
        return lax.max(stop - start, 0)


def probabilities(
    plan: Plan, r: Any, program: Program, neg_lse: Any, first_q: Any, s: jax.Array, j: Any,
    masked: Any,
) -> jax.Array:  # fmt: skip
    """Returns p of 64 rows and key block j from their dot products, times the slope of a cap."""
    x, slope = base2(plan.problem, s, spread(neg_lse, SHAPE, 0))
    if needs_masks(plan, r):
        at = ((program.batch, program.head), first_q, j * ROWS, (lax.div(first_q, ROWS), j))
        x = lax.cond(masked, lambda x: hide(plan, r, x, *at, by_key=False), lambda x: x, x)
    p = jnp.exp2(x)
    return p if slope is None else p * slope


def query_gradient(plan: Plan, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """(dq,) of q, k, v, do, -lse in base 2, -delta, ranges or lists and bits, and ids.

    As for ``key_gradients``, but the row vectors and ids of queries cover whole blocks of 128, and
    ranges are key blocks of 64 for each of these. Where ``holds_rows``, o and dlse may replace
    -delta, which is then computed and returned, too: (dq, -delta).
    """
    problem = plan.problem
    dtype = jnp.dtype(problem.dtype)
    dim, value_dim = problem.dim, problem.value_dim
    k_count, v_count = in_flight(problem)
    count = problem.batch * problem.heads * plan.n_q
    holds, computes_delta = holds_rows(problem), "neg_delta" not in operands
    widths = {"q": dim, "do": value_dim} | ({"o": value_dim} if computes_delta else {})
    # in shared memory before the work unit
    row_values = ("neg_lse", "dlse" if computes_delta else "neg_delta")
    arrivals = len(widths) + len(row_values)

    def arrived(r: Any) -> Any:
        """Returns the work unit of the next rows, once they have arrived."""
        plgpu.barrier_wait(r.q_full)
        return r.rows_smem[len(row_values), 0].astype(jnp.int32)

    def announce(r: Any, unit: Any, i: Any) -> None:
        pl.when(i > 0)(lambda: plgpu.barrier_wait(r.q_empty))
        r.rows_smem[len(row_values), 0] = unit.astype(jnp.float32)

    def consume(r: Any, _: None, wg: Any) -> None:
        rows = pl.ds(wg * ROWS, ROWS)
        out = (r.dq_smem if holds else r.q_smem).at[rows]  # only this warpgroup reads these rows

        def one_block(carry: Any) -> Any:
            unit, before = carry
            program = Program(plan, r, unit)
            first_q = program.block * BLOCK_Q + wg * ROWS
            at = (program.batch, program.head, pl.ds(first_q, ROWS))
            neg_lse, neg_delta = (read(r.rows_smem.at[n, rows], ROW) for n in range(2))
            in_registers = (
                [read(x.at[rows], LAYOUT) for x in (r.q_smem, r.do_smem)] if holds else []
            )
            if computes_delta:
                o, do = read(r.o_smem.at[rows], LAYOUT), in_registers[1]
                # the second row value is dlse here
                do_o = o.astype(jnp.float32) * do.astype(jnp.float32)
                neg_delta = neg_delta - jnp.sum(do_o, axis=1)
            if holds:
                plgpu.barrier_arrive(r.q_empty)
            if computes_delta:
                r.neg_delta_smem.at[rows][...] = neg_delta
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(r.neg_delta_smem.at[rows], r.neg_delta.at[at])

            def accumulate(dq_acc: Any) -> Any:
                def add_block(j: Any, n: Any, masked: Any) -> None:
                    n = n + before
                    slot, v_slot = lax.rem(n, k_count), lax.rem(n, v_count)
                    left: list[Any] = in_registers
                    v_index = v_slot
                    if not holds:
                        thread = read_thread()
                        mine = pl.ds(lax.div(thread, 128) * ROWS, ROWS)
                        left = [r.q_smem.at[mine], r.do_smem.at[mine]]
                        v_index = v_slot if v_count > 1 else lax.div(thread, 1024)

                    def scores(s_acc: Any) -> None:
                        plgpu.wgmma(s_acc, left[0], r.k_smem.at[slot].T)

                    def slopes(s_acc: Any, dp_acc: Any) -> jax.Array:
                        """Returns ds, once the matmul of do and v is complete."""
                        plgpu.wgmma(dp_acc, left[1], r.v_smem.at[v_index].T)
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

                        @pl.when(n > 0)  # the dq of the step before is done with its block
                        def _() -> None:
                            last = lax.rem(n + k_count - 1, k_count)
                            plgpu.barrier_arrive(r.k_empty.at[last])

                        p = probabilities(plan, r, program, neg_lse, first_q, s, j, masked)
                        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                        plgpu.barrier_arrive(r.v_empty.at[v_slot])
                        if not holds:
                            dp = dp + spread(neg_delta, SHAPE, 0)
                        return (p * dp).astype(dtype)

                    def together(s_acc: Any, dp_acc: Any) -> jax.Array:
                        dp_acc[...] = spread(neg_delta, SHAPE, 0)
                        scores(s_acc)
                        return slopes(s_acc, dp_acc)

                    def v_last(s_acc: Any) -> jax.Array:
                        """Waits for v last; an accumulator that begins here is not zeroed first."""
                        scores(s_acc)
                        plgpu.barrier_wait(r.v_full.at[v_slot])
                        return pl.run_scoped(functools.partial(slopes, s_acc), plgpu.ACC(SHAPE))

                    plgpu.barrier_wait(r.k_full.at[slot])
                    if holds:
                        plgpu.barrier_wait(r.v_full.at[v_slot])
                        ds = pl.run_scoped(together, plgpu.ACC(SHAPE), plgpu.ACC(SHAPE))
                    else:
                        ds = pl.run_scoped(v_last, plgpu.ACC(SHAPE))
                    plgpu.wgmma(dq_acc, ds, r.k_smem.at[slot])

                steps = program.for_each_block(add_block)
                plgpu.wgmma_wait(0)
                return dq_acc[...], steps

            dq, steps = pl.run_scoped(accumulate, plgpu.ACC((ROWS, dim)))
            if holds:  # the previous dq is stored
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out[...] = (dq * problem.scale).astype(dtype)
            plgpu.commit_smem()
            target = (program.batch, pl.ds(first_q, ROWS), program.head)
            plgpu.copy_smem_to_gmem(out, r.dq.at[target])
            if not holds:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(r.q_empty)
            return arrived(r), before + steps

        start = arrived(r), jnp.int32(0)
        lax.while_loop(lambda carry: carry[0] >= 0, one_block, start)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def produce(r: Any, counter: Any) -> None:
        def next_block() -> Any:
            return next_unit(counter, count, lambda n: r.order[0, n] if plan.listed else n)

        def one_block(carry: Any) -> Any:
            unit, i, before = carry
            program = Program(plan, r, unit)
            announce(r, unit, i)
            rows = pl.ds(program.block * BLOCK_Q, BLOCK_Q)
            for name in widths:
                at = (program.batch, rows, program.head)
                plgpu.copy_gmem_to_smem(
                    getattr(r, name).at[at], getattr(r, f"{name}_smem"), r.q_full
                )
            for n, name in enumerate(row_values):
                at = (program.batch, program.head, rows)
                plgpu.copy_gmem_to_smem(getattr(r, name).at[at], r.rows_smem.at[n], r.q_full)

            def copy_block(j: Any, n: Any, masked: Any) -> None:
                del masked
                n = n + before
                at = (program.batch, pl.ds(j * ROWS, ROWS), program.kv_head)
                for tile, tile_smem, full, empty, stages in (
                    (r.k, r.k_smem, r.k_full, r.k_empty, k_count),
                    (r.v, r.v_smem, r.v_full, r.v_empty, v_count),
                ):
                    slot = lax.rem(n, stages)

                    @pl.when(n >= stages)
                    def _(empty: Any = empty, slot: Any = slot) -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    plgpu.copy_gmem_to_smem(tile.at[at], tile_smem.at[slot], full.at[slot])

            steps = program.for_each_block(copy_block)
            return next_block(), i + 1, before + steps

        zero = jnp.int32(0)
        _, i, _ = lax.while_loop(lambda carry: carry[0] >= 0, one_block, (next_block(), zero, zero))
        announce(r, jnp.int32(-1), i)
        for _ in range(arrivals):
            plgpu.barrier_arrive(r.q_full)

    def move(r: Any, _: None, wg: Any) -> None:
        counter = pl.get_global(plgpu.SemaphoreType.REGULAR((1,)))
        for_one_warp(lambda: produce(r, counter))

    barrier = plgpu.Barrier
    scratch = {
        **{f"{name}_smem": tiled((BLOCK_Q, width), dtype) for name, width in widths.items()},
        **({"dq_smem": tiled((BLOCK_Q, dim), dtype)} if holds else {}),
        "k_smem": tiled((k_count, ROWS, dim), dtype),
        "v_smem": tiled((v_count, ROWS, value_dim), dtype),
        "rows_smem": plgpu.SMEM((len(row_values) + 1, BLOCK_Q), jnp.float32),
        **({"neg_delta_smem": plgpu.SMEM((BLOCK_Q,), jnp.float32)} if computes_delta else {}),
        "q_full": barrier(num_arrivals=arrivals),
        "q_empty": barrier(num_arrivals=CONSUMERS),
        **{
            name + end: barrier(num_arrivals=arrivals, num_barriers=stages)
            for name, stages in (("k", k_count), ("v", v_count))
            for end, arrivals in (("_full", 1), ("_empty", CONSUMERS))
        },
    }
    shape = (problem.batch, padded_rows(problem.q_len), problem.heads, dim)
    outputs = {"dq": jax.ShapeDtypeStruct(shape, dtype)}
    if computes_delta:
        all_rows = (problem.batch, problem.heads, plan.n_q * BLOCK_Q)
        outputs["neg_delta"] = jax.ShapeDtypeStruct(all_rows, jnp.float32)
    name = "flash_attention_backward_dq"
    programs = min(plan.cores, count)
    dq, *row_terms = launch_backward(
        name, programs, lambda r: None, [consume], move, operands, outputs, scratch
    )
    return dq[:, : problem.q_len], *row_terms

"""dk and dv of wide heads: a persistent kernel that takes blocks of 64 keys, like dq.

One consumer warpgroup computes the logits, their exponentials p and dv; the other dp, ds and dk.
p passes through shared memory. Each has 64 x 64 matmuls in flight during the arithmetic of the
other, and the accumulators, 64 x 256 float32, take half of the registers of a thread.

A program for each block of keys began and ended for about as long as four steps take. Now the next
keys are copied as soon as the last step has read the current ones. Results are stored from the
buffers of the last step's tiles, which are freed in the next step, as after any other.

Bound: 8 * q_len * kv_len * dim FLOPs a head on the tensor cores; of shared memory, operands of 64
columns take 128 bytes a clock, all there is, so that only half of the matmuls may be so narrow.

The accumulators of dk and dv fill the registers of two warpgroups at 64 keys of 256 columns. With
so few keys the partial dq of the fused kernel would cost as much traffic to the L2 cache as both
other reads together, so dq has a separate kernel that owns query rows: seven matmuls a tile in all
instead of five, and no accumulator leaves the registers before it is complete.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.masks import row_of
from ejkernel.kernels.pallas.gpu.common.registers import COLUMN, LAYOUT, read, spread
from ejkernel.kernels.pallas.gpu.common.tma import padded_rows, tiled
from ejkernel.kernels.pallas.gpu.flash_attention.backward_common import (
    CONSUMERS,
    ROWS,
    PersistentKernel,
    base2,
    copy_step,
    for_each_visit,
    hide,
    launch_backward,
    needs_masks,
)
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import Plan

STAGES = 2
FIRST = 1  # number of the first step: from the start, tiles of the one before hold results
SHAPE = (ROWS, ROWS)  # keys by queries


class WideKeyUnit:
    """Work unit (batch, key head, block): a key block and the query blocks it visits."""

    def __init__(self, plan: Plan, r: Any, unit: Any, side: int | None = None) -> None:
        problem, blocks = plan.problem, plan.n_kv
        self.plan, self.table = plan, r.lists if plan.listed else r.ranges
        # under a causal mask the first keys take longest: they go first
        if plan.listed:
            self.block, heads = lax.rem(unit, blocks), lax.div(unit, blocks)
        else:
            rows = problem.batch * problem.kv_heads
            heads, self.block = plan.unit_at(unit, rows, by_key=True)
        self.kv_head = lax.rem(heads, problem.kv_heads)
        self.batch = lax.div(heads, problem.kv_heads)
        self.last = blocks - 1
        self.first_key = self.block * ROWS
        self.visited, self.steps = None, None
        if not plan.listed and problem.group == 1:
            at = (*row_of(self.table, self.batch, self.kv_head), self.block)
            self.visited = tuple(
                self.table[*at, c] if side is None else r.units_smem[side, 1 + c] for c in range(4)
            )
            self.steps = lax.max(self.visited[3] - self.visited[0], 0)

    def free_last(self, empty: Any, t: Any = None) -> None:
        """Frees an operand once step t has read it for the last time, or at the end."""
        free = lambda: plgpu.barrier_arrive(empty)  # noqa: E731
        if self.steps is None:
            if t is None:
                free()
        else:
            pl.when(self.steps == 0 if t is None else t == self.steps - 1)(free)

    def for_each_block(self, step: Callable[..., None]) -> Any:
        """``step(head, query block, steps before, whether a mask is needed)``; counts the steps."""
        group = self.plan.problem.group

        def one_head(g: Any, count: Any) -> Any:
            h = self.kv_head * group + g
            at = (*row_of(self.table, self.batch, h), self.block)

            def visit(i: Any, t: Any, masked: Any) -> None:
                if self.plan.kv_tail:
                    masked = masked | (self.block == self.last)
                step(h, i, t, masked)

            if self.plan.listed:
                listed = lambda i, t, masked: visit(i, count + t, masked)  # noqa: E731
                return count + for_each_visit(self.table, at, listed)
            visited = self.visited or tuple(self.table[*at, c] for c in range(4))
            start, full_start, full_stop, stop = visited

            def upwards(i: Any, carry: None) -> None:
                visit(i, count + i - start, (i < full_start) | (i >= full_stop))
                return carry

            length = lax.max(stop - start, 0)
            lax.fori_loop(start, start + length, upwards, None)
            return count + length

        if group == 1:
            return one_head(0, jnp.int32(0))
        return lax.fori_loop(0, group, one_head, jnp.int32(0))


class UnitSteps(NamedTuple):
    """The steps of a consumer warpgroup in a work unit.

    Attributes:
        unit: the work unit.
        number: how many units the program had before.
        before: the number of its first step.
    """

    unit: WideKeyUnit
    number: Any
    before: Any


@dataclass(frozen=True)
class WideKeyKernel(PersistentKernel):
    """The kernel of dk and dv of wide heads."""

    @property
    def units(self) -> int:
        """Work units of the call."""
        return self.plan.problem.batch * self.plan.problem.kv_heads * self.plan.n_kv

    # ---- consumers --------------------------------------------------------------------------

    def for_each_unit(self, r: Any, side: int, compute: Callable[[UnitSteps], Any]) -> None:
        """``compute(steps)`` for one unit after the other, which returns the count of steps.

        ``side``: the operand that a unit waits for, 0 of keys, 1 of values.
        """

        def wait_for_unit() -> Any:
            plgpu.barrier_wait((r.k_full, r.v_full)[side])
            return r.units_smem[side, 0]

        # the other warpgroup's tiles alone hold results, also of the step before the first
        plgpu.barrier_arrive((r.q_empty, r.do_empty)[side].at[lax.rem(FIRST + 1, STAGES)])

        def compute_unit(carry: Any) -> Any:
            index, number, before = carry
            unit = WideKeyUnit(self.plan, r, index, side)
            steps = compute(UnitSteps(unit, number, before))
            return wait_for_unit(), number + 1, before + steps

        start = wait_for_unit(), jnp.int32(0), jnp.int32(FIRST)
        lax.while_loop(lambda carry: carry[0] >= 0, compute_unit, start)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def compute_dv(self, r: Any, _: None, wg: Any) -> None:
        """Computes p, hands it to the other warpgroup, and adds to dv."""
        self.for_each_unit(r, 0, functools.partial(self.dv_of_unit, r))

    def dv_of_unit(self, r: Any, at: UnitSteps) -> Any:
        """Computes and stores dv of a unit; returns the number of its steps."""

        def accumulate(dv_acc: Any) -> tuple[jax.Array, Any]:
            def add_block(h: Any, i: Any, t: Any, masked: Any) -> None:
                n = at.before + t
                slot, p_slot = lax.rem(n, STAGES), lax.rem(n, 2)
                plgpu.barrier_wait(r.q_full.at[slot])

                def multiply_keys(acc: Any) -> jax.Array:
                    plgpu.wgmma(acc, r.k_smem, r.q_smem.at[slot].T)
                    plgpu.wgmma_wait(1)
                    free_step_before(r.do_empty, n, t)  # its dv is done
                    return plgpu.wgmma_accumulator_load(acc, wait_n=0)

                s = pl.run_scoped(multiply_keys, plgpu.ACC(SHAPE))
                at.unit.free_last(r.k_empty, t)
                p, slope = self.probabilities(r, at.unit, slot, s, h, i, masked)
                plgpu.barrier_arrive(r.q_empty.at[slot])
                passed = p if slope is None else p * slope
                p = p.astype(self.dtype)
                is_late = n >= FIRST + 2
                pl.when(is_late)(lambda: plgpu.barrier_wait(r.p_empty.at[p_slot]))
                r.p_smem.at[p_slot][...] = passed.astype(self.dtype)
                plgpu.barrier_arrive(r.p_full.at[p_slot])
                plgpu.barrier_wait(r.do_full.at[slot])
                plgpu.wgmma(dv_acc, p, r.do_smem.at[slot])

            steps = at.unit.for_each_block(add_block)
            at.unit.free_last(r.k_empty)
            plgpu.wgmma_wait(0)
            return dv_acc[...], steps

        acc = plgpu.ACC((ROWS, self.plan.problem.value_dim))
        dv, steps = pl.run_scoped(accumulate, acc)
        plgpu.barrier_wait(r.do_read.at[lax.rem(at.number, 2)])
        self.store(at, steps, r.do_smem, dv, r.dv)
        return steps

    def probabilities(
        self, r: Any, unit: WideKeyUnit, slot: Any, s: jax.Array, h: Any, i: Any, masked: Any
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns p of query block i from its dot products, and the slope of a cap."""
        plan = self.plan
        neg_lse = spread(read(r.neg_lse_smem.at[slot], COLUMN), SHAPE, 1)
        x, slope = base2(plan.problem, s, neg_lse)
        if needs_masks(plan, r):
            at = ((unit.batch, h), i * ROWS, unit.first_key, (unit.block, i))
            x = lax.cond(masked, lambda x: hide(plan, r, x, *at, by_key=True), lambda x: x, x)
        return jnp.exp2(x), slope

    def compute_dk(self, r: Any, _: None, wg: Any) -> None:
        """Computes ds from the p of the other warpgroup, and adds to dk."""
        self.for_each_unit(r, 1, functools.partial(self.dk_of_unit, r))

    def dk_of_unit(self, r: Any, at: UnitSteps) -> Any:
        """Computes and stores dk of a unit; returns the number of its steps."""
        problem = self.plan.problem

        def accumulate(dk_acc: Any) -> tuple[jax.Array, Any]:
            def add_block(h: Any, i: Any, t: Any, masked: Any) -> None:
                n = at.before + t
                slot, p_slot = lax.rem(n, STAGES), lax.rem(n, 2)
                plgpu.barrier_wait(r.do_full.at[slot])

                def multiply_values(acc: Any) -> jax.Array:
                    plgpu.wgmma(acc, r.v_smem, r.do_smem.at[slot].T)
                    plgpu.wgmma_wait(1)
                    free_step_before(r.q_empty, n, t)  # its dk is done
                    return plgpu.wgmma_accumulator_load(acc, wait_n=0)

                dp = pl.run_scoped(multiply_values, plgpu.ACC(SHAPE))
                dp = dp + spread(read(r.neg_delta_smem.at[slot], COLUMN), SHAPE, 1)
                plgpu.barrier_arrive(r.do_empty.at[slot])
                at.unit.free_last(r.v_empty, t)
                plgpu.barrier_wait(r.p_full.at[p_slot])
                p = read(r.p_smem.at[p_slot], LAYOUT)
                ds = (p.astype(jnp.float32) * dp).astype(self.dtype)
                plgpu.barrier_arrive(r.p_empty.at[p_slot])
                plgpu.barrier_wait(r.q_full.at[slot])
                plgpu.wgmma(dk_acc, ds, r.q_smem.at[slot])

            steps = at.unit.for_each_block(add_block)
            at.unit.free_last(r.v_empty)
            plgpu.barrier_arrive(r.do_read.at[lax.rem(at.number, 2)])
            plgpu.wgmma_wait(0)
            return dk_acc[...], steps

        dk, steps = pl.run_scoped(accumulate, plgpu.ACC((ROWS, problem.dim)))
        # the other warpgroup was done with q before it passed p
        self.store(at, steps, r.q_smem, dk * problem.scale, r.dk)
        return steps

    def store(self, at: UnitSteps, steps: Any, tiles: Any, total: jax.Array, target: Any) -> None:
        """Stores dk or dv of a unit from the buffer of its last step, which nobody reads."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the unit before, if this had no step
        staged, unit = tiles.at[lax.rem(at.before + steps - 1, STAGES)], at.unit
        staged[...] = total.astype(self.dtype)
        plgpu.commit_smem()
        rows = pl.ds(unit.first_key, ROWS)
        plgpu.copy_smem_to_gmem(staged, target.at[unit.batch, rows, unit.kv_head])

    # ---- producer ---------------------------------------------------------------------------

    def produce(self, r: Any, counter: Any) -> None:
        """Copies the key block and the query blocks of one unit after the other."""
        plan = self.plan

        def announce(side: int, index: Any, number: Any, visited: Any = None) -> None:
            """Tells a consumer its next unit, once it is done with the operand of this one."""
            empty = (r.k_empty, r.v_empty)[side]
            pl.when(number > 0)(lambda: plgpu.barrier_wait(empty))
            for n, x in enumerate((index, *(visited or ()))):
                r.units_smem[side, n] = x

        def copy_unit(carry: Any) -> Any:
            index, number, before = carry
            unit = WideKeyUnit(plan, r, index)
            at = (unit.batch, pl.ds(unit.first_key, ROWS), unit.kv_head)
            announce(0, index, number, unit.visited)
            plgpu.copy_gmem_to_smem(r.k.at[at], r.k_smem, r.k_full)
            announce(1, index, number, unit.visited)
            plgpu.copy_gmem_to_smem(r.v.at[at], r.v_smem, r.v_full)

            def copy_block(h: Any, i: Any, t: Any, masked: Any) -> None:
                del masked
                copy_step(r, unit.batch, h, i, before + t, ROWS, STAGES)

            steps = unit.for_each_block(copy_block)
            return self.take_unit(r, counter), number + 1, before + steps

        start = self.take_unit(r, counter), jnp.int32(0), jnp.int32(FIRST)
        _, number, _ = lax.while_loop(lambda carry: carry[0] >= 0, copy_unit, start)
        for side, full in enumerate((r.k_full, r.v_full)):
            announce(side, jnp.int32(-1), number)
            plgpu.barrier_arrive(full)

    # ---- launch -----------------------------------------------------------------------------

    def scratch(self) -> dict[str, Any]:
        """Returns shared memory and barriers by name, in the order of their addresses."""
        dim, value_dim = self.plan.problem.dim, self.plan.problem.value_dim
        barrier, dtype = plgpu.Barrier, self.dtype
        return {
            "neg_delta_smem": plgpu.SMEM((STAGES, ROWS), jnp.float32),
            "do_empty": barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
            "do_full": barrier(num_arrivals=2, num_barriers=STAGES),  # do and neg_delta
            "do_smem": tiled((STAGES, ROWS, value_dim), dtype),
            "do_read": barrier(num_barriers=2),
            "k_empty": barrier(),
            "k_full": barrier(),
            "k_smem": tiled((ROWS, dim), dtype),
            "neg_lse_smem": plgpu.SMEM((STAGES, ROWS), jnp.float32),
            "p_empty": barrier(num_barriers=2),
            "p_full": barrier(num_barriers=2),
            "p_smem": tiled((2, ROWS, ROWS), dtype),
            "q_empty": barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
            "q_full": barrier(num_arrivals=2, num_barriers=STAGES),  # q and neg_lse
            "q_smem": tiled((STAGES, ROWS, dim), dtype),
            "units_smem": plgpu.SMEM((2, 5), jnp.int32),
            "v_empty": barrier(),
            "v_full": barrier(),
            "v_smem": tiled((ROWS, value_dim), dtype),
        }

    def outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the results by name."""
        p = self.plan.problem
        shape = (p.batch, padded_rows(p.kv_len), p.kv_heads)
        return {
            "dk": jax.ShapeDtypeStruct((*shape, p.dim), self.dtype),
            "dv": jax.ShapeDtypeStruct((*shape, p.value_dim), self.dtype),
        }

    def __call__(self, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """Returns (dk, dv) of q, k, v, do, neg_lse, neg_delta, ranges or lists and bits, and ids.

        Row vectors are float32 ``[batch, heads, whole query blocks]``; -lse is in base 2, and -inf
        where a row sees nothing. Ranges are int32 ``[#b, #h, key blocks, 4]`` query blocks. Ids are
        padded to whole blocks, other lengths to eight rows.
        """
        return launch_backward(
            "flash_attention_backward_dkv",
            min(self.plan.cores, self.units),
            lambda r: None,
            [self.compute_dv, self.compute_dk],
            self.move,
            operands,
            self.outputs(),
            self.scratch(),
        )


def free_step_before(empty: Any, n: Any, t: Any) -> None:
    """Frees a tile of the step before, n - 1; in a unit's first step its results are stored."""
    pl.when(t == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
    plgpu.barrier_arrive(empty.at[lax.rem(n + 1, STAGES)])

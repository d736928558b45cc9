"""dk and dv over lists: a persistent kernel that takes key blocks from a work counter, like dq.

Keys and values are double-buffered in shared memory: the next block is copied while this one is
processed, and results are stored from the buffers of their operands. A work unit covers all heads
that share the keys. With too few units each has a part of the heads, and XLA adds the partial
results: adding in a fixed order would stall, since programs take units before they begin them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

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
    BackwardKernel,
    copy_step,
    for_each_visit,
    launch_backward,
    logits,
    next_unit,
)
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import Plan

KV_BUFFERS = 2  # of keys and values


def parts_of(plan: Plan) -> int:
    """Returns the parts of the heads of a key block: the fewest with two units per program."""
    units = plan.problem.batch * plan.problem.kv_heads * plan.n_kv
    parts = [n for n in range(1, plan.problem.group + 1) if plan.problem.group % n == 0]
    return next((n for n in parts if units * n >= 2 * plan.cores), parts[-1])


class KeyUnit:
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


class UnitKeys(NamedTuple):
    """The 64 keys of a consumer warpgroup in a work unit.

    Attributes:
        number: how many units the program had before.
        before: how many query blocks these visited.
        slot: the buffer of keys and values.
        first_row: the first key.
    """

    number: Any
    before: Any
    slot: Any
    first_row: Any


@dataclass(frozen=True)
class ListKeyKernel(BackwardKernel):
    """The kernel of dk and dv over lists."""

    @property
    def parts(self) -> int:
        """Parts of the heads of a key block."""
        return parts_of(self.plan)

    @property
    def units(self) -> int:
        """Work units of the call."""
        p = self.plan.problem
        return p.batch * p.kv_heads * self.plan.n_kv * self.parts

    def with_row_values(self, r: Any) -> Any:
        """Returns references with the row values by name; they share memory with unit indices.

        Indices are float32 there, exact up to 2^24: keys of more blocks would fit no GPU.
        """
        stages = self.plan.tiles.stages
        named = {
            "neg_lse_smem": r.rows_smem.at[pl.ds(0, stages)],
            "neg_delta_smem": r.rows_smem.at[pl.ds(stages, stages)],
        }
        return SimpleNamespace(**vars(r), **named)

    # ---- consumers --------------------------------------------------------------------------

    def consume(self, r: Any, _: None, wg: Any) -> None:
        """Computes and stores dk and dv of 64 keys of one unit after the other."""
        plan, problem = self.plan, self.plan.problem
        r = self.with_row_values(r)
        rows = pl.ds(wg * ROWS, ROWS)

        def wait_for_unit(number: Any) -> Any:
            """Returns a work unit, once its keys have arrived; -1 after the last."""
            slot = lax.rem(number, KV_BUFFERS)
            plgpu.barrier_wait(r.kv_full.at[slot])
            return r.rows_smem[2 * plan.tiles.stages, slot].astype(jnp.int32)

        def compute_unit(carry: Any) -> Any:
            index, number, before = carry
            unit = KeyUnit(plan, r, index)
            slot = lax.rem(number, KV_BUFFERS)
            first_row = unit.block * plan.tiles.block_kv + wg * ROWS
            keys = UnitKeys(number, before, slot, first_row)

            def accumulate(dk_acc: Any, dv_acc: Any) -> tuple[jax.Array, jax.Array, Any]:
                def of_head(h: Any) -> Callable[..., None]:
                    adds_late = plan.lse_in_sum and r.adds_late[unit.batch, h] != 0
                    return functools.partial(
                        self.add_block, r, unit, keys, dk_acc, dv_acc, h, adds_late
                    )

                steps = unit.for_each_block(of_head)
                plgpu.wgmma_wait(0)
                return dk_acc[...], dv_acc[...], steps

            dk, dv, steps = pl.run_scoped(
                accumulate, plgpu.ACC((ROWS, problem.dim)), plgpu.ACC((ROWS, problem.value_dim))
            )
            results = ((dk * problem.scale, r.k_smem, r.dk), (dv, r.v_smem, r.dv))
            out = (unit.batch, pl.ds(first_row, ROWS), unit.kv_head)
            pl.when((steps == 0) & (number > 0))(lambda: self.free_keys_before(r, keys))
            if self.parts > 1:
                for total, _, ref in results:
                    store_tile(ref.at[unit.part, *out], total)
            else:
                for total, staged, _ in results:  # only this warpgroup read these rows
                    staged.at[slot, rows][...] = total.astype(self.dtype)
                plgpu.commit_smem()
                for _, staged, ref in results:
                    plgpu.copy_smem_to_gmem(staged.at[slot, rows], ref.at[out])
            return wait_for_unit(number + 1), number + 1, before + steps

        zero = jnp.int32(0)
        start = (wait_for_unit(zero), zero, zero)
        lax.while_loop(lambda carry: carry[0] >= 0, compute_unit, start)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def free_keys_before(self, r: Any, keys: UnitKeys) -> None:
        """Frees the buffers of the previous unit, whose results are stored by now."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(r.kv_empty.at[1 - keys.slot])

    def add_block(
        self, r: Any, unit: KeyUnit, keys: UnitKeys, dk_acc: Any, dv_acc: Any, h: Any,
        adds_late: Any, i: Any, t: Any, masked: Any,
    ) -> None:  # fmt: skip
        """Adds query block i of head h, step t of the unit, to dk and dv."""
        plan, stages = self.plan, self.plan.tiles.stages
        shape = (ROWS, plan.tiles.block_q)
        n = keys.before + t
        slot = lax.rem(n, stages)
        mine = pl.ds(lax.div(read_thread(), 128) * ROWS, ROWS)

        def add(s_acc: Any, dp_acc: Any) -> None:
            plgpu.barrier_wait(r.q_full.at[slot])
            plgpu.barrier_wait(r.do_full.at[slot])
            if plan.lse_in_sum:
                s_acc[...] = spread(read(r.neg_lse_smem.at[slot], COLUMN), shape, 1)
            dp_acc[...] = spread(read(r.neg_delta_smem.at[slot], COLUMN), shape, 1)
            plgpu.wgmma(s_acc, r.k_smem.at[keys.slot, mine], r.q_smem.at[slot].T)
            plgpu.wgmma(dp_acc, r.v_smem.at[keys.slot, mine], r.do_smem.at[slot].T)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

            @pl.when(n > 0)  # dk and dv of the step before are done with its tiles
            def _() -> None:
                last = lax.rem(n + stages - 1, stages)
                plgpu.barrier_arrive(r.q_empty.at[last])
                plgpu.barrier_arrive(r.do_empty.at[last])

            pl.when((t == 0) & (keys.number > 0))(lambda: self.free_keys_before(r, keys))
            head = (unit.batch, h)
            x, tanh = logits(plan, r, head, unit.block, keys.first_row, adds_late, s, i, masked)
            if not plan.lse_in_sum:
                x = x + spread(read(r.neg_lse_smem.at[slot], COLUMN), shape, 1)
            p = jnp.exp2(x)
            plgpu.wgmma(dv_acc, p.astype(self.dtype), r.do_smem.at[slot])
            ds = p * plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
            if tanh is not None:
                ds = ds * (1.0 - tanh * tanh)
            plgpu.wgmma(dk_acc, ds.astype(self.dtype), r.q_smem.at[slot])

        pl.run_scoped(add, plgpu.ACC(shape), plgpu.ACC(shape))

    # ---- producer ---------------------------------------------------------------------------

    def move(self, r: Any, _: None, wg: Any) -> None:
        """Runs the warp that copies operands."""
        counter = pl.get_global(plgpu.SemaphoreType.REGULAR)
        for_one_warp(lambda: self.produce(r, counter))

    def produce(self, r: Any, counter: Any) -> None:
        """Copies the keys and the query blocks of one unit after the other."""
        plan, tiles, parts = self.plan, self.plan.tiles, self.parts
        r = self.with_row_values(r)

        def take_unit() -> Any:
            def unit_of(n: Any) -> Any:
                return r.order[0, lax.div(n, parts)] * parts + lax.rem(n, parts)

            return next_unit(counter, self.units, unit_of)

        def announce(index: Any, number: Any) -> Any:
            """Tells the consumers the next unit, once a buffer of keys is free; returns it."""
            slot = lax.rem(number, KV_BUFFERS)
            pl.when(number >= KV_BUFFERS)(lambda: plgpu.barrier_wait(r.kv_empty.at[slot]))
            r.rows_smem[2 * tiles.stages, slot] = index.astype(jnp.float32)
            return slot

        def copy_unit(carry: Any) -> Any:
            index, number, before = carry
            unit = KeyUnit(plan, r, index)
            slot = announce(index, number)
            at = (unit.batch, pl.ds(unit.block * tiles.block_kv, tiles.block_kv), unit.kv_head)
            plgpu.copy_gmem_to_smem(r.k.at[at], r.k_smem.at[slot], r.kv_full.at[slot])
            plgpu.copy_gmem_to_smem(r.v.at[at], r.v_smem.at[slot], r.kv_full.at[slot])

            def of_head(h: Any) -> Callable[..., None]:
                def copy_block(i: Any, t: Any, masked: Any) -> None:
                    del masked
                    copy_step(r, unit.batch, h, i, before + t, tiles.block_q, tiles.stages)

                return copy_block

            steps = unit.for_each_block(of_head)
            return take_unit(), number + 1, before + steps

        zero = jnp.int32(0)
        start = (take_unit(), zero, zero)
        _, number, _ = lax.while_loop(lambda carry: carry[0] >= 0, copy_unit, start)
        slot = announce(jnp.int32(-1), number)
        for _ in range(2):  # in place of the copies of k and v
            plgpu.barrier_arrive(r.kv_full.at[slot])

    # ---- launch -----------------------------------------------------------------------------

    def scratch(self) -> dict[str, Any]:
        """Returns shared memory and barriers by name, in the order of their addresses."""
        p, tiles = self.plan.problem, self.plan.tiles
        block_q, block_kv, stages = tiles.block_q, tiles.block_kv, tiles.stages
        barrier, dtype = plgpu.Barrier, self.dtype
        return {
            "k_smem": tiled((KV_BUFFERS, block_kv, p.dim), dtype),
            "v_smem": tiled((KV_BUFFERS, block_kv, p.value_dim), dtype),
            "q_smem": tiled((stages, block_q, p.dim), dtype),
            "do_smem": tiled((stages, block_q, p.value_dim), dtype),
            "rows_smem": plgpu.SMEM((2 * stages + 1, block_q), jnp.float32),
            "kv_full": barrier(num_arrivals=2, num_barriers=KV_BUFFERS),
            "kv_empty": barrier(num_arrivals=CONSUMERS, num_barriers=KV_BUFFERS),
            "q_full": barrier(num_arrivals=2, num_barriers=stages),  # q and neg_lse
            "do_full": barrier(num_arrivals=2, num_barriers=stages),  # do and neg_delta
            "q_empty": barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            "do_empty": barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        }

    def outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the results by name; float32 partial results where heads are in parts."""
        plan, p, parts = self.plan, self.plan.problem, self.parts
        rows = plan.n_kv * plan.tiles.block_kv if parts > 1 else padded_rows(p.kv_len)
        lead, dtype = ((parts,), jnp.float32) if parts > 1 else ((), self.dtype)
        shape = (*lead, p.batch, rows, p.kv_heads)
        return {
            "dk": jax.ShapeDtypeStruct((*shape, p.dim), dtype),
            "dv": jax.ShapeDtypeStruct((*shape, p.value_dim), dtype),
        }

    def __call__(self, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """Returns (dk, dv) for operands of ``FusedKernel`` with lists, bits and order for
        ranges."""
        results = launch_backward(
            "flash_attention_backward_dkv",
            min(self.plan.cores, self.units),
            lambda r: None,
            [self.consume],
            self.move,
            operands,
            self.outputs(),
            self.scratch(),
        )
        return tuple(x.sum(0) for x in results) if self.parts > 1 else results

"""dk and dv of wide heads: one program owns 64 keys and walks the query blocks that see them.

One consumer warpgroup computes the logits, their exponentials p and dv; the other dp, ds and dk.
p passes through shared memory. Either has 64 x 64 products in flight while the other is at its
arithmetic, and the sums, 64 x 256 float32, are half of the registers of a thread.

Bound: 8 * q_len * kv_len * dim FLOPs a head on the tensor cores; of shared memory, operands of 64
columns take 128 bytes a clock, all there is, so that only half of the products may be so narrow.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.masks import (
    COLUMN,
    LAYOUT,
    hide_other_segments,
    hide_outside,
    hide_unset,
    read,
    spread,
)
from ejkernel.kernels.pallas.gpu.common.tma import tiled, whole_rows
from ejkernel.kernels.pallas.gpu.common.warps import for_one_warp
from ejkernel.kernels.pallas.gpu.flash_attention.backward_wide import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    ROWS,
    STAGES,
    WidePlan,
    base2,
    launch,
)
from ejkernel.kernels.pallas.gpu.flash_attention.lists import LIMIT

SHAPE = (ROWS, ROWS)  # keys by queries


class _Program:
    """The key block of one program and its walk."""

    def __init__(self, plan: WidePlan, ranges: Any) -> None:
        problem = plan.problem
        blocks = -(-problem.kv_len // ROWS)
        item = lax.axis_index("item")
        self.plan, self.ranges = plan, ranges
        self.block = lax.rem(item, blocks)
        heads = lax.div(item, blocks)
        self.kv_head = lax.rem(heads, problem.kv_heads)
        self.batch = lax.div(heads, problem.kv_heads)
        self.last = blocks - 1
        self.first_key = self.block * ROWS

    def walk(self, step: Callable[..., None]) -> Any:
        """``step(head, query block, steps before, whether a mask is needed)``; counts the steps."""
        plan = self.plan

        def one_head(g: Any, count: Any) -> Any:
            h = self.kv_head * plan.problem.group + g
            row = plan.table_row(self.batch, h)
            if plan.listed:

                def one(n: Any, carry: None) -> None:
                    visit = self.ranges[*row, self.block, 1 + n]
                    masked = visit >= LIMIT
                    if plan.kv_tail:
                        masked = masked | (self.block == self.last)
                    step(h, visit & (LIMIT - 1), count + n, masked)
                    return carry

                length = self.ranges[*row, self.block, 0]
                lax.fori_loop(0, length, one, None)
                return count + length
            start, whole, whole_end, stop = (self.ranges[*row, self.block, c] for c in range(4))

            def upwards(i: Any, carry: None) -> None:
                masked = (i < whole) | (i >= whole_end)
                if plan.kv_tail:
                    masked = masked | (self.block == self.last)
                step(h, i, count + i - start, masked)
                return carry

            length = lax.max(stop - start, 0)
            lax.fori_loop(start, start + length, upwards, None)
            return count + length

        if plan.problem.group == 1:
            return one_head(0, jnp.int32(0))
        return lax.fori_loop(0, plan.problem.group, one_head, jnp.int32(0))

    def hide(self, x: jax.Array, ids: Any, bits: Any, h: Any, i: Any) -> jax.Array:
        """-inf where a pair of this key block and query block i is invisible."""
        plan, first_q = self.plan, i * ROWS
        if plan.kv_tail or not plan.band.empty:
            left = plan.problem.kv_len - self.first_key if plan.kv_tail else None
            distance = self.first_key - first_q
            x = hide_outside(x, plan.band, distance, rows_left=left, transposed=True)
        if bits is not None:
            h = h if plan.range_head else 0
            b = self.batch if plan.bits_batch else 0
            x = hide_unset(x, bits[b, h, self.block, i])
        if ids:
            b = self.batch if plan.ids_batch else 0
            q_ids = ids[0].at[b, pl.ds(first_q, ROWS)]
            x = hide_other_segments(x, ids[1].at[b, pl.ds(self.first_key, ROWS)], q_ids)
        return x


def build_dkv(plan: WidePlan) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The kernel call: (q, k, v, do, -lse in base 2, -delta, ranges, *bits, *ids) -> (dk, dv).

    Row vectors are float32 ``[batch, heads, whole query blocks]``, -inf in place of -lse where a
    row sees nothing; ``ranges`` int32 ``[#b, #h, key blocks, 4]`` query blocks; ids are padded to
    whole blocks, other lengths to eight rows, of dk and dv too.
    """
    problem = plan.problem
    dtype = jnp.dtype(problem.dtype)
    dim, value_dim = problem.dim, problem.value_dim

    def exponentials(r: Any, program: _Program) -> None:
        plgpu.barrier_wait(r.k_full)

        def accumulate(dv_acc: Any) -> jax.Array:
            def step(h: Any, i: Any, n: Any, masked: Any) -> None:
                slot, p_slot = lax.rem(n, STAGES), lax.rem(n, 2)
                plgpu.barrier_wait(r.q_full.at[slot])

                def scores(acc: Any) -> jax.Array:
                    plgpu.wgmma(acc, r.k_s, r.q_s.at[slot].T)
                    plgpu.wgmma_wait(1)

                    @pl.when(n > 0)  # the dv of the step before is done with its tile
                    def _() -> None:
                        plgpu.barrier_arrive(r.do_empty.at[lax.rem(n + 1, STAGES)])

                    return plgpu.wgmma_accumulator_load(acc, wait_n=0)

                s = pl.run_scoped(scores, plgpu.ACC(SHAPE))
                less = spread(read(r.lse_s.at[slot], COLUMN), SHAPE, 1)
                x, slope = base2(problem, s, less)
                if plan.masks:
                    hide = lambda x: program.hide(x, r.ids, r.bits, h, i)  # noqa: E731
                    x = lax.cond(masked, hide, lambda x: x, x)
                p = jnp.exp2(x)
                plgpu.barrier_arrive(r.q_empty.at[slot])
                passed = p if slope is None else p * slope
                p = p.astype(dtype)

                @pl.when(n >= 2)
                def _() -> None:
                    plgpu.barrier_wait(r.p_empty.at[p_slot])

                r.p_s.at[p_slot][...] = passed.astype(dtype)
                plgpu.barrier_arrive(r.p_full.at[p_slot])
                plgpu.barrier_wait(r.do_full.at[slot])
                plgpu.wgmma(dv_acc, p, r.do_s.at[slot])

            program.walk(step)
            plgpu.wgmma_wait(0)
            return dv_acc[...]

        dv = pl.run_scoped(accumulate, plgpu.ACC((ROWS, value_dim)))
        out = r.k_s if value_dim == dim else r.dv_s  # only this warpgroup reads k
        out[...] = dv.astype(dtype)
        plgpu.commit_smem()
        rows = pl.ds(program.first_key, ROWS)
        plgpu.copy_smem_to_gmem(out, r.dv.at[program.batch, rows, program.kv_head])
        plgpu.wait_smem_to_gmem(0)

    def differences(r: Any, program: _Program) -> None:
        plgpu.barrier_wait(r.v_full)

        def accumulate(dk_acc: Any) -> tuple[jax.Array, jax.Array]:
            def step(h: Any, i: Any, n: Any, masked: Any) -> None:
                slot, p_slot = lax.rem(n, STAGES), lax.rem(n, 2)
                plgpu.barrier_wait(r.do_full.at[slot])

                def products(acc: Any) -> jax.Array:
                    plgpu.wgmma(acc, r.v_s, r.do_s.at[slot].T)
                    plgpu.wgmma_wait(1)

                    @pl.when(n > 0)  # the dk of the step before is done with its tile
                    def _() -> None:
                        plgpu.barrier_arrive(r.q_empty.at[lax.rem(n + 1, STAGES)])

                    return plgpu.wgmma_accumulator_load(acc, wait_n=0)

                dp = pl.run_scoped(products, plgpu.ACC(SHAPE))
                dp = dp + spread(read(r.delta_s.at[slot], COLUMN), SHAPE, 1)
                plgpu.barrier_arrive(r.do_empty.at[slot])
                plgpu.barrier_wait(r.p_full.at[p_slot])
                p = read(r.p_s.at[p_slot], LAYOUT)
                ds = (p.astype(jnp.float32) * dp).astype(dtype)
                plgpu.barrier_arrive(r.p_empty.at[p_slot])
                plgpu.barrier_wait(r.q_full.at[slot])
                plgpu.wgmma(dk_acc, ds, r.q_s.at[slot])

            n = program.walk(step)
            plgpu.wgmma_wait(0)
            return dk_acc[...], n

        dk, n = pl.run_scoped(accumulate, plgpu.ACC((ROWS, dim)))
        # the last step's tile of q: the other warpgroup was done with it before it passed p
        out = r.q_s.at[lax.rem(n + 1, STAGES)]
        out[...] = (dk * problem.scale).astype(dtype)
        plgpu.commit_smem()
        rows = pl.ds(program.first_key, ROWS)
        plgpu.copy_smem_to_gmem(out, r.dk.at[program.batch, rows, program.kv_head])
        plgpu.wait_smem_to_gmem(0)

    def produce(r: Any, program: _Program) -> None:
        b = program.batch
        keys = pl.ds(program.first_key, ROWS)
        plgpu.copy_gmem_to_smem(r.k.at[b, keys, program.kv_head], r.k_s, r.k_full)
        plgpu.copy_gmem_to_smem(r.v.at[b, keys, program.kv_head], r.v_s, r.v_full)

        def step(h: Any, i: Any, n: Any, masked: Any) -> None:
            del masked
            slot = lax.rem(n, STAGES)
            at = pl.ds(i * ROWS, ROWS)
            for tile, row, tile_s, row_s, full, empty in (
                (r.q, r.lse, r.q_s, r.lse_s, r.q_full, r.q_empty),
                (r.do, r.delta, r.do_s, r.delta_s, r.do_full, r.do_empty),
            ):
                pl.when(n >= STAGES)(lambda empty=empty: plgpu.barrier_wait(empty.at[slot]))
                plgpu.copy_gmem_to_smem(tile.at[b, at, h], tile_s.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(row.at[b, h, at], row_s.at[slot], full.at[slot])

        program.walk(step)

    def body(*refs: Any, **scratch: Any) -> None:
        q, k, v, do, lse, delta, ranges, *more, dk, dv = refs
        bits, ids = (more[0], more[1:]) if plan.bits else (None, more)
        r = SimpleNamespace(
            q=q, k=k, v=v, do=do, lse=lse, delta=delta, bits=bits, ids=ids, dk=dk, dv=dv, **scratch
        )
        wg = lax.axis_index("wg")
        program = _Program(plan, ranges)

        @pl.when(wg == 0)
        def _() -> None:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            exponentials(r, program)

        @pl.when(wg == 1)
        def _() -> None:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            differences(r, program)

        @pl.when(wg == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            for_one_warp(lambda: produce(r, program))

    barrier = plgpu.Barrier
    scratch = {
        "k_s": tiled((ROWS, dim), dtype),
        "v_s": tiled((ROWS, value_dim), dtype),
        "q_s": tiled((STAGES, ROWS, dim), dtype),
        "do_s": tiled((STAGES, ROWS, value_dim), dtype),
        "p_s": tiled((2, ROWS, ROWS), dtype),
        "lse_s": plgpu.SMEM((STAGES, ROWS), jnp.float32),
        "delta_s": plgpu.SMEM((STAGES, ROWS), jnp.float32),
        "k_full": barrier(),
        "v_full": barrier(),
        "q_full": barrier(num_arrivals=2, num_barriers=STAGES),  # q and lse
        "do_full": barrier(num_arrivals=2, num_barriers=STAGES),  # do and delta
        "q_empty": barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
        "do_empty": barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
        "p_full": barrier(num_barriers=2),
        "p_empty": barrier(num_barriers=2),
    }
    if value_dim != dim:
        scratch["dv_s"] = tiled((ROWS, value_dim), dtype)
    kv_shape = (problem.batch, whole_rows(problem.kv_len), problem.kv_heads)
    out = (
        jax.ShapeDtypeStruct((*kv_shape, dim), dtype),
        jax.ShapeDtypeStruct((*kv_shape, value_dim), dtype),
    )
    items = problem.batch * problem.kv_heads * -(-problem.kv_len // ROWS)
    return launch(body, "flash_attention_backward_dkv", items, out, scratch)

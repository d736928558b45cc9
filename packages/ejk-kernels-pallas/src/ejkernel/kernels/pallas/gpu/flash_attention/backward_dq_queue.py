"""dq over lists at heads of 128: programs that stay, and take block after block of query rows.

A walk over a list is short, and to start and end a program costs as much as two of its steps of 128
keys. So a program a multiprocessor stays for the whole call and takes the next place of the order
when its copying warp has read all keys of the one before: those of the next are copied meanwhile.
q and do are held in registers, and their memory is free for the next rows at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.masks import LAYOUT, ROW, read, spread
from ejkernel.kernels.pallas.gpu.common.tickets import taken_by_warp
from ejkernel.kernels.pallas.gpu.common.tma import tiled, whole_rows
from ejkernel.kernels.pallas.gpu.common.warps import for_one_warp
from ejkernel.kernels.pallas.gpu.flash_attention.backward_dq import (
    BLOCK_Q,
    SHAPE,
    Program,
    probabilities,
)
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import Plan
from ejkernel.kernels.pallas.gpu.flash_attention.backward_walk import CONSUMERS, ROWS, launch

K_STAGES, V_STAGES = 3, 2  # blocks in flight; those of v are given back first


def queue_gradient(plan: Plan, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """As ``query_gradient``."""
    problem = plan.problem
    dtype, dim = jnp.dtype(problem.dtype), problem.dim
    count = problem.batch * problem.heads * plan.n_q
    finds_delta = "delta" not in operands
    rows_of = (("q", "q_s"), ("do", "do_s"), *((("o", "o_s"),) if finds_delta else ()))
    less = "dlse" if finds_delta else "delta"
    arrivals = len(rows_of) + 2  # and lse, and delta or dlse

    def consume(r: Any, _: None, wg: Any) -> None:
        rows = pl.ds(wg * ROWS, ROWS)

        def one_block(carry: Any) -> Any:
            place, before = carry
            program = Program(plan, r, place)
            first_q = program.block * BLOCK_Q + wg * ROWS
            at = (program.batch, program.head, pl.ds(first_q, ROWS))
            q, do = (read(x.at[rows], LAYOUT) for x in (r.q_s, r.do_s))
            lse, delta = (read(x.at[rows], ROW) for x in (r.lse_s, r.delta_s))
            if finds_delta:
                o = read(r.o_s.at[rows], LAYOUT)
                delta = delta - jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=1)
            plgpu.barrier_arrive(r.q_empty)
            if finds_delta:
                r.less_s.at[rows][...] = delta
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(r.less_s.at[rows], r.less.at[at])

            def accumulate(dq_acc: Any) -> Any:
                def step(j: Any, n: Any, masked: Any) -> None:
                    n = n + before
                    slot, v_slot = lax.rem(n, K_STAGES), lax.rem(n, V_STAGES)
                    plgpu.barrier_wait(r.k_full.at[slot])
                    plgpu.barrier_wait(r.v_full.at[v_slot])

                    def products(s_acc: Any, dp_acc: Any) -> jax.Array:
                        dp_acc[...] = spread(delta, SHAPE, 0)
                        plgpu.wgmma(s_acc, q, r.k_s.at[slot].T)
                        plgpu.wgmma(dp_acc, do, r.v_s.at[v_slot].T)
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

                        @pl.when(n > 0)  # the dq of the step before is done with its block
                        def _() -> None:
                            plgpu.barrier_arrive(r.k_empty.at[lax.rem(n + K_STAGES - 1, K_STAGES)])

                        p = probabilities(plan, r, program, lse, first_q, s, j, masked)
                        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                        plgpu.barrier_arrive(r.v_empty.at[v_slot])
                        return (p * dp).astype(dtype)

                    ds = pl.run_scoped(products, plgpu.ACC(SHAPE), plgpu.ACC(SHAPE))
                    plgpu.wgmma(dq_acc, ds, r.k_s.at[slot])

                steps = program.walk(step)
                plgpu.wgmma_wait(0)
                return dq_acc[...], steps

            dq, steps = pl.run_scoped(accumulate, plgpu.ACC((ROWS, dim)))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out = r.dq_s.at[rows]
            out[...] = (dq * problem.scale).astype(dtype)
            plgpu.commit_smem()
            place = (program.batch, pl.ds(first_q, ROWS), program.head)
            plgpu.copy_smem_to_gmem(out, r.dq.at[place])
            plgpu.barrier_wait(r.q_full)
            return r.place_s[0], before + steps

        plgpu.barrier_wait(r.q_full)
        lax.while_loop(lambda carry: carry[0] >= 0, one_block, (r.place_s[0], jnp.int32(0)))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def produce(r: Any, counter: Any) -> None:
        def following() -> Any:
            ticket = taken_by_warp(counter)
            place = r.order[0, lax.min(ticket, count - 1)]
            return lax.select(ticket < count, place, -1)

        def one_block(carry: Any) -> Any:
            place, i, before = carry
            program = Program(plan, r, place)
            pl.when(i > 0)(lambda: plgpu.barrier_wait(r.q_empty))
            r.place_s[0] = place
            rows = pl.ds(program.block * BLOCK_Q, BLOCK_Q)
            for name, smem in rows_of:
                at = (program.batch, rows, program.head)
                plgpu.copy_gmem_to_smem(getattr(r, name).at[at], getattr(r, smem), r.q_full)
            for name, smem in (("lse", r.lse_s), (less, r.delta_s)):
                at = (program.batch, program.head, rows)
                plgpu.copy_gmem_to_smem(getattr(r, name).at[at], smem, r.q_full)

            def step(j: Any, n: Any, masked: Any) -> None:
                del masked
                n = n + before
                at = (program.batch, pl.ds(j * ROWS, ROWS), program.kv_head)
                for tile, tile_s, full, empty, stages in (
                    (r.k, r.k_s, r.k_full, r.k_empty, K_STAGES),
                    (r.v, r.v_s, r.v_full, r.v_empty, V_STAGES),
                ):
                    slot = lax.rem(n, stages)

                    @pl.when(n >= stages)
                    def _(empty: Any = empty, slot: Any = slot) -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    plgpu.copy_gmem_to_smem(tile.at[at], tile_s.at[slot], full.at[slot])

            steps = program.walk(step)
            return following(), i + 1, before + steps

        zero = jnp.int32(0)
        _, i, _ = lax.while_loop(lambda carry: carry[0] >= 0, one_block, (following(), zero, zero))
        pl.when(i > 0)(lambda: plgpu.barrier_wait(r.q_empty))
        r.place_s[0] = jnp.int32(-1)
        for _ in range(arrivals):
            plgpu.barrier_arrive(r.q_full)

    def move(r: Any, _: None, wg: Any) -> None:
        counter = pl.get_global(plgpu.SemaphoreType.REGULAR((1,)))
        for_one_warp(lambda: produce(r, counter))

    barrier = plgpu.Barrier
    sums = plgpu.SMEM((BLOCK_Q,), jnp.float32)
    scratch = {
        **{smem: tiled((BLOCK_Q, dim), dtype) for _, smem in rows_of},
        "dq_s": tiled((BLOCK_Q, dim), dtype),
        "k_s": tiled((K_STAGES, ROWS, dim), dtype),
        "v_s": tiled((V_STAGES, ROWS, dim), dtype),
        "lse_s": sums,
        "delta_s": sums,
        **({"less_s": sums} if finds_delta else {}),
        "place_s": plgpu.SMEM((1,), jnp.int32),
        "q_full": barrier(num_arrivals=arrivals),
        "q_empty": barrier(num_arrivals=CONSUMERS),
        **{
            name + end: barrier(num_arrivals=arrivals, num_barriers=stages)
            for name, stages in (("k", K_STAGES), ("v", V_STAGES))
            for end, arrivals in (("_full", 1), ("_empty", CONSUMERS))
        },
    }
    shape = (problem.batch, whole_rows(problem.q_len), problem.heads, dim)
    outputs = {"dq": jax.ShapeDtypeStruct(shape, dtype)}
    if finds_delta:
        all_rows = (problem.batch, problem.heads, plan.n_q * BLOCK_Q)
        outputs["less"] = jax.ShapeDtypeStruct(all_rows, jnp.float32)
    name = "flash_attention_backward_dq"
    programs = min(plan.cores, count)
    dq, *found = launch(name, programs, lambda r: None, [consume], move, operands, outputs, scratch)
    return dq[:, : problem.q_len], *found

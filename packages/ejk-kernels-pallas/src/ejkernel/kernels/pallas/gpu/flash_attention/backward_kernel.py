"""The fused backward kernel: dq, dk and dv in one walk over the tiles, five products a tile.

Over lists dq is a kernel of its own: key blocks meet at a query block in no order there, and turns
to add to dq would be waited for (measured: 0.96 ms for 0.57 ms of work).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.common.units import scale
from ejkernel.kernels.pallas.compat import untracked
from ejkernel.kernels.pallas.gpu.common.masks import (
    COLUMN,
    read,
    spread,
)
from ejkernel.kernels.pallas.gpu.common.tma import tiled, whole_rows
from ejkernel.kernels.pallas.gpu.common.warps import for_each_warp, thread_anew
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import Plan
from ejkernel.kernels.pallas.gpu.flash_attention.backward_walk import ROWS, Program, hidden_pairs
from ejkernel.types.problem import LOG2E

CONSUMERS = 2
CONSUMER_REGISTERS, OTHER_REGISTERS = 240, 24


def build(plan: Plan) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """The kernel call: (q, k, v, do, lse, delta, *tables, *bits, *ids) -> (dq, dk, dv).

    Over lists, (dk, dv).

    ``lse`` and ``delta`` are float32 ``[batch, heads, whole q blocks]`` and enter negated, so that
    sums can start from them: -delta, and -lse as ``units`` counts (``plan.lse_in_sum``: then two
    operands more, int32 ``[batch, heads]`` and rows that are added to sums where it is not 0) or
    in base 2;
    such that the logit is -inf in rows that see nothing and rows past the end. Ids are padded to
    whole blocks, other lengths to eight rows, of dk and dv too. dq is float32
    ``[batch, whole q blocks, heads, dim]``, not scaled, unwritten where no key block visits; dk
    and dv are float32 too where heads share k and v.
    """
    problem, tiles = plan.problem, plan.tiles
    dtype = jnp.dtype(problem.dtype)
    block_q, block_kv, stages = tiles.block_q, tiles.block_kv, tiles.stages
    dim, value_dim = problem.dim, problem.value_dim
    shape = (ROWS, block_q)
    # a warpgroup computes half of dq: half of the rows of a tall tile, else of the columns
    by_rows = block_q == CONSUMERS * ROWS
    dq_columns = dim if by_rows else dim // CONSUMERS
    kv_tail = problem.kv_len % block_kv != 0

    def body(*refs: Any) -> None:
        q, k, v, do, lse, delta, *rest = refs
        large: Any = None
        late: Any = None
        ranges = visitors = None
        if plan.lse_in_sum:
            large, late, *rest = rest
        if plan.listed:
            ranges, *rest = rest
        elif not plan.circular:
            ranges, visitors, *rest = rest
        bits: Any = None
        if plan.bits:
            bits, *rest = rest
        ids = ()
        if plan.ids:
            *ids, rest = rest[0], rest[1], rest[2:]
        dq: Any = None
        ds_s: Any = None
        if not plan.listed:
            dq, *rest = rest
        dk, dv, k_s, v_s, q_s, do_s, lse_s, delta_s, dq_s, *barriers = rest
        if not plan.listed:
            ds_s, *barriers = barriers
        kv_full, q_full, do_full, q_empty, do_empty, ds_full, dq_full, dq_empty, done = barriers
        n_turns = plan.n_q + (plan.n_kv if plan.shares else 0)
        turns = pl.get_global(plgpu.SemaphoreType.REGULAR((problem.batch, problem.heads, n_turns)))
        wg = lax.axis_index("wg")
        program = Program(plan, ranges, visitors)
        b, h, j = program.batch, program.head, program.block

        @pl.when(wg < CONSUMERS)
        def _consume() -> None:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            plgpu.barrier_wait(kv_full)
            rows = pl.ds(wg * ROWS, ROWS)
            first_row = j * block_kv + wg * ROWS

            some_large = large is not None and large[b, h] != 0

            def less_lse(s: jax.Array, i: Any) -> jax.Array:
                row = late.at[b, h, pl.ds(i * block_q, block_q)]
                return s + spread(read(row, COLUMN, optimized=False), shape, 1)

            def logits(s: jax.Array, i: Any, masked: Any) -> tuple[jax.Array, jax.Array | None]:
                tanh = None
                if problem.soft_cap is None:
                    s = lax.cond(some_large, lambda s: less_lse(s, i), lambda s: s, s)
                    x = s * (scale(problem) * LOG2E)
                else:
                    tanh = jnp.tanh(s * (problem.scale / problem.soft_cap))
                    x = tanh * (problem.soft_cap * LOG2E)
                if kv_tail:
                    masked = (j == plan.n_kv - 1) | masked
                if masked is not False:
                    hide = hidden_pairs(plan, program, ids, bits, first_row, i)
                    x = lax.cond(masked, hide, lambda x: x, x)
                return x, tanh

            def accumulate(dk_acc: Any, dv_acc: Any) -> tuple[jax.Array, jax.Array]:
                def step(i: Any, n: Any, masked: Any) -> None:
                    slot, ds_slot = lax.rem(n, stages), lax.rem(n, 2)
                    thread = thread_anew()
                    here = lax.div(thread, 128)
                    mine = pl.ds(here * ROWS, ROWS)

                    def key_side(s_acc: Any, dp_acc: Any) -> None:
                        plgpu.barrier_wait(q_full.at[slot])
                        plgpu.barrier_wait(do_full.at[slot])
                        if plan.lse_in_sum:
                            row_lse = read(lse_s.at[slot], COLUMN)
                            s_acc[...] = spread(row_lse, shape, 1)
                        row_delta = read(delta_s.at[slot], COLUMN)
                        dp_acc[...] = spread(row_delta, shape, 1)
                        plgpu.wgmma(s_acc, k_s.at[mine], q_s.at[slot].T)
                        plgpu.wgmma(dp_acc, v_s.at[mine], do_s.at[slot].T)
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                        if plan.listed:

                            @pl.when(n > 0)  # dk and dv of the step before are done with its tiles
                            def _() -> None:
                                before = lax.rem(n + stages - 1, stages)
                                plgpu.barrier_arrive(q_empty.at[before])
                                plgpu.barrier_arrive(do_empty.at[before])

                        x, tanh = logits(s, i, masked)
                        if not plan.lse_in_sum:
                            row_lse = read(lse_s.at[slot], COLUMN)
                            x = x + spread(row_lse, shape, 1)
                        p = jnp.exp2(x)
                        plgpu.wgmma(dv_acc, p.astype(dtype), do_s.at[slot])
                        ds = p * plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                        if tanh is not None:
                            ds = ds * (1.0 - tanh * tanh)
                        ds = ds.astype(dtype)
                        if plan.listed:
                            plgpu.wgmma(dk_acc, ds, q_s.at[slot])
                            return
                        # the other slot may still be read for the dq of the step before
                        ds_s.at[ds_slot, rows][...] = ds
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(ds_full)
                        plgpu.wgmma(dk_acc, ds, q_s.at[slot])
                        plgpu.barrier_wait(ds_full)

                    pl.run_scoped(key_side, plgpu.ACC(shape), plgpu.ACC(shape))
                    if plan.listed:
                        return

                    def query_side(dq_acc: Any) -> None:
                        if by_rows:
                            ds = ds_s.at[ds_slot, :, mine]
                            keys = k_s.at[pl.ds(lax.div(thread, 1024) * ROWS, block_kv)]
                        else:
                            columns = pl.ds(here * dq_columns, dq_columns)
                            ds, keys = ds_s.at[ds_slot], k_s.at[:, columns]
                        plgpu.wgmma(dq_acc, ds.T, keys)
                        part = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
                        plgpu.barrier_arrive(q_empty.at[slot])
                        plgpu.barrier_arrive(do_empty.at[slot])

                        @pl.when(n > 0)
                        def _() -> None:
                            plgpu.barrier_wait(dq_empty)

                        dq_s.at[wg][...] = part
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(dq_full)

                    pl.run_scoped(query_side, plgpu.ACC((ROWS, dq_columns)))

                steps = program.walk(step)
                plgpu.wgmma_wait(0)
                if plan.shares and not plan.listed:  # the writer must have read the last part of dq
                    pl.when(steps > 0)(lambda: plgpu.barrier_wait(dq_empty))
                return dk_acc[...], dv_acc[...]

            dk_sum, dv_sum = pl.run_scoped(
                accumulate, plgpu.ACC((ROWS, dim)), plgpu.ACC((ROWS, value_dim))
            )
            sums = ((dk_sum * problem.scale, k_s, dk), (dv_sum, v_s, dv))
            out = (b, pl.ds(first_row, ROWS), program.kv_head)

            def add() -> None:
                """Each head that shares k and v adds its part, one after the other."""
                mine = turns.at[b, program.kv_head * problem.group, plan.n_q + j]
                before = CONSUMERS * program.sharer
                plgpu.semaphore_wait(mine, before, decrement=False, memory_scope="gpu")
                for total, _, ref in sums:
                    for c in range(0, total.shape[1], dq_columns):
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        dq_s.at[wg][...] = total[:, c : c + dq_columns]
                        plgpu.commit_smem()
                        part = ref.at[*out, pl.ds(c, dq_columns)]
                        send = functools.partial(plgpu.copy_smem_to_gmem, dq_s.at[wg], part)
                        pl.when(before == 0)(send)
                        pl.when(before > 0)(functools.partial(send, reduction_op="add"))
                plgpu.wait_smem_to_gmem(0)
                plgpu.semaphore_signal(mine, 1, memory_scope="gpu")

            def write_whole() -> None:
                # both warpgroups read all of k for dq: its place is free when both are through
                plgpu.barrier_arrive(done)
                plgpu.barrier_wait(done)
                for total, staged, _ in sums:
                    staged.at[rows][...] = total.astype(dtype)
                plgpu.commit_smem()
                for _, staged, ref in sums:
                    plgpu.copy_smem_to_gmem(staged.at[rows], ref.at[out])
                plgpu.wait_smem_to_gmem(0)

            add() if plan.shares else write_whole()

        def produce() -> None:
            at = (b, pl.ds(j * block_kv, block_kv), program.kv_head)
            plgpu.copy_gmem_to_smem(k.at[at], k_s, kv_full)
            plgpu.copy_gmem_to_smem(v.at[at], v_s, kv_full)

            def step(i: Any, n: Any, masked: Any) -> None:
                del masked
                slot = lax.rem(n, stages)
                at = pl.ds(i * block_q, block_q)

                @pl.when(n >= stages)
                def _() -> None:
                    plgpu.barrier_wait(q_empty.at[slot])

                plgpu.copy_gmem_to_smem(q.at[b, at, h], q_s.at[slot], q_full.at[slot])
                plgpu.copy_gmem_to_smem(lse.at[b, h, at], lse_s.at[slot], q_full.at[slot])

                @pl.when(n >= stages)
                def _() -> None:
                    plgpu.barrier_wait(do_empty.at[slot])

                plgpu.copy_gmem_to_smem(do.at[b, at, h], do_s.at[slot], do_full.at[slot])
                plgpu.copy_gmem_to_smem(delta.at[b, h, at], delta_s.at[slot], do_full.at[slot])

            program.walk(step)

        def write() -> None:
            def step(i: Any, n: Any, masked: Any) -> None:
                del n, masked
                turn = program.turn(i)

                def part(c: int) -> Any:
                    if by_rows:
                        return dq.at[b, pl.ds(i * block_q + c * ROWS, ROWS), h]
                    return dq.at[b, pl.ds(i * block_q, ROWS), h, pl.ds(c * dq_columns, dq_columns)]

                def send(**how: Any) -> None:
                    for c in range(CONSUMERS):
                        commit = c == CONSUMERS - 1
                        plgpu.copy_smem_to_gmem(dq_s.at[c], part(c), commit_group=commit, **how)

                plgpu.barrier_wait(dq_full)
                plgpu.semaphore_wait(turns.at[b, h, i], turn, decrement=False, memory_scope="gpu")

                @pl.when(turn == 0)
                def _() -> None:
                    send()

                @pl.when(turn > 0)
                def _() -> None:
                    send(reduction_op="add")

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(dq_empty)
                plgpu.wait_smem_to_gmem(0)
                plgpu.semaphore_signal(turns.at[b, h, i], 1, memory_scope="gpu")

            program.walk(step)

        @pl.when(wg == CONSUMERS)
        def _move() -> None:
            plgpu.set_max_registers(OTHER_REGISTERS, action="decrease")

            def warp(index: Any) -> None:
                pl.when(index == 0)(produce)
                if not plan.listed:
                    pl.when(index == 1)(write)

            for_each_warp(warp)

    barrier = plgpu.Barrier
    staged = plan.shares or not plan.listed  # sums that leave part by part
    scratch = [
        tiled((block_kv, dim), dtype),
        tiled((block_kv, value_dim), dtype),
        tiled((stages, block_q, dim), dtype),
        tiled((stages, block_q, value_dim), dtype),
        plgpu.SMEM((stages, block_q), jnp.float32),
        plgpu.SMEM((stages, block_q), jnp.float32),
        tiled((CONSUMERS, ROWS, dq_columns if staged else 32), jnp.float32),
        *([] if plan.listed else [tiled((2, block_kv, block_q), dtype)]),
        barrier(num_arrivals=2),  # k and v
        barrier(num_arrivals=2, num_barriers=stages),  # q and lse
        barrier(num_arrivals=2, num_barriers=stages),  # do and delta
        barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        barrier(num_arrivals=CONSUMERS),
        barrier(num_arrivals=CONSUMERS),
        barrier(num_arrivals=1),
        barrier(num_arrivals=CONSUMERS),
    ]
    kv_shape = (problem.batch, whole_rows(problem.kv_len), problem.kv_heads)
    sum_dtype = jnp.float32 if plan.shares else dtype
    out = (
        jax.ShapeDtypeStruct((problem.batch, plan.n_q * block_q, problem.heads, dim), jnp.float32),
        jax.ShapeDtypeStruct((*kv_shape, dim), sum_dtype),
        jax.ShapeDtypeStruct((*kv_shape, value_dim), sum_dtype),
    )
    out = out[1:] if plan.listed else out
    kernel = plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        grid=(problem.batch * problem.heads * plan.n_kv,),
        grid_names=("item",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        kernel_name="flash_attention_backward" + ("_dkv" if plan.listed else ""),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    return untracked(kernel, out)

"""The steps of the fused backward kernel, with probabilities computed a step ahead.

A step begins with the probabilities p of its block in registers. The logits s' of the next block
are multiplied before dk and dq of this one, and their exponentials run under those two matmuls:

    tensor cores  | dp  dv      | s'  dk  dq          | dp' dv'      | s" dk' dq'
    others        |       ds    |         p'  write dq|        ds'   |        p"

Registers decide the form. dk and dv take 64 of a thread at head dim 64, dp or s' another 64. p is
carried rounded to the operands' dtype, which dv takes anyway: in float32 it would take 64 instead
of 32, and spill. dv is waited for before s' is multiplied: else p is still read while ds is held,
and the assembler serializes all matmuls. So ds has one more rounding than in the other form; the
order of all additions is the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.registers import COLUMN, read, spread
from ejkernel.kernels.pallas.gpu.common.warps import read_thread
from ejkernel.kernels.pallas.gpu.flash_attention.backward_common import (
    ROWS,
    copy_side,
    dq_operands,
    hand_over,
    logits,
    wait_for_parts,
)
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import Plan


def thread_rows() -> tuple[jax.Array, jax.Array, Any]:
    """Returns the index of the thread, read again, its warpgroup's, and that one's 64 rows."""
    thread = read_thread()
    warpgroup = lax.div(thread, 128)
    return thread, warpgroup, pl.ds(warpgroup * ROWS, ROWS)


def copy_ahead(plan: Plan, r: Any, batch: Any, head: Any, i: Any, n: Any) -> None:
    """Copies block i of q with lse and do with delta for step n, once their buffers are free."""
    tiles = plan.tiles
    rows = pl.ds(i * tiles.block_q, tiles.block_q)
    for name, stages in (("q", tiles.q_buffers), ("do", tiles.stages)):
        copy_side(r, name, batch, head, rows, n, lax.rem(n, stages), stages)


def add_ahead(
    plan: Plan, r: Any, program: Any, wg: Any, adds_late: Any, dk_acc: Any, dv_acc: Any
) -> None:
    """Adds all query blocks of ``program`` to dk and dv, and hands over their parts of dq.

    ``adds_late``: see ``logits``. At the end all matmuls are done, and what was handed over is
    read.
    """
    tiles, problem = plan.tiles, plan.problem
    dtype, shape = jnp.dtype(problem.dtype), (ROWS, tiles.block_q)
    head, block = (program.batch, program.head), program.block
    first_row = block * tiles.block_kv + wg * ROWS
    steps, block_at = program.blocks()

    def multiply_keys(s_acc: Any, n: Any) -> None:
        """Starts the logits of step n, minus lse."""
        slot = lax.rem(n, tiles.q_buffers)
        *_, mine = thread_rows()
        plgpu.barrier_wait(r.q_full.at[slot])
        s_acc[...] = spread(read(r.neg_lse_smem.at[slot], COLUMN), shape, 1)
        plgpu.wgmma(s_acc, plan.keys(r, mine), r.q_smem.at[slot].T)

    def probabilities(s: jax.Array, n: Any) -> jax.Array:
        """Returns p of step n, whose do has been copied then."""
        i, masked = block_at(n)
        x, _ = logits(plan, r, head, block, first_row, adds_late, s, i, masked)
        p = jnp.exp2(x).astype(dtype)
        # a wait ends the basic block: the exponentials stay in front of the wait for dk and dq
        plgpu.barrier_wait(r.do_full.at[lax.rem(n, tiles.stages)])
        return p

    def first_probabilities(s_acc: Any) -> jax.Array:
        multiply_keys(s_acc, 0)
        return probabilities(plgpu.wgmma_accumulator_load(s_acc, wait_n=0), 0)

    def gradient_of_logits(n: Any, p: jax.Array, dp_acc: Any) -> jax.Array:
        """Returns ds of step n, also in shared memory, and adds to dv."""
        slot, (*_, mine) = lax.rem(n, tiles.stages), thread_rows()
        dp_acc[...] = spread(read(r.neg_delta_smem.at[slot], COLUMN), shape, 1)
        plgpu.wgmma(dp_acc, r.v_smem.at[mine], r.do_smem.at[slot].T)
        plgpu.wgmma(dv_acc, p, r.do_smem.at[slot])
        ds = (p.astype(jnp.float32) * plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)).astype(dtype)
        # the other slot may still be read for the dq of the step before
        r.ds_smem.at[lax.rem(n, 2), pl.ds(wg * ROWS, ROWS)][...] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(r.ds_full)
        plgpu.wgmma_wait(0)  # dv, whose operand gives up its registers
        plgpu.barrier_arrive(r.do_empty.at[slot])
        return ds

    def add_block(n: Any, p: jax.Array, ahead: bool) -> jax.Array:
        """Adds step n, whose probabilities are p; with ``ahead`` returns the p of the next."""
        ds = pl.run_scoped(lambda dp_acc: gradient_of_logits(n, p, dp_acc), plgpu.ACC(shape))

        def multiply_ds(*s_acc: Any) -> jax.Array:
            if ahead:
                multiply_keys(*s_acc, n + 1)
            plgpu.wgmma(dk_acc, ds, r.q_smem.at[lax.rem(n, tiles.q_buffers)])
            plgpu.barrier_wait(r.ds_full)

            def add_query_side(dq_acc: Any) -> jax.Array:
                plgpu.wgmma(dq_acc, *dq_operands(plan, r, lax.rem(n, 2), *thread_rows()))
                p2 = p
                if ahead:
                    s = plgpu.wgmma_accumulator_load(*s_acc, wait_n=2)
                    p2 = probabilities(s, n + 1)
                part = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
                plgpu.barrier_arrive(r.q_empty.at[lax.rem(n, tiles.q_buffers)])
                hand_over(plan, r, wg, n, part)
                return p2

            # allocated where it is used: its zeros would take registers before
            return pl.run_scoped(add_query_side, plgpu.ACC((ROWS, plan.dq_columns)))

        return pl.run_scoped(multiply_ds, plgpu.ACC(shape)) if ahead else multiply_ds()

    def add_all() -> None:
        p = pl.run_scoped(first_probabilities, plgpu.ACC(shape))
        p = lax.fori_loop(0, steps - 1, lambda n, p: add_block(n, p, True), p)
        add_block(steps - 1, p, False)
        if plan.shares_keys:  # whose parts go through the same memory
            wait_for_parts(plan, r, steps)

    if plan.circular:
        add_all()
    else:
        pl.when(steps > 0)(add_all)

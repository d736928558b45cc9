"""dk and dv of wide heads: one program owns 64 keys and loops over the query blocks that see them.

One consumer warpgroup computes the logits, their exponentials p and dv; the other dp, ds and dk.
p passes through shared memory. Each has 64 x 64 matmuls in flight during the arithmetic of the
other, and the accumulators, 64 x 256 float32, take half of the registers of a thread.

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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.masks import row_of
from ejkernel.kernels.pallas.gpu.common.registers import COLUMN, LAYOUT, read, spread
from ejkernel.kernels.pallas.gpu.common.tma import padded_rows, tiled
from ejkernel.kernels.pallas.gpu.common.warps import for_one_warp
from ejkernel.kernels.pallas.gpu.flash_attention.backward_common import (
    CONSUMERS,
    ROWS,
    BackwardKernel,
    base2,
    copy_step,
    for_each_visit,
    hide,
    launch_backward,
    needs_masks,
)
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import Plan

STAGES = 2
SHAPE = (ROWS, ROWS)  # keys by queries


class WideKeyProgram:
    """The key block of one program and the query blocks it visits."""

    def __init__(self, plan: Plan, r: Any) -> None:
        problem, blocks = plan.problem, plan.n_kv
        item = lax.axis_index("item")
        self.plan, self.table = plan, r.lists if plan.listed else r.ranges
        if plan.listed:
            item = r.order[0, item]
        self.block = lax.rem(item, blocks)
        heads = lax.div(item, blocks)
        self.kv_head = lax.rem(heads, problem.kv_heads)
        self.batch = lax.div(heads, problem.kv_heads)
        self.last = blocks - 1
        self.first_key = self.block * ROWS

    def for_each_block(self, step: Callable[..., None]) -> Any:
        """``step(head, query block, steps before, whether a mask is needed)``; counts the steps."""
        group = self.plan.problem.group

        def one_head(g: Any, count: Any) -> Any:
            h = self.kv_head * group + g
            at = (*row_of(self.table, self.batch, h), self.block)

            def visit(i: Any, n: Any, masked: Any) -> None:
                if self.plan.kv_tail:
                    masked = masked | (self.block == self.last)
                step(h, i, n, masked)

            if self.plan.listed:
                listed = lambda i, n, masked: visit(i, count + n, masked)  # noqa: E731
                return count + for_each_visit(self.table, at, listed)
            start, full_start, full_stop, stop = (self.table[*at, c] for c in range(4))

            def upwards(i: Any, carry: None) -> None:
                visit(i, count + i - start, (i < full_start) | (i >= full_stop))
                return carry

            length = lax.max(stop - start, 0)
            lax.fori_loop(start, start + length, upwards, None)
            return count + length

        if group == 1:
            return one_head(0, jnp.int32(0))
        return lax.fori_loop(0, group, one_head, jnp.int32(0))


@dataclass(frozen=True)
class WideKeyKernel(BackwardKernel):
    """The kernel of dk and dv of wide heads."""

    # ---- consumers --------------------------------------------------------------------------

    def compute_dv(self, r: Any, program: WideKeyProgram, wg: Any) -> None:
        """Computes p, hands it to the other warpgroup, and adds to dv."""
        problem = self.plan.problem
        plgpu.barrier_wait(r.k_full)

        def accumulate(dv_acc: Any) -> jax.Array:
            def add_block(h: Any, i: Any, n: Any, masked: Any) -> None:
                slot, p_slot = lax.rem(n, STAGES), lax.rem(n, 2)
                plgpu.barrier_wait(r.q_full.at[slot])

                def multiply_keys(acc: Any) -> jax.Array:
                    plgpu.wgmma(acc, r.k_smem, r.q_smem.at[slot].T)
                    plgpu.wgmma_wait(1)

                    @pl.when(n > 0)  # the dv of the step before is done with its tile
                    def _() -> None:
                        plgpu.barrier_arrive(r.do_empty.at[lax.rem(n + 1, STAGES)])

                    return plgpu.wgmma_accumulator_load(acc, wait_n=0)

                s = pl.run_scoped(multiply_keys, plgpu.ACC(SHAPE))
                p, slope = self.probabilities(r, program, slot, s, h, i, masked)
                plgpu.barrier_arrive(r.q_empty.at[slot])
                passed = p if slope is None else p * slope
                p = p.astype(self.dtype)

                @pl.when(n >= 2)
                def _() -> None:
                    plgpu.barrier_wait(r.p_empty.at[p_slot])

                r.p_smem.at[p_slot][...] = passed.astype(self.dtype)
                plgpu.barrier_arrive(r.p_full.at[p_slot])
                plgpu.barrier_wait(r.do_full.at[slot])
                plgpu.wgmma(dv_acc, p, r.do_smem.at[slot])

            program.for_each_block(add_block)
            plgpu.wgmma_wait(0)
            return dv_acc[...]

        dv = pl.run_scoped(accumulate, plgpu.ACC((ROWS, problem.value_dim)))
        # only this warpgroup reads k
        staged = r.k_smem if problem.value_dim == problem.dim else r.dv_smem
        self.store(program, staged, dv, r.dv)

    def probabilities(
        self, r: Any, program: WideKeyProgram, slot: Any, s: jax.Array, h: Any, i: Any, masked: Any
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns p of query block i from its dot products, and the slope of a cap."""
        plan = self.plan
        neg_lse = spread(read(r.neg_lse_smem.at[slot], COLUMN), SHAPE, 1)
        x, slope = base2(plan.problem, s, neg_lse)
        if needs_masks(plan, r):
            at = ((program.batch, h), i * ROWS, program.first_key, (program.block, i))
            x = lax.cond(masked, lambda x: hide(plan, r, x, *at, by_key=True), lambda x: x, x)
        return jnp.exp2(x), slope

    def compute_dk(self, r: Any, program: WideKeyProgram, wg: Any) -> None:
        """Computes ds from the p of the other warpgroup, and adds to dk."""
        problem = self.plan.problem
        plgpu.barrier_wait(r.v_full)

        def accumulate(dk_acc: Any) -> tuple[jax.Array, jax.Array]:
            def add_block(h: Any, i: Any, n: Any, masked: Any) -> None:
                slot, p_slot = lax.rem(n, STAGES), lax.rem(n, 2)
                plgpu.barrier_wait(r.do_full.at[slot])

                def multiply_values(acc: Any) -> jax.Array:
                    plgpu.wgmma(acc, r.v_smem, r.do_smem.at[slot].T)
                    plgpu.wgmma_wait(1)

                    @pl.when(n > 0)  # the dk of the step before is done with its tile
                    def _() -> None:
                        plgpu.barrier_arrive(r.q_empty.at[lax.rem(n + 1, STAGES)])

                    return plgpu.wgmma_accumulator_load(acc, wait_n=0)

                dp = pl.run_scoped(multiply_values, plgpu.ACC(SHAPE))
                dp = dp + spread(read(r.neg_delta_smem.at[slot], COLUMN), SHAPE, 1)
                plgpu.barrier_arrive(r.do_empty.at[slot])
                plgpu.barrier_wait(r.p_full.at[p_slot])
                p = read(r.p_smem.at[p_slot], LAYOUT)
                ds = (p.astype(jnp.float32) * dp).astype(self.dtype)
                plgpu.barrier_arrive(r.p_empty.at[p_slot])
                plgpu.barrier_wait(r.q_full.at[slot])
                plgpu.wgmma(dk_acc, ds, r.q_smem.at[slot])

            steps = program.for_each_block(add_block)
            plgpu.wgmma_wait(0)
            return dk_acc[...], steps

        dk, steps = pl.run_scoped(accumulate, plgpu.ACC((ROWS, problem.dim)))
        # the last step's tile of q: the other warpgroup was done with it before it passed p
        staged = r.q_smem.at[lax.rem(steps + 1, STAGES)]
        self.store(program, staged, dk * problem.scale, r.dk)

    def store(self, program: WideKeyProgram, staged: Any, total: jax.Array, target: Any) -> None:
        """Stores dk or dv through shared memory that nobody reads any more."""
        staged[...] = total.astype(self.dtype)
        plgpu.commit_smem()
        rows = pl.ds(program.first_key, ROWS)
        plgpu.copy_smem_to_gmem(staged, target.at[program.batch, rows, program.kv_head])
        plgpu.wait_smem_to_gmem(0)

    # ---- producer ---------------------------------------------------------------------------

    def move(self, r: Any, program: WideKeyProgram, wg: Any) -> None:
        """Runs the warp that copies operands."""
        for_one_warp(lambda: self.produce(r, program))

    def produce(self, r: Any, program: WideKeyProgram) -> None:
        """Copies the key block, then the query blocks that see it."""
        b = program.batch
        keys = pl.ds(program.first_key, ROWS)
        plgpu.copy_gmem_to_smem(r.k.at[b, keys, program.kv_head], r.k_smem, r.k_full)
        plgpu.copy_gmem_to_smem(r.v.at[b, keys, program.kv_head], r.v_smem, r.v_full)

        def copy_block(h: Any, i: Any, n: Any, masked: Any) -> None:
            del masked
            copy_step(r, b, h, i, n, ROWS, STAGES)

        program.for_each_block(copy_block)

    # ---- launch -----------------------------------------------------------------------------

    def scratch(self) -> dict[str, Any]:
        """Returns shared memory and barriers by name, in the order of their addresses."""
        dim, value_dim = self.plan.problem.dim, self.plan.problem.value_dim
        barrier, dtype = plgpu.Barrier, self.dtype
        dv = {} if value_dim == dim else {"dv_smem": tiled((ROWS, value_dim), dtype)}
        return {
            "neg_delta_smem": plgpu.SMEM((STAGES, ROWS), jnp.float32),
            "do_empty": barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
            "do_full": barrier(num_arrivals=2, num_barriers=STAGES),  # do and neg_delta
            "do_smem": tiled((STAGES, ROWS, value_dim), dtype),
            **dv,
            "k_full": barrier(),
            "k_smem": tiled((ROWS, dim), dtype),
            "neg_lse_smem": plgpu.SMEM((STAGES, ROWS), jnp.float32),
            "p_empty": barrier(num_barriers=2),
            "p_full": barrier(num_barriers=2),
            "p_smem": tiled((2, ROWS, ROWS), dtype),
            "q_empty": barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
            "q_full": barrier(num_arrivals=2, num_barriers=STAGES),  # q and neg_lse
            "q_smem": tiled((STAGES, ROWS, dim), dtype),
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
        p = self.plan.problem
        return launch_backward(
            "flash_attention_backward_dkv",
            p.batch * p.kv_heads * self.plan.n_kv,
            functools.partial(WideKeyProgram, self.plan),
            [self.compute_dv, self.compute_dk],
            self.move,
            operands,
            self.outputs(),
            self.scratch(),
        )

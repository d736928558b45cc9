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
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.masks import row_of
from ejkernel.kernels.pallas.gpu.common.registers import LAYOUT, ROW, read, spread
from ejkernel.kernels.pallas.gpu.common.tma import padded_rows, tiled
from ejkernel.kernels.pallas.gpu.common.warps import read_thread
from ejkernel.kernels.pallas.gpu.flash_attention.backward_common import (
    CONSUMERS,
    ROWS,
    PersistentKernel,
    base2,
    hide,
    launch_backward,
    needs_masks,
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


class QueryUnit:
    """Work unit (batch, head, block): a query block and the key blocks it visits."""

    def __init__(self, plan: Plan, r: Any, unit: Any) -> None:
        problem, blocks = plan.problem, plan.n_q
        self.plan, self.table = plan, r.lists if plan.listed else r.ranges
        if plan.listed:
            self.block, heads = lax.rem(unit, blocks), lax.div(unit, blocks)
        else:  # under a causal mask the last rows take longest: they go first
            heads, rank = plan.unit_at(unit, problem.batch * problem.heads, by_key=False)
            self.block = blocks - 1 - rank
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


class QueryRows(NamedTuple):
    """The 64 query rows of a consumer warpgroup in a work unit.

    Attributes:
        first_q: the first row.
        neg_lse, neg_delta: float32 of each row.
        in_registers: q and do, or empty where they are read from shared memory.
    """

    first_q: Any
    neg_lse: Any
    neg_delta: Any
    in_registers: list[Any]


@dataclass(frozen=True)
class QueryGradientKernel(PersistentKernel):
    """The kernel of dq.

    Attributes:
        computes_delta: whether o and dlse are operands, and -delta is a result.
    """

    computes_delta: bool

    @property
    def units(self) -> int:
        """Work units of the call."""
        return self.plan.problem.batch * self.plan.problem.heads * self.plan.n_q

    @property
    def holds(self) -> bool:
        """Returns whether q and do stay in registers."""
        return holds_rows(self.plan.problem)

    @property
    def tiles_of_rows(self) -> dict[str, int]:
        """Columns of the tiles that come with the rows of a unit, by name."""
        p = self.plan.problem
        widths = {"q": p.dim, "do": p.value_dim}
        return widths | ({"o": p.value_dim} if self.computes_delta else {})

    @property
    def row_values(self) -> tuple[str, str]:
        """Names of the values of each row; in shared memory the work unit follows them."""
        return "neg_lse", "dlse" if self.computes_delta else "neg_delta"

    @property
    def row_copies(self) -> int:
        """Copies of the rows of a unit."""
        return len(self.tiles_of_rows) + len(self.row_values)

    # ---- consumers --------------------------------------------------------------------------

    def next_unit(self, r: Any) -> Any:
        """Returns the work unit of the next rows, once they have arrived; -1 after the last."""
        plgpu.barrier_wait(r.q_full)
        return r.rows_smem[len(self.row_values), 0].astype(jnp.int32)

    def consume(self, r: Any, _: None, wg: Any) -> None:
        """Computes and stores dq of 64 rows of one unit after the other."""
        plan, problem = self.plan, self.plan.problem
        rows = pl.ds(wg * ROWS, ROWS)
        # only this warpgroup reads these rows
        out = (r.dq_smem if self.holds else r.q_smem).at[rows]

        def compute_unit(carry: Any) -> Any:
            index, before = carry
            unit = QueryUnit(plan, r, index)
            query_rows = self.load_rows(r, unit, wg, rows)

            def accumulate(dq_acc: Any) -> Any:
                add_block = functools.partial(self.add_block, r, unit, query_rows, before, dq_acc)
                steps = unit.for_each_block(add_block)
                plgpu.wgmma_wait(0)
                return dq_acc[...], steps

            dq, steps = pl.run_scoped(accumulate, plgpu.ACC((ROWS, problem.dim)))
            if self.holds:  # the previous dq is stored
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out[...] = (dq * problem.scale).astype(self.dtype)
            plgpu.commit_smem()
            target = (unit.batch, pl.ds(query_rows.first_q, ROWS), unit.head)
            plgpu.copy_smem_to_gmem(out, r.dq.at[target])
            if not self.holds:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(r.q_empty)
            return self.next_unit(r), before + steps

        start = self.next_unit(r), jnp.int32(0)
        lax.while_loop(lambda carry: carry[0] >= 0, compute_unit, start)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def load_rows(self, r: Any, unit: QueryUnit, wg: Any, rows: Any) -> QueryRows:
        """Loads what stays in registers during a unit; stores -delta where it is computed."""
        first_q = unit.block * BLOCK_Q + wg * ROWS
        at = (unit.batch, unit.head, pl.ds(first_q, ROWS))
        neg_lse, neg_delta = (read(r.rows_smem.at[n, rows], ROW) for n in range(2))
        q_and_do = [read(x.at[rows], LAYOUT) for x in (r.q_smem, r.do_smem)] if self.holds else []
        if self.computes_delta:
            o, do = read(r.o_smem.at[rows], LAYOUT), q_and_do[1]
            # the second row value is dlse here
            do_o = o.astype(jnp.float32) * do.astype(jnp.float32)
            neg_delta = neg_delta - jnp.sum(do_o, axis=1)
        if self.holds:
            plgpu.barrier_arrive(r.q_empty)
        if self.computes_delta:
            r.neg_delta_smem.at[rows][...] = neg_delta
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(r.neg_delta_smem.at[rows], r.neg_delta.at[at])
        return QueryRows(first_q, neg_lse, neg_delta, q_and_do)

    def add_block(
        self, r: Any, unit: QueryUnit, query_rows: QueryRows, before: Any, dq_acc: Any, j: Any,
        n: Any, masked: Any,
    ) -> None:  # fmt: skip
        """Adds key block j, step n of the unit, to dq; ``before``: steps of earlier units."""
        k_stages, v_stages = in_flight(self.plan.problem)
        n = n + before
        slot, v_slot = lax.rem(n, k_stages), lax.rem(n, v_stages)
        left: list[Any] = query_rows.in_registers
        v_index = v_slot
        if not self.holds:
            thread = read_thread()
            mine = pl.ds(lax.div(thread, 128) * ROWS, ROWS)
            left = [r.q_smem.at[mine], r.do_smem.at[mine]]
            v_index = v_slot if v_stages > 1 else lax.div(thread, 1024)

        def multiply_keys(s_acc: Any) -> None:
            plgpu.wgmma(s_acc, left[0], r.k_smem.at[slot].T)

        def gradient_of_logits(s_acc: Any, dp_acc: Any) -> jax.Array:
            """Returns ds, once the matmul of do and v is complete."""
            plgpu.wgmma(dp_acc, left[1], r.v_smem.at[v_index].T)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

            @pl.when(n > 0)  # the dq of the step before is done with its block
            def _() -> None:
                last = lax.rem(n + k_stages - 1, k_stages)
                plgpu.barrier_arrive(r.k_empty.at[last])

            p = self.probabilities(r, unit, query_rows, s, j, masked)
            dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
            plgpu.barrier_arrive(r.v_empty.at[v_slot])
            if not self.holds:
                dp = dp + spread(query_rows.neg_delta, SHAPE, 0)
            return (p * dp).astype(self.dtype)

        def with_keys_and_values(s_acc: Any, dp_acc: Any) -> jax.Array:
            dp_acc[...] = spread(query_rows.neg_delta, SHAPE, 0)
            multiply_keys(s_acc)
            return gradient_of_logits(s_acc, dp_acc)

        def with_keys(s_acc: Any) -> jax.Array:
            """Waits for v last; an accumulator that begins here is not zeroed first."""
            multiply_keys(s_acc)
            plgpu.barrier_wait(r.v_full.at[v_slot])
            return pl.run_scoped(functools.partial(gradient_of_logits, s_acc), plgpu.ACC(SHAPE))

        plgpu.barrier_wait(r.k_full.at[slot])
        if self.holds:
            plgpu.barrier_wait(r.v_full.at[v_slot])
            ds = pl.run_scoped(with_keys_and_values, plgpu.ACC(SHAPE), plgpu.ACC(SHAPE))
        else:
            ds = pl.run_scoped(with_keys, plgpu.ACC(SHAPE))
        plgpu.wgmma(dq_acc, ds, r.k_smem.at[slot])

    def probabilities(
        self, r: Any, unit: QueryUnit, query_rows: QueryRows, s: jax.Array, j: Any, masked: Any
    ) -> jax.Array:
        """Returns p of key block j from its dot products, times the slope of a cap."""
        plan, first_q = self.plan, query_rows.first_q
        x, slope = base2(plan.problem, s, spread(query_rows.neg_lse, SHAPE, 0))
        if needs_masks(plan, r):
            first_key = j * ROWS
            word = (lax.div(first_q, ROWS), j)
            at = ((unit.batch, unit.head), first_q, first_key, word)
            x = lax.cond(masked, lambda x: hide(plan, r, x, *at, by_key=False), lambda x: x, x)
        p = jnp.exp2(x)
        return p if slope is None else p * slope

    # ---- producer ---------------------------------------------------------------------------

    def announce(self, r: Any, index: Any, i: Any) -> None:
        """Tells the consumers the i-th work unit of this program, once they are done with rows."""
        pl.when(i > 0)(lambda: plgpu.barrier_wait(r.q_empty))
        r.rows_smem[len(self.row_values), 0] = index.astype(jnp.float32)

    def produce(self, r: Any, counter: Any) -> None:
        """Copies the rows and the key blocks of one unit after the other."""
        plan = self.plan

        def copy_unit(carry: Any) -> Any:
            index, i, before = carry
            unit = QueryUnit(plan, r, index)
            self.announce(r, index, i)
            self.copy_rows(r, unit)
            steps = unit.for_each_block(functools.partial(self.copy_block, r, unit, before))
            return self.take_unit(r, counter), i + 1, before + steps

        zero = jnp.int32(0)
        start = (self.take_unit(r, counter), zero, zero)
        _, i, _ = lax.while_loop(lambda carry: carry[0] >= 0, copy_unit, start)
        self.announce(r, jnp.int32(-1), i)
        for _ in range(self.row_copies):
            plgpu.barrier_arrive(r.q_full)

    def copy_rows(self, r: Any, unit: QueryUnit) -> None:
        """Starts the copies of a unit's rows."""
        rows = pl.ds(unit.block * BLOCK_Q, BLOCK_Q)
        for name in self.tiles_of_rows:
            source = getattr(r, name).at[unit.batch, rows, unit.head]
            plgpu.copy_gmem_to_smem(source, getattr(r, f"{name}_smem"), r.q_full)
        for n, name in enumerate(self.row_values):
            source = getattr(r, name).at[unit.batch, unit.head, rows]
            plgpu.copy_gmem_to_smem(source, r.rows_smem.at[n], r.q_full)

    def copy_block(self, r: Any, unit: QueryUnit, before: Any, j: Any, n: Any, masked: Any) -> None:
        """Copies key block j for step n of a unit, once its buffers are free."""
        del masked
        k_stages, v_stages = in_flight(self.plan.problem)
        n = n + before
        at = (unit.batch, pl.ds(j * ROWS, ROWS), unit.kv_head)
        for tile, tile_smem, full, empty, stages in (
            (r.k, r.k_smem, r.k_full, r.k_empty, k_stages),
            (r.v, r.v_smem, r.v_full, r.v_empty, v_stages),
        ):
            slot = lax.rem(n, stages)

            @pl.when(n >= stages)
            def _(empty: Any = empty, slot: Any = slot) -> None:
                plgpu.barrier_wait(empty.at[slot])

            plgpu.copy_gmem_to_smem(tile.at[at], tile_smem.at[slot], full.at[slot])

    # ---- launch -----------------------------------------------------------------------------

    def scratch(self) -> dict[str, Any]:
        """Returns shared memory and barriers by name, in the order of their addresses."""
        p, dtype, barrier = self.plan.problem, self.dtype, plgpu.Barrier
        k_stages, v_stages = in_flight(p)
        rows = {
            f"{name}_smem": tiled((BLOCK_Q, width), dtype)
            for name, width in self.tiles_of_rows.items()
        }
        if self.holds:
            rows["dq_smem"] = tiled((BLOCK_Q, p.dim), dtype)
        delta = {}
        if self.computes_delta:
            delta["neg_delta_smem"] = plgpu.SMEM((BLOCK_Q,), jnp.float32)
        return {
            **rows,
            "k_smem": tiled((k_stages, ROWS, p.dim), dtype),
            "v_smem": tiled((v_stages, ROWS, p.value_dim), dtype),
            "rows_smem": plgpu.SMEM((len(self.row_values) + 1, BLOCK_Q), jnp.float32),
            **delta,
            "q_full": barrier(num_arrivals=self.row_copies),
            "q_empty": barrier(num_arrivals=CONSUMERS),
            "k_full": barrier(num_arrivals=1, num_barriers=k_stages),
            "k_empty": barrier(num_arrivals=CONSUMERS, num_barriers=k_stages),
            "v_full": barrier(num_arrivals=1, num_barriers=v_stages),
            "v_empty": barrier(num_arrivals=CONSUMERS, num_barriers=v_stages),
        }

    def outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the results by name."""
        p = self.plan.problem
        shape = (p.batch, padded_rows(p.q_len), p.heads, p.dim)
        outputs = {"dq": jax.ShapeDtypeStruct(shape, self.dtype)}
        if self.computes_delta:
            all_rows = (p.batch, p.heads, self.plan.n_q * BLOCK_Q)
            outputs["neg_delta"] = jax.ShapeDtypeStruct(all_rows, jnp.float32)
        return outputs

    def __call__(self, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """Returns the arrays of ``outputs``."""
        dq, *neg_delta = launch_backward(
            "flash_attention_backward_dq",
            min(self.plan.cores, self.units),
            lambda r: None,
            [self.consume],
            self.move,
            operands,
            self.outputs(),
            self.scratch(),
        )
        return dq[:, : self.plan.problem.q_len], *neg_delta


def query_gradient(plan: Plan, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Returns (dq,) of q, k, v, do, neg_lse, neg_delta, ranges or lists and bits, and ids.

    -lse is in base 2. Row vectors are as for ``WideKeyKernel``, but they and the ids of queries
    cover whole blocks of 128, and ranges are key blocks of 64 for each of these. Where
    ``holds_rows``, o and dlse may replace neg_delta, which is then computed and returned, too:
    (dq, neg_delta).
    """
    return QueryGradientKernel(plan, "neg_delta" not in operands)(operands)

"""Shared by the backward kernels: loops over block lists, the mask of a tile, the launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.common.units import scale
from ejkernel.kernels.pallas.compat import untracked
from ejkernel.kernels.pallas.gpu.common.masks import (
    hide_other_segments,
    hide_outside,
    hide_unset,
    row_of,
)
from ejkernel.kernels.pallas.gpu.common.registers import COLUMN, read, spread
from ejkernel.kernels.pallas.gpu.common.warps import for_one_warp
from ejkernel.kernels.pallas.gpu.common.work_counter import fetch_index_in_warp
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import Plan
from ejkernel.kernels.pallas.gpu.flash_attention.lists import LIMIT
from ejkernel.types.attention.problem import LOG2E, Problem

ROWS = 64  # of a warpgroup's matmul
CONSUMERS = 2
WRITERS = 2  # warps that add dq of alternate steps
CONSUMER_REGISTERS, OTHER_REGISTERS = 240, 24


@dataclass(frozen=True)
class BackwardKernel:
    """A kernel of gradients.

    Attributes:
        plan: sizes and tiles.
    """

    plan: Plan

    @property
    def dtype(self) -> Any:
        """The dtype of q, k, v and do."""
        return jnp.dtype(self.plan.problem.dtype)


class PersistentKernel(BackwardKernel):
    """A backward kernel whose programs take work units of a counter, in the order of lists."""

    @property
    def units(self) -> int:
        """Work units of the call."""
        raise NotImplementedError

    def move(self, r: Any, _: None, wg: Any) -> None:
        """Runs the warp that copies operands."""
        counter = pl.get_global(plgpu.SemaphoreType.REGULAR((1,)))
        for_one_warp(lambda: self.produce(r, counter))

    def produce(self, r: Any, counter: Any) -> None:
        """Copies the operands of one unit after the other."""
        raise NotImplementedError

    def take_unit(self, r: Any, counter: Any) -> Any:
        """Returns the program's next unit, or -1; for a single warp."""
        unit_of = lambda n: r.order[0, n] if self.plan.listed else n  # noqa: E731
        return next_unit(counter, self.units, unit_of)


def for_each_visit(table: Any, at: tuple, step: Callable[..., None]) -> Any:
    """``step(query block, steps before, whether a mask is needed)`` for the blocks of a list.

    Returns their number.
    """

    last = table.shape[-1] - 1

    def one_visit(t: Any, visit: Any) -> Any:
        following = table[*at, lax.min(t + 2, last)]  # read before it is needed
        step(visit & (LIMIT - 1), t, visit >= LIMIT)
        return following

    length, first = table[*at, 0], table[*at, 1]
    lax.fori_loop(0, length, one_visit, first)
    return length


def next_unit(counter: Any, count: int, unit_of: Callable[[Any], Any]) -> Any:
    """Returns ``unit_of(n)`` for the next of ``count`` work indices, then -1; for a single warp."""
    index = fetch_index_in_warp(counter)
    return lax.select(index < count, unit_of(lax.min(index, count - 1)), -1)


def needs_masks(plan: Plan, r: Any) -> bool:
    """Returns whether any tile may have hidden pairs."""
    return plan.kv_tail or not plan.band.empty or hasattr(r, "bits") or hasattr(r, "q_ids")


def hide(
    plan: Plan, r: Any, x: jax.Array, head: tuple[Any, Any], first_q: Any, first_key: Any,
    word: tuple[Any, Any], *, by_key: bool,
) -> jax.Array:  # fmt: skip
    """Logits of a tile of a (batch, head), -inf where a pair is invisible.

    Rows are queries, or keys with ``by_key``; ``word``: the index of the tile's bits.
    """
    if plan.kv_tail or not plan.band.empty:
        left = plan.problem.kv_len - first_key if plan.kv_tail else None
        end: dict[str, Any] = {"rows_left" if by_key else "columns_left": left}
        x = hide_outside(x, plan.band, first_key - first_q, transposed=by_key, **end)
    if hasattr(r, "bits"):
        x = hide_unset(x, r.bits[*row_of(r.bits, *head), *word])
    if hasattr(r, "q_ids"):
        sides = [(r.q_ids, first_q), (r.kv_ids, first_key)]
        ids = [
            ids.at[*row_of(ids, head[0]), pl.ds(first, n)]
            for (ids, first), n in zip(sides[::-1] if by_key else sides, x.shape, strict=True)
        ]
        x = hide_other_segments(x, *ids)
    return x


def logits(
    plan: Plan, r: Any, head: tuple[Any, Any], block: Any, first_row: Any, adds_late: Any,
    s: jax.Array, i: Any, masked: Any,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Returns base-2 logits of 64 keys with query block i, and tanh of capped ones.

    s ``[64 keys, block_q]`` are dot products, onto -lse where ``plan.lse_in_sum``. ``head``:
    (batch, head); ``block``: of the keys, which begin at ``first_row``. ``adds_late``: whether the
    accumulators of this head began from 0 and -lse is added here, since its large values would
    round them (``backward._terms``). ``masked``: whether the tile needs a mask.
    """
    problem, block_q, tanh = plan.problem, plan.tiles.block_q, None

    def add_neg_lse(s: jax.Array) -> jax.Array:
        row = r.late_neg_lse.at[*head, pl.ds(i * block_q, block_q)]
        return s + spread(read(row, COLUMN, optimized=False), (ROWS, block_q), 1)

    if problem.soft_cap is None:
        s = lax.cond(adds_late, add_neg_lse, lambda s: s, s)
        x = s * (scale(problem) * LOG2E)
    else:
        tanh = jnp.tanh(s * (problem.scale / problem.soft_cap))
        x = tanh * (problem.soft_cap * LOG2E)
    if plan.kv_tail:
        masked = (block == plan.n_kv - 1) | masked
    if needs_masks(plan, r):
        word = lax.div(first_row, ROWS), i
        at = (head, i * block_q, first_row, word)
        x = lax.cond(masked, lambda x: hide(plan, r, x, *at, by_key=True), lambda x: x, x)
    return x, tanh


def dq_operands(
    plan: Plan, r: Any, ds_slot: Any, thread: Any, warpgroup: Any, mine: Any
) -> tuple[Any, Any]:
    """Returns what a warpgroup multiplies for its half of dq: ds, transposed, and keys.

    ``thread``: its index, just read; ``warpgroup`` and ``mine``, 64 rows, computed from it.
    """
    if plan.dq_by_rows:
        keys = r.k_smem.at[pl.ds(lax.div(thread, 1024) * ROWS, plan.tiles.block_kv)]
        return r.ds_smem.at[ds_slot, :, mine].T, keys
    columns = pl.ds(warpgroup * plan.dq_columns, plan.dq_columns)
    return r.ds_smem.at[ds_slot].T, r.k_smem.at[:, columns]


def hand_over(plan: Plan, r: Any, wg: Any, n: Any, part: jax.Array) -> None:
    """Hands a warpgroup's part of dq of step n to the warp that adds it to global memory."""
    stages = plan.tiles.dq_stages
    slot = lax.rem(n, stages)
    pl.when(n >= stages)(lambda: plgpu.barrier_wait(r.dq_empty.at[slot]))
    r.dq_smem.at[slot * CONSUMERS + wg][...] = part
    plgpu.commit_smem()
    plgpu.barrier_arrive(r.dq_full.at[lax.rem(n, WRITERS)])


def wait_for_parts(plan: Plan, r: Any, steps: Any) -> None:
    """Waits until the parts of dq that were handed over last, of ``steps``, are read."""
    stages = plan.tiles.dq_stages
    for before in range(stages, 0, -1):
        slot = lax.rem(lax.max(steps - before, 0), stages)
        pl.when(steps >= before)(functools.partial(plgpu.barrier_wait, r.dq_empty.at[slot]))


def base2(problem: Problem, s: jax.Array, neg_lse: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns base-2 logits of dot products minus the lse of their rows, and the slope of a cap."""
    if problem.soft_cap is None:
        return (s + neg_lse) * (scale(problem) * LOG2E), None
    tanh = jnp.tanh(s * (problem.scale / problem.soft_cap))
    return tanh * (problem.soft_cap * LOG2E) + neg_lse, 1.0 - tanh * tanh


def copy_side(
    r: Any, name: str, batch: Any, head: Any, rows: Any, n: Any, slot: Any, stages: int
) -> None:
    """Copies rows of q with lse, or of do with delta, to ``slot`` for step n, once it is free.

    ``name``: q or do; ``stages``: slots of it.
    """
    tile, row, tile_smem, row_smem, full, empty = (
        (r.q, r.neg_lse, r.q_smem, r.neg_lse_smem, r.q_full, r.q_empty)
        if name == "q"
        else (r.do, r.neg_delta, r.do_smem, r.neg_delta_smem, r.do_full, r.do_empty)
    )
    pl.when(n >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
    plgpu.copy_gmem_to_smem(tile.at[batch, rows, head], tile_smem.at[slot], full.at[slot])
    plgpu.copy_gmem_to_smem(row.at[batch, head, rows], row_smem.at[slot], full.at[slot])


def copy_step(r: Any, batch: Any, head: Any, i: Any, n: Any, block: int, stages: int) -> None:
    """Copies block i of q with lse and do with delta for step n, once their buffers are free."""
    slot, rows = lax.rem(n, stages), pl.ds(i * block, block)
    for name in ("q", "do"):
        copy_side(r, name, batch, head, rows, n, slot, stages)


def launch_backward(
    name: str,
    programs: int,
    program: Callable[[Any], Any],
    consumers: Sequence[Callable[..., None]],
    move: Callable[..., None],
    operands: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
) -> tuple[jax.Array, ...]:
    """Launches a kernel whose warpgroups compute, ``consumers``, or copy, ``move``.

    Each is called with all references by name, the result of ``program`` on them and the index of
    the warpgroup. A single consumer runs in both warpgroups, of two each runs in one.
    """
    names = (*operands, *outputs, *scratch)

    def body(*refs: Any) -> None:
        r = SimpleNamespace(**dict(zip(names, refs, strict=True)))
        wg = lax.axis_index("wg")
        made = program(r)
        for n, consume in enumerate(consumers):

            @pl.when(wg < CONSUMERS if len(consumers) == 1 else wg == n)
            def _(consume: Callable[..., None] = consume) -> None:
                plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
                consume(r, made, wg)

        @pl.when(wg == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(OTHER_REGISTERS, action="decrease")
            move(r, made, wg)

    kinds = tuple(outputs.values())
    kernel = plgpu.kernel(
        body,
        out_type=kinds,
        scratch_types=list(scratch.values()),
        grid=(programs,),
        grid_names=("item",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    return untracked(kernel, kinds)(*operands.values())

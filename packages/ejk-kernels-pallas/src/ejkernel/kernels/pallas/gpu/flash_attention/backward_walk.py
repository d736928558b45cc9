"""How the programs of the fused backward kernel walk, and the mask of a tile that they meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels.pallas.gpu.common.masks import hide_other_segments, hide_outside, hide_unset
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import Plan
from ejkernel.kernels.pallas.gpu.flash_attention.lists import LIMIT

ROWS = 64  # of a warpgroup's product


class Program:
    """What one program works on, and how its roles walk the tiles in step."""

    def __init__(self, plan: Plan, ranges: Any, visitors: Any) -> None:
        problem = plan.problem
        self.plan, self.ranges, self.visitors = plan, ranges, visitors
        row, self.block, self.falling = plan.place(lax.axis_index("item"))
        self.head, self.batch = lax.rem(row, problem.heads), lax.div(row, problem.heads)
        self.kv_head = lax.div(self.head, problem.group)
        self.sharer = lax.rem(self.head, problem.group)  # of the heads that share k and v
        if plan.circular:
            self.team = lax.div(self.block, plan.team)
            self.member = lax.rem(self.block, plan.team)

    def walk(self, step: Callable[..., None]) -> Any:
        """``step(query block, count of steps before, whether a mask is needed)``; their number."""
        plan = self.plan
        if plan.circular:

            def round_trip(t: Any, carry: None) -> None:
                i = self.member + t
                step(lax.select(i >= plan.n_q, i - plan.n_q, i), t, False)
                return carry

            lax.fori_loop(0, plan.n_q, round_trip, None)
            return plan.n_q
        row = self._table_row()
        if plan.listed:

            def one_visit(t: Any, carry: None) -> None:
                visit = self.ranges[*row, self.block, 1 + t]
                step(visit & (LIMIT - 1), t, visit >= LIMIT)
                return carry

            length = self.ranges[*row, self.block, 0]
            lax.fori_loop(0, length, one_visit, None)
            return length
        start, whole, whole_end, stop = (self.ranges[*row, self.block, c] for c in range(4))
        length = lax.max(stop - start, 0)

        def one_block(t: Any, carry: None) -> None:
            i = start + t
            if plan.falling:
                i = lax.select(self.falling, stop - 1 - t, i)
            step(i, t, (i < whole) | (i >= whole_end))
            return carry

        lax.fori_loop(0, length, one_block, None)
        return length

    def _table_row(self) -> tuple[Any, Any]:
        plan = self.plan
        return (self.batch if plan.range_batch else 0, self.head if plan.range_head else 0)

    def turn(self, i: Any) -> Any:
        """How many key blocks add to query block i before this one."""
        plan = self.plan
        if not plan.circular:
            row = self._table_row()
            if not plan.falling:
                return self.visitors[*row, 0, i] - self.block
            visitor = self.visitors[*row, self.falling.astype(jnp.int32), i]
            return lax.select(self.falling, self.block - visitor, visitor - self.block)
        size = lax.min(plan.n_kv - self.team * plan.team, plan.team)
        first_round = lax.min(i, size - 1) - self.member
        rank = lax.select(self.member <= i, first_round, size + i - self.member)
        return self.team * plan.team + rank


def hidden_pairs(plan: Plan, program: Program, ids: Any, bits: Any, row: Any, i: Any) -> Callable:
    """Logits of one warpgroup's tile, -inf where the pair is invisible."""
    first_q = i * plan.tiles.block_q

    def apply(x: jax.Array) -> jax.Array:
        tail = plan.problem.kv_len % plan.tiles.block_kv != 0
        if tail or not plan.band.empty:
            left = plan.problem.kv_len - row if tail else None
            x = hide_outside(x, plan.band, row - first_q, rows_left=left, transposed=True)
        if bits is not None:
            b = program.batch if plan.bits_batch else 0
            h = program.head if plan.range_head else 0
            x = hide_unset(x, bits[b, h, lax.div(row, ROWS), i])
        if ids:
            b = program.batch if plan.ids_batch else 0
            q_at, kv_at = pl.ds(first_q, plan.tiles.block_q), pl.ds(row, ROWS)
            x = hide_other_segments(x, ids[1].at[b, kv_at], ids[0].at[b, q_at])
        return x

    return apply

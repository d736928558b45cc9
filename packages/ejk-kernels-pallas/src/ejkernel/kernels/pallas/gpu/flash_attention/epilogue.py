"""Epilogue of the forward kernel: accumulators of a tile to the output and its log-sum-exp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.common.units import unit
from ejkernel.kernels.pallas.gpu.common.lane_softmax import sum_over_lanes
from ejkernel.kernels.pallas.gpu.common.masks import row_of
from ejkernel.kernels.pallas.gpu.flash_attention.forward_form import RANGE, Form
from ejkernel.kernels.pallas.gpu.flash_attention.forward_softmax import (
    F32,
    OF_OUTPUT,
    ROWS,
    factor_names,
    start,
)
from ejkernel.types.attention.problem import LOG2E


class RowResults(NamedTuple):
    """Values of each of a warpgroup's 64 rows, float32.

    Attributes:
        lse: natural log-sum-exp; -inf where a row sees nothing.
        base: the same in ``units``; +inf where a row sees nothing.
        o_factor: factor from accumulators to outputs.
        is_wrong: of an ``unshifted`` form, 1.0 where a row is to be computed again, else 0.0.
    """

    lse: jax.Array
    base: jax.Array
    o_factor: jax.Array
    is_wrong: jax.Array | None


@dataclass(frozen=True)
class Epilogue:
    """Stores full tiles by TMA, with what the backward pass reads of their rows.

    Attributes:
        form: the compiled form of the kernel.
        scheduler: knows the rows of a tile.
    """

    form: Form
    scheduler: Any

    keeps_lse: ClassVar[bool] = True

    def finish(self, r: Any, tile: Any, o: jax.Array, state: tuple) -> jax.Array | None:
        """Divides o; hands o, lse and base (lse in ``units``) of a tile to TMA.

        ``o``: accumulators of this warpgroup's 64 rows; ``state``: of ``softmax`` after the last
        step. Returns, of an ``unshifted`` form, which rows are to be computed again: 1.0, else 0.0.
        """
        t, p = self.form.tiles, self.form.problem
        wg = lax.axis_index("wg")
        results = self.reduce_rows(r, tile, o, state)
        rows = pl.ds(wg * ROWS, ROWS)
        out_rows = pl.ds(self.scheduler.first_row(tile) + wg * ROWS, ROWS)
        for c in range(0, p.value_dim, t.o_columns):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if c == 0 and self.keeps_lse:
                r.rows_smem[0, rows] = results.lse
                r.rows_smem[1, rows] = results.base
            width = min(t.o_columns, p.value_dim - c)
            part = o[:, c : c + width]  # scaled part by part: o is still needed
            part = part * lax.broadcast_in_dim(results.o_factor, part.shape, [0])
            self.store(r, tile, part.astype(p.output_dtype), c)
            if c == 0 and self.keeps_lse:
                out = (tile.batch, tile.head, out_rows)
                plgpu.copy_smem_to_gmem(r.rows_smem.at[0, rows], r.lse.at[out])
                plgpu.copy_smem_to_gmem(r.rows_smem.at[1, rows], r.base.at[out])
        return results.is_wrong

    def reduce_rows(self, r: Any, tile: Any, o: jax.Array, state: tuple) -> RowResults:
        """Computes what a tile's rows have in common, from the state of their softmax."""
        p, is_wrong = self.form.problem, None
        m, total, *e = (*start(self.form), *state) if self.form.unshifted else state
        if self.form.lane_sums:
            total = sum_over_lanes(total)
        if self.form.unshifted:
            # 0 * o is NaN where o is not finite
            checked = total + jnp.sum(o * 0.0, axis=1)
            is_wrong = jnp.where((checked >= RANGE[0]) & (checked <= RANGE[1]), 0.0, 1.0)
        is_empty = total == 0.0
        # probabilities and accumulators share the factor exp2(e) (see ``softmax_step``)
        without_e = jnp.exp2(-e[0]) if e else 1.0
        total = total * without_e
        logit_unit, v_scale = unit(p), None
        if self.form.scaled:
            names = factor_names(self.form)
            logit_unit, v_scale = (
                r.factors[tile.batch, tile.head, names.index(name)] for name in OF_OUTPUT
            )
        # natural logits: the rows' maximum, and how much a sink exceeds it
        top, alpha, above = m * logit_unit, 1.0, 0.0
        if "sink" in self.form.operands:
            sink = r.sink[*row_of(r.sink, tile.batch), tile.head]
            # a row that sees no key stays empty, whatever the sink
            top_with_sink = jnp.maximum(top, sink)
            above = top_with_sink - jnp.where(is_empty, top_with_sink, top)
            alpha = jnp.exp2(-above * LOG2E)
            with_sink = total * alpha + jnp.exp2((sink - top_with_sink) * LOG2E)
            total = jnp.where(is_empty, 0.0, with_sink)
            top = top_with_sink
        row_sum = jnp.where(is_empty, 1.0, total)
        log = jnp.log(row_sum)
        lse = jnp.where(is_empty, -jnp.inf, top + log)
        base = jnp.where(is_empty, jnp.inf, m + (log + above) * (1 / logit_unit))
        o_factor = alpha * without_e / row_sum
        if v_scale is not None:
            o_factor = o_factor * v_scale
        return RowResults(lse, base, o_factor, is_wrong)

    def store(self, r: Any, tile: Any, part: jax.Array, column: int) -> None:
        """Hands this warpgroup's rows of o from ``column`` on to TMA, through staging memory."""
        wg = lax.axis_index("wg")
        columns = pl.ds(0, part.shape[1])
        staged = r.o_smem.at[pl.ds(wg * ROWS, ROWS), columns]
        staged[...] = part
        plgpu.commit_smem()
        rows = pl.ds(self.scheduler.first_row(tile) + wg * ROWS, ROWS)
        target = (tile.batch, rows, tile.head, pl.ds(column, part.shape[1]))
        plgpu.copy_smem_to_gmem(staged, r.o.at[target])

    def scratch(self) -> dict[str, Any]:
        if not self.keeps_lse:
            return {}
        # lse and base in one: every array of shared memory begins at a multiple of 1024 bytes
        return {"rows_smem": plgpu.SMEM((2, self.form.tiles.block_q), F32)}

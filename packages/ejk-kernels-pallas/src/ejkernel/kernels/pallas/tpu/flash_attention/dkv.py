"""Gradients of keys and values on a TPU.

    p = exp(x - lse);  dv = p^T do;  ds = p * (do v^T - delta);  dk = scale * ds^T q

Key blocks are the outer loop and query blocks the inner one. Grid (batch, kv head, key block, head
of the group, step): the heads that share a key add up in its accumulators, in a fixed order. Tiles
have two forms:

* ``[keys, queries]``, gradients ``[keys, d]``: plain matmuls of p and ds; lse
  and delta, one value a query, lie along lanes and are never spread. A matrix unit of 128 columns
  is full in all four matmuls.
* ``[queries, keys]``, gradients ``[d, keys]``: do^T p has as many columns as there are keys, where
  p^T do has only d of them and half fills a unit of 256 columns when d is 128. q and do are
  transposed as they are read, lse and delta spread, on units that are idle otherwise.

Bound: 8 q k d FLOPs a head; the matrix units, as forward.

Source: Dao 2023, FlashAttention-2, section 3.2.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.common.chip import LANES
from ejkernel.kernels.pallas.tpu.common.masks import column, fit, spread_columns
from ejkernel.kernels.pallas.tpu.flash_attention import gradients
from ejkernel.kernels.pallas.tpu.flash_attention.gradients import Operands, ScorePair, ValuePairs
from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout
from ejkernel.kernels.pallas.tpu.flash_attention.specs import Specs, launch_kernel, table_entry
from ejkernel.kernels.pallas.tpu.flash_attention.steps import TilePosition, step_of


def _kernel(
    layout: Layout,
    table: Any,
    operands: Operands,
    dk_ref: Any,
    dv_ref: Any,
    dk_acc: Any,
    dv_acc: Any,
    columns: list[Any],
) -> None:
    """Runs a grid step; ``columns``: ``operands.kv_rows`` spread over lanes, unless transposed."""
    transposed = layout.tiles.transposed
    b, ki, group_head, step_index = (pl.program_id(axis) for axis in (0, 2, 3, 4))
    head = pl.program_id(1) * layout.problem.group + group_head
    first = table_entry(layout, layout.kv_blocks, b, head, ki)
    step = step_of(
        layout, table, first, ki, step_index, keys_outer=True, queries_on_lanes=not transposed
    )

    @pl.when((step_index == 0) & (group_head == 0))
    def _begin() -> None:
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)
        if not transposed:
            spread_columns(operands.kv_rows, columns)

    def add(position: TilePosition, scores: ScorePair, mask: Any = None) -> None:
        queries, keys = position
        q, do = operands.rows_to_add(layout, queries, mask)
        statistics = operands.statistics(queries)
        if transposed:
            statistics = tuple(fit(column(row), scores[0].shape[1]) for row in statistics)
        p, ds = gradients.tile_gradients(layout, scores, mask, statistics, q.dtype)
        q, do = q.astype(ds.dtype), do.astype(p.dtype)
        if transposed:
            dv_acc[:, keys] += layout.dot(do.T, p, (1, 0))
            dk_acc[:, keys] += layout.dot(q.T, ds, (1, 0))
        else:
            dv_acc[keys] += layout.dot(p, do, (1, 0))
            dk_acc[keys] += layout.dot(ds, q, (1, 0))

    def add_masked(position: TilePosition, scores: ScorePair) -> None:
        queries, keys = position
        if transposed:
            mask_columns = [column(row[0, :, queries]) for row in operands.q_rows]
            mask_rows = [row[0, :, keys] for row in operands.kv_rows]
        else:
            mask_columns = [spread[keys] for spread in columns]
            mask_rows = [row[0, :, queries] for row in operands.q_rows]
        add(position, scores, step.mask(position, mask_columns, mask_rows))

    scores = functools.partial(operands.scores, layout, not transposed)
    step.run(scores, add, add_masked)

    @pl.when((step_index == layout.steps - 1) & (group_head == layout.problem.group - 1))
    def _end() -> None:
        gradients.store_key_gradients(layout, dk_ref, dv_ref, dk_acc, dv_acc)


def key_gradients(
    layout: Layout, table: Any, arrays: tuple[jax.Array, ...], pairs: ValuePairs
) -> list[jax.Array]:
    """Returns dk ``[b, hk, k, d]`` and dv ``[b, hk, k, dv]``; operands as in ``query_gradient``."""
    columns = [pltpu.VMEM((layout.tiles.block_kv, LANES), jnp.int32) for _ in pairs]
    if layout.tiles.transposed:
        columns = []
    specs, (_, k, v, *_) = Specs(layout, keys_outer=True), arrays
    return launch_kernel(
        _kernel,
        "ejkernel_flash_dkv",
        specs,
        table,
        *gradients.kernel_inputs(specs, arrays, pairs),
        gradients.key_outputs(specs),
        [*gradients.key_accumulators(layout), columns],
        accumulators=2,
        columns=2 * (layout.dim + layout.value_dim),
        moved=2 * (k.nbytes + v.nbytes),
    )

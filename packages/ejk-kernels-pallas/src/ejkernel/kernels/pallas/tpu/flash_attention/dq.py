"""Gradient of the queries on a TPU.

    p = exp(x - lse);  ds = p * (do v^T - delta);  dq = scale * ds k

Grid and steps are as in the forward pass; the first two matmuls of a strip (q k^T, do v^T) overlap
the exponentials and the third matmul of the strip before it. Tiles have two forms:

* ``[queries, keys]``, gradient ``[queries, d]``: lse and delta are spread from lanes to sublanes
  once a query block. A matrix unit of 128 columns is full in all three matmuls.
* transposed ``[keys, queries]``, gradient ``[d, queries]``: k^T ds^T has as many columns as there
  are queries, where ds k has only d of them and half fills a unit of 256 columns when d is 128.
  lse and delta lie as they are needed; k is transposed as it is read.

Bound: 6 q k d FLOPs a head; the matrix units, as forward.

Source: Dao 2023, FlashAttention-2, section 3.2 (the loop over queries and keys exchanged).
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
    dq_ref: Any,
    acc_ref: Any,
    row_columns: list[Any],
    mask_value_columns: list[Any],
) -> None:
    """Runs a grid step.

    ``row_columns`` and ``mask_value_columns``: ``row_values`` and ``q_rows`` of the operands,
    spread over lanes, unless transposed.
    """
    transposed = layout.tiles.transposed
    b, head, qi, step_index = (pl.program_id(axis) for axis in range(4))
    first = table_entry(layout, layout.q_blocks, b, head, qi)
    step = step_of(layout, table, first, qi, step_index, queries_on_lanes=transposed)

    @pl.when(step_index == 0)
    def _begin() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)
        if not transposed:
            spread_columns([row.at[0] for row in operands.row_values], row_columns)
            spread_columns(operands.q_rows, mask_value_columns)

    def add(position: TilePosition, scores: ScorePair, mask: Any = None) -> None:
        queries, keys = position
        k = operands.k[0, 0, keys]
        if transposed:
            statistics = operands.statistics(queries)
        else:
            keys_size = scores[0].shape[1]
            statistics = tuple(fit(spread[queries], keys_size) for spread in row_columns)
        _, ds = gradients.tile_gradients(layout, scores, mask, statistics, k.dtype)
        k = k.astype(ds.dtype)
        if transposed:
            acc_ref[:, queries] += layout.dot(k.T, ds, (1, 0))
        else:
            acc_ref[queries] += layout.dot(ds, k, (1, 0))

    def add_masked(position: TilePosition, scores: ScorePair) -> None:
        queries, keys = position
        if transposed:
            mask_columns = [column(row[0, :, keys]) for row in operands.kv_rows]
            mask_rows = [row[0, :, queries] for row in operands.q_rows]
        else:
            mask_columns = [spread[queries] for spread in mask_value_columns]
            mask_rows = [row[0, :, keys] for row in operands.kv_rows]
        add(position, scores, step.mask(position, mask_columns, mask_rows))

    step.run(functools.partial(operands.scores, layout, transposed), add, add_masked)

    @pl.when(step_index == layout.steps - 1)
    def _end() -> None:
        dq = acc_ref[...] * layout.problem.scale
        dq_ref[0, 0] = (dq.T if transposed else dq).astype(dq_ref.dtype)


def query_gradient(
    layout: Layout, table: Any, arrays: tuple[jax.Array, ...], pairs: ValuePairs
) -> jax.Array:
    """Returns dq ``[b, h, q, d]`` of q, k, v and do in ``Layout.shape``, lse, delta, and a gate if
    the layout is ``gated``.

    lse (as ``Layout.raw_logits``, large where a row sees no key), delta and gate are float32
    ``[b, h, 1, q]``.
    """
    p, rows = layout.problem, layout.tiles.block_q
    d, dv = layout.dim, layout.value_dim
    if layout.tiles.transposed:
        scratch = [pltpu.VMEM((d, rows), jnp.float32), [], []]
    else:
        scratch = [
            pltpu.VMEM((rows, d), jnp.float32),
            [pltpu.VMEM((rows, LANES), jnp.float32) for _ in arrays[4:]],
            [pltpu.VMEM((rows, LANES), jnp.int32) for _ in pairs],
        ]
    specs, (q, _, _, do, *_) = Specs(layout), arrays
    (dq,) = launch_kernel(
        _kernel,
        "ejkernel_flash_dq",
        specs,
        table,
        *gradients.kernel_inputs(specs, arrays, pairs),
        [(specs.query(d), layout.shape(p.heads, layout.q_padded, d), p.dtype)],
        scratch,
        accumulators=1,
        columns=2 * d + dv,
        moved=2 * q.nbytes + do.nbytes,
    )
    return dq

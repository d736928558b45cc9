"""Gradients of queries, keys and values on a TPU in one pass over the scores.

    p = exp(x - lse);  ds = p * (do v^T - delta)
    dv = p^T do;  dk = scale * ds^T q;  dq = scale * ds k

Grid and accumulators of keys as in ``dkv``. The gradient of all queries of a key/value head stays
in vector memory as well, float32, and each tile adds to it in the order of the grid: five matmuls a
tile, where ``dq`` and ``dkv`` take seven and compute every exponential twice. Blocks of keys follow
one another on one core, so that two runs give the same bits.

Tiles are ``[keys, queries]``: lse and delta lie along lanes as they are needed. dq is
accumulated as ``[d, queries]``, k^T ds. dk and dv are ``[keys, d]``, or with ``transposed``
``[d, keys]`` as in ``dkv``; p and ds are then transposed on their way into the matrix unit.

Bound: 10 q k d FLOPs a head; the matrix units, as forward.

Source: Dao 2023, FlashAttention-2, section 3.2.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.common.chip import LANES
from ejkernel.kernels.pallas.tpu.common.masks import spread_columns
from ejkernel.kernels.pallas.tpu.flash_attention import gradients
from ejkernel.kernels.pallas.tpu.flash_attention.gradients import Operands, ScorePair, ValuePairs
from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout
from ejkernel.kernels.pallas.tpu.flash_attention.specs import Specs, launch_kernel, table_entry
from ejkernel.kernels.pallas.tpu.flash_attention.steps import TilePosition, step_of
from ejkernel.kernels.pallas.tpu.flash_attention.tiles import query_bytes, strip_bytes


def _kernel(
    layout: Layout,
    table: Any,
    operands: Operands,
    dq_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    dq_acc: Any,
    dk_acc: Any,
    dv_acc: Any,
    columns: list[Any],
) -> None:
    """Runs a grid step.

    ``dq_acc``: ``[heads of the group * query blocks, d, block_q]``; ``columns``:
    ``operands.kv_rows`` spread over lanes.
    """
    p, transposed = layout.problem, layout.tiles.transposed
    b, ki, group_head, step_index = (pl.program_id(axis) for axis in (0, 2, 3, 4))
    head = pl.program_id(1) * p.group + group_head
    first = table_entry(layout, layout.kv_blocks, b, head, ki)
    step = step_of(layout, table, first, ki, step_index, keys_outer=True, queries_on_lanes=True)
    q_block = group_head * layout.q_blocks + step.qi
    begins_keys = (step_index == 0) & (group_head == 0)
    ends_keys = (step_index == layout.steps - 1) & (group_head == p.group - 1)

    @pl.when(begins_keys & (ki == 0))
    def _begin_queries() -> None:
        def clear(block: Any, carry: None) -> None:
            dq_acc[block] = jnp.zeros(dq_acc.shape[1:], jnp.float32)

        lax.fori_loop(0, dq_acc.shape[0], clear, None)

    @pl.when(begins_keys)
    def _begin_keys() -> None:
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)
        spread_columns(operands.kv_rows, columns)

    def add(position: TilePosition, scores: ScorePair, mask: Any = None) -> None:
        queries, keys = position
        k, (q, do) = operands.k[0, 0, keys], operands.rows_to_add(layout, queries, mask)
        statistics = operands.statistics(queries)
        weights, ds = gradients.tile_gradients(layout, scores, mask, statistics, q.dtype)
        q, k, do = q.astype(ds.dtype), k.astype(ds.dtype), do.astype(weights.dtype)
        if transposed:
            dv_acc[:, keys] += layout.dot(do.T, weights, (1, 1))
            dk_acc[:, keys] += layout.dot(q.T, ds, (1, 1))
        else:
            dv_acc[keys] += layout.dot(weights, do, (1, 0))
            dk_acc[keys] += layout.dot(ds, q, (1, 0))
        dq_acc[q_block, :, queries] += layout.dot(k.T, ds, (1, 0))

    def add_masked(position: TilePosition, scores: ScorePair) -> None:
        queries, keys = position
        mask_columns = [spread[keys] for spread in columns]
        mask_rows = [row[0, :, queries] for row in operands.q_rows]
        add(position, scores, step.mask(position, mask_columns, mask_rows))

    step.run(functools.partial(operands.scores, layout, True), add, add_masked)

    @pl.when(ends_keys)
    def _end_keys() -> None:
        gradients.store_key_gradients(layout, dk_ref, dv_ref, dk_acc, dv_acc)

    @pl.when(ends_keys & (ki == layout.kv_blocks - 1))
    def _end_queries() -> None:
        def store(n: Any, carry: None) -> None:
            head_of_group, block = n // layout.q_blocks, lax.rem(n, layout.q_blocks)
            rows = pl.ds(pl.multiple_of(block * layout.tiles.block_q, LANES), layout.tiles.block_q)
            dq = (dq_acc[n] * p.scale).T.astype(dq_ref.dtype)
            if layout.tiles.joins_heads:
                head_lanes = pl.ds(pl.multiple_of(head_of_group * layout.dim, LANES), layout.dim)
                dq_ref[0, 0, rows, head_lanes] = dq
            else:
                dq_ref[0, head_of_group, rows] = dq

        lax.fori_loop(0, dq_acc.shape[0], store, None)


def all_gradients(
    layout: Layout, table: Any, arrays: tuple[jax.Array, ...], pairs: ValuePairs
) -> list[jax.Array]:
    """Returns dq ``[b, h, q, d]``, dk ``[b, hk, k, d]`` and dv ``[b, hk, k, dv]``; operands as in
    ``query_gradient``."""
    p, t = layout.problem, layout.tiles
    scratch = [
        pltpu.VMEM((p.group * layout.q_blocks, layout.dim, t.block_q), jnp.float32),
        *gradients.key_accumulators(layout),
        [pltpu.VMEM((t.block_kv, LANES), jnp.int32) for _ in pairs],
    ]
    specs, (q, k, v, *_) = Specs(layout, keys_outer=True, keeps_queries=True), arrays
    return launch_kernel(
        _kernel,
        "ejkernel_flash_bwd",
        specs,
        table,
        *gradients.kernel_inputs(specs, arrays, pairs),
        [
            (specs.head_queries(), layout.shape(p.heads, layout.q_padded, layout.dim), p.dtype),
            *gradients.key_outputs(specs),
        ],
        scratch,
        accumulators=2,
        columns=3 * layout.dim + 2 * layout.value_dim,
        moved=q.nbytes + 2 * (k.nbytes + v.nbytes),
        outside_blocks=query_bytes(p, layout.q_padded) + strip_bytes(t.block_q),
    )

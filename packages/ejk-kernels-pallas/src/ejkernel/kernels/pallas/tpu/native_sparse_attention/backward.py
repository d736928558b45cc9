"""Gradients of the selected branch on a TPU.

    p = exp(x - lse);  ds = p * gate * (do v^T - delta)
    dq = scale * ds k;  dk = scale * ds^T q;  dv = p^T (gate * do)

The output of a row is multiplied by its gate outside. do is the gradient of the gated output: all
branches read one array, and delta, do . o, is the gradient of the gate. A tile multiplies its rows
of do by the gate once.

One kernel with the grid and the tiles of the forward pass. Keys, values and float32 gradients of
both stay in vector memory for all tiles of a head: a tile adds to the blocks that it visits, in the
order of tiles, and no list of the tokens of a block is needed. Five matmuls a block; the matrix
units are the limit, as forward.

Source: Dao 2023, FlashAttention-2, section 3.2, over the lists of Yuan et al. 2025
(arXiv 2502.11089).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.compat import result
from ejkernel.kernels.pallas.tpu.common.chip import Chip
from ejkernel.kernels.pallas.tpu.common.masks import column, finite, fit
from ejkernel.kernels.pallas.tpu.common.matmul import matmul
from ejkernel.kernels.pallas.tpu.native_sparse_attention.problem import Problem, Tiles
from ejkernel.kernels.pallas.tpu.native_sparse_attention.steps import (
    Part,
    block_rows,
    bytes_of,
    compiler_params,
    cost,
    for_steps,
    raw_scores,
    read_rows,
    specs_of,
    store_rows,
    visible,
)


def _kernel(
    p: Problem,
    t: Tiles,
    list_ref: Any,
    rows_ref: Any,
    q_ref: Any,
    do_ref: Any,
    base_ref: Any,
    delta_ref: Any,
    gate_ref: Any | None,
    others_ref: Any | None,
    k_hbm: Any,
    v_hbm: Any,
    dq_ref: Any,
    dk_hbm: Any,
    dv_hbm: Any,
    q_rows: Any,
    do_rows: Any,
    base_row: Any,
    delta_row: Any,
    k_ref: Any,
    v_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    dq_acc: Any,
) -> None:
    """Runs a tile; ``others_ref``: dq of other branches, to which this one's is added."""
    b, head, tile = (pl.program_id(axis) for axis in range(3))

    @pl.when(tile == 0)
    def _load_head() -> None:
        pltpu.sync_copy(k_hbm.at[b, head], k_ref)
        pltpu.sync_copy(v_hbm.at[b, head], v_ref)
        dk_ref[...] = jnp.zeros_like(dk_ref)
        dv_ref[...] = jnp.zeros_like(dv_ref)

    # a row with NaN has it in its base or delta: weights carry it to the keys that the row sees,
    # and are 0 for the others, which a NaN of q or do would undo
    q_rows[...] = finite(read_rows(q_ref, *q_rows.shape)).astype(q_rows.dtype)
    do, delta = read_rows(do_ref, *do_rows.shape), delta_ref[0, 0, 0]
    if gate_ref is not None:
        gate = gate_ref[0, 0, 0]
        do, delta = do * fit(column(gate), do.shape[1]), delta * gate
    do_rows[...] = finite(do).astype(do_rows.dtype)
    # in memory: a load spreads a row over all keys
    base_row[...], delta_row[...] = base_ref[0, 0, 0] + 0.0 * delta, finite(delta)
    dq_acc[...] = jnp.zeros_like(dq_acc)

    def scores(part: Part) -> tuple[jax.Array, jax.Array]:
        x = raw_scores(p, part.load(p, k_ref), q_rows[...])
        return x, matmul(part.load(p, v_ref), do_rows[...], (1, 1))

    def add(part: Part, pair: tuple[jax.Array, jax.Array]) -> None:
        x, dp = pair
        q, do, k = q_rows[...], do_rows[...], part.load(p, k_ref)
        weights = jnp.exp2((x - base_row[...]) * p.log2_unit)
        weights = jnp.where(visible(p, t, part, rows_ref), weights, 0.0)
        ds = (weights * (dp - delta_row[...])).astype(q.dtype)
        dq_acc[...] += matmul(k.T, ds, (1, 0))
        dk, dv = matmul(ds, q, (1, 0)), matmul(weights.astype(do.dtype), do, (1, 0))
        # the entries behind the end of a list name block 0 and add zeros to it
        for n, block in enumerate(part.blocks):
            rows = slice(n * p.rows_of_block, (n + 1) * p.rows_of_block)
            dk_ref[block_rows(p, block)] += dk[rows]
            dv_ref[block_rows(p, block)] += dv[rows]

    for_steps(t, list_ref, scores, add)
    dq = (dq_acc[...] * p.scale).T
    if others_ref is not None:
        dq = dq + read_rows(others_ref, *dq.shape)
    store_rows(dq_ref, dq)

    @pl.when(tile == pl.num_programs(2) - 1)
    def _store_head() -> None:
        pltpu.sync_copy(dk_ref, dk_hbm.at[b, head])
        pltpu.sync_copy(dv_ref, dv_hbm.at[b, head])


def selected_backward(
    p: Problem,
    t: Tiles,
    chip: Chip,
    lists: jax.Array,
    rows: jax.Array,
    arrays: tuple[jax.Array, ...],
    values: tuple[jax.Array | None, ...],
    others: jax.Array | None,
    dtype: str,
) -> list[jax.Array]:
    """Returns dq as ``tile_rows`` in ``dtype``, and dk and dv as whole blocks, float32.

    dk lacks the scale.

    Args:
        lists, rows: of ``tile_lists``.
        arrays: q and do as ``tile_rows``, k and v as whole blocks.
        values: base, delta and gate or None ``[b, hk, tiles, 1, rows]``. Base is the lse of a row
            as a raw score, large where it sees no key.
        others: dq of other branches, to which this one's is added.
    """
    q, do, k, v = arrays
    specs, (d, dv) = specs_of(p, t, lists, rows), p.dims
    operands = [q, do, *values, others, k, v]
    present = jax.tree.leaves(operands)
    shapes = [
        result(q.shape, dtype, *present),
        result(k.shape, "float32", *present),
        result(v.shape, "float32", *present),
    ]
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    resident = t.resident_bytes(p, backward=True)
    return pl.pallas_call(
        functools.partial(_kernel, p, t),
        grid=lists.shape[:3],
        in_specs=[
            specs.of_lists(),
            specs.of_values(specs.words),
            *(specs.of_rows(width) for width in (d, dv)),
            *(None if x is None else specs.of_values() for x in values),
            None if others is None else specs.of_rows(d),
            in_hbm,
            in_hbm,
        ],
        out_specs=[specs.of_rows(d), in_hbm, in_hbm],
        out_shape=shapes,
        scratch_shapes=[
            *(pltpu.VMEM((specs.rows, width), q.dtype) for width in (d, dv)),
            *[pltpu.VMEM((1, specs.rows), jnp.float32)] * 2,
            *(pltpu.VMEM(x.shape[2:], x.dtype) for x in (k, v)),
            *(pltpu.VMEM(x.shape[2:], jnp.float32) for x in (k, v)),
            pltpu.VMEM((d, specs.rows), jnp.float32),
        ],
        compiler_params=compiler_params(chip, resident),
        cost_estimate=cost(p, t, 3 * d + 2 * dv, bytes_of(lists, rows, *present, *shapes)),
        interpret=chip.interpret,
        name="ejkernel_selected_bwd",
    )(lists, rows, *operands)

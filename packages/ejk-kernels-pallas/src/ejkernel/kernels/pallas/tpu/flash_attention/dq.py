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

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.common.chip import LANES
from ejkernel.kernels.pallas.tpu.common.masks import column, fit
from ejkernel.kernels.pallas.tpu.flash_attention import gradients
from ejkernel.kernels.pallas.tpu.flash_attention.gradients import Pair, Pairs
from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout
from ejkernel.kernels.pallas.tpu.flash_attention.specs import Specs, launch_kernel, table_entry
from ejkernel.kernels.pallas.tpu.flash_attention.steps import TilePosition, step_of


def _kernel(layout: Layout, table: Any, *all_refs: Any) -> None:
    wide = layout.tiles.transposed
    x, refs = gradients.split_refs(layout, all_refs, queries_on_lanes=wide)
    dq_ref, acc_ref, *columns = refs
    # unless transposed: columns of the row values, then of the pairs
    count = len(x.row_values)
    statistics, columns = columns[:count], columns[count:]
    b, qi, t = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    first = table_entry(layout, layout.q_blocks, b, pl.program_id(1), qi)
    step = step_of(layout, table, first, qi, t, queries_on_lanes=wide)

    @pl.when(t == 0)
    def _begin() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)
        if not wide:
            for row, spread in zip(x.row_values, statistics, strict=True):
                spread[...] = column(row[0, 0])
            for row, spread in zip(x.q_rows, columns, strict=True):
                spread[...] = column(row[0])

    def add(position: TilePosition, pair: Pair, mask: Any = None) -> None:
        queries, keys = position
        k = x.k[0, 0, keys]
        if wide:
            of_rows = x.statistics(queries)
        else:
            of_rows = tuple(fit(c[queries], pair[0].shape[1]) for c in statistics)
        _, ds = gradients.tile_gradients(layout, pair, mask, of_rows, k.dtype)
        k = k.astype(ds.dtype)
        if wide:
            acc_ref[:, queries] += layout.dot(k.T, ds, (1, 0))
        else:
            acc_ref[queries] += layout.dot(ds, k, (1, 0))

    def masked(position: TilePosition, pair: Pair) -> None:
        queries, keys = position
        if wide:
            down = [column(r[0, :, keys]) for r in x.kv_rows]
            across = [r[0, :, queries] for r in x.q_rows]
        else:
            down, across = [c[queries] for c in columns], [r[0, :, keys] for r in x.kv_rows]
        add(position, pair, step.mask(position, down, across))

    step.run(x.scores, add, masked)

    @pl.when(t == layout.steps - 1)
    def _end() -> None:
        dq = acc_ref[...] * layout.problem.scale
        dq_ref[0, 0] = (dq.T if wide else dq).astype(dq_ref.dtype)


def query_gradient(
    layout: Layout, table: Any, arrays: tuple[jax.Array, ...], pairs: Pairs
) -> jax.Array:
    """dq ``[b, h, q, d]`` of padded, head-major q, k, v, do, lse, delta, and gate if ``gated``.

    lse (as ``Layout.raw_logits``, large where a row sees no key), delta and gate are float32
    ``[b, h, 1, q]``.
    """
    p, rows = layout.problem, layout.tiles.block_q
    d, dv = layout.dim, layout.value_dim
    if layout.tiles.transposed:
        scratch = [pltpu.VMEM((d, rows), jnp.float32)]
    else:
        widths = [d] + [LANES] * len(arrays[4:])
        scratch = [pltpu.VMEM((rows, width), jnp.float32) for width in widths]
        scratch += [pltpu.VMEM((rows, LANES), jnp.int32) for _ in pairs]
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

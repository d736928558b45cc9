"""Gradient of the queries on a TPU.

    p = exp(x - lse);  ds = p * (do v^T - delta);  dq = scale * ds k

Grid and strips are those of the forward pass; the first two products of a strip (q k^T, do v^T)
run under the exponentials and the third product of the strip above it. ``lse`` and ``delta`` are
spread from lanes to sublanes once a query block.

Bound: 6 q k d FLOPs a head; the matrix units, as forward.

Source: Dao 2023, FlashAttention-2, section 3.2 (the loop over queries and keys exchanged).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.compat import result
from ejkernel.kernels.pallas.tpu.common.masks import LANES, column, touches, visible
from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout
from ejkernel.kernels.pallas.tpu.flash_attention.specs import QueriesHeld, entry


def _gradient_strip(
    layout: Layout,
    products: tuple[jax.Array, jax.Array],
    mask: jax.Array | None,
    lse: jax.Array,
    delta: jax.Array,
    dtype: Any,
) -> jax.Array:
    """ds of a tile from q k^T and do v^T ``[rows, keys]``, lse and delta ``[rows, 128]``."""
    parts = []
    for n in range(products[0].shape[1] // LANES):
        columns = slice(n * LANES, (n + 1) * LANES)
        x, bent = layout.logits(products[0][:, columns])
        p = jnp.exp2(x - lse)
        if mask is not None:
            p = jnp.where(mask[:, columns], p, 0.0)
        ds = p * (products[1][:, columns] - delta)
        if bent is not None:
            ds = ds * (1.0 - bent * bent)
        parts.append(ds if layout.tiles.unpacked else ds.astype(dtype))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _kernel(layout: Layout, table: Any, *given: Any) -> None:
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, *refs = given
    n = len(layout.pair_names)
    q_rows, kv_rows, refs = refs[:n], refs[n : 2 * n], refs[2 * n :]
    dq_ref, lse_col, delta_col, acc_ref, *columns = refs
    b, qi, t = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    first = entry(layout, layout.q_blocks, b, qi)
    start, full_start, full_stop, stop = (table[first + i] for i in range(4))
    ki = start + t
    block_q, block_kv, rows = layout.tiles.block_q, layout.tiles.block_kv, layout.tiles.rows

    @pl.when(t == 0)
    def _begin() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)
        lse_col[...] = column(lse_ref[0, 0])
        delta_col[...] = column(delta_ref[0, 0])
        for row, spread in zip(q_rows, columns, strict=True):
            spread[...] = column(row[0])

    def products(strip: Any, keys: Any) -> tuple[jax.Array, jax.Array]:
        return (
            layout.dot(q_ref[0, 0, strip], k_ref[0, 0, keys], (1, 1)),
            layout.dot(do_ref[0, 0, strip], v_ref[0, 0, keys], (1, 1)),
        )

    def add(strip: Any, keys: Any, pair: tuple[jax.Array, jax.Array], mask: Any) -> None:
        k = k_ref[0, 0, keys]
        ds = _gradient_strip(layout, pair, mask, lse_col[strip], delta_col[strip], k.dtype)
        acc_ref[strip] += layout.dot(ds, k.astype(ds.dtype), (1, 0))

    full = (ki >= full_start) & (ki < full_stop)

    if layout.some_full:

        @pl.when(full)
        def _full_tile() -> None:
            everything = pl.ds(0, block_kv)
            ready = products(pl.ds(0, rows), everything)
            for i in range(0, block_q, rows):
                following = None
                if i + rows < block_q:
                    following = products(pl.ds(i + rows, rows), everything)
                add(pl.ds(i, rows), everything, ready, None)
                ready = following

    if layout.some_partial:

        @pl.when((ki < stop) & ~full)
        def _masked_tile() -> None:
            edge_q, edge_kv = layout.tiles.edge(block_q), layout.tiles.edge(block_kv)
            across = block_kv // edge_kv

            def edge_tile(index: Any, carry: None) -> None:
                i = pl.multiple_of(index // across * edge_q, edge_q)
                j = pl.multiple_of(index % across * edge_kv, edge_kv)
                first_q, first_kv = qi * block_q + i, ki * block_kv + j

                @pl.when(touches(layout.rules, first_q, first_kv, edge_q, edge_kv))
                def _() -> None:
                    strip, keys = pl.ds(i, edge_q), pl.ds(j, edge_kv)
                    mask = visible(
                        layout.rules,
                        (edge_q, edge_kv),
                        first_q,
                        first_kv,
                        tuple(c[strip] for c in columns),
                        tuple(r[0, :, keys] for r in kv_rows),
                        queries_walked=False,
                    )
                    add(strip, keys, products(strip, keys), mask)

            lax.fori_loop(0, block_q // edge_q * across, edge_tile, None)

    @pl.when(t == layout.steps - 1)
    def _end() -> None:
        dq_ref[0, 0] = (acc_ref[...] * layout.problem.scale).astype(dq_ref.dtype)


def query_gradient(
    layout: Layout,
    table: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    pairs: list[tuple[jax.Array, jax.Array]],
) -> jax.Array:
    """dq ``[b, h, q, d]`` of padded, head-major arrays.

    lse (base 2, large where a row sees nothing) and delta are float32 ``[b, h, 1, q]``.
    """
    p, tiles = layout.problem, layout.tiles
    d, dv = layout.dim, layout.value_dim
    specs = QueriesHeld(layout)
    row_q, row_kv = [x for x, _ in pairs], [x for _, x in pairs]
    visited = p.batch * p.heads * layout.q_padded * layout.steps * tiles.block_kv
    return pl.pallas_call(
        functools.partial(_kernel, layout),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=specs.grid,
            in_specs=[
                specs.query(d),
                specs.key(d),
                specs.key(dv),
                specs.query(dv),
                specs.statistic(),
                specs.statistic(),
                *map(specs.query_values, row_q),
                *map(specs.key_values, row_kv),
            ],
            out_specs=specs.query(d),
            scratch_shapes=[
                pltpu.VMEM((tiles.block_q, LANES), jnp.float32),
                pltpu.VMEM((tiles.block_q, LANES), jnp.float32),
                pltpu.VMEM((tiles.block_q, d), jnp.float32),
                *[pltpu.VMEM((tiles.block_q, LANES), jnp.int32) for _ in pairs],
            ],
        ),
        out_shape=result((p.batch, p.heads, layout.q_padded, d), p.dtype, q, k, v, do),
        compiler_params=layout.compiler_params(specs.semantics, tiles.vmem(p, tiles.block_q, 1)),
        cost_estimate=pl.CostEstimate(
            flops=2 * visited * (2 * d + dv),
            transcendentals=visited,
            bytes_accessed=2 * q.nbytes
            + do.nbytes
            + visited // tiles.block_q * (d + dv) * p.itemsize,
        ),
        interpret=layout.chip.interpret,
        name="ejkernel_flash_dq",
    )(table, q, k, v, do, lse, delta, *row_q, *row_kv)

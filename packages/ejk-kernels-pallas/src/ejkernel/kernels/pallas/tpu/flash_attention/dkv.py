"""Gradients of keys and values on a TPU.

    p = exp(x - lse);  dv = p^T do;  ds = p * (do v^T - delta);  dk = scale * ds^T q

Keys are held and queries walked, and every tile is transposed: ``[keys, queries]``. So dv and dk
are plain products of what the exponentials give, and lse and delta, one number a query, lie along
lanes and are never spread. Grid (batch, kv head, key block, head of the group, step): the heads
that share a key add up in its accumulators, in a fixed order.

Bound: 8 q k d FLOPs a head; the matrix units, as forward.

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

from ejkernel.kernels.pallas.compat import result
from ejkernel.kernels.pallas.tpu.common.masks import LANES, column, touches, visible
from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout
from ejkernel.kernels.pallas.tpu.flash_attention.specs import KeysHeld, entry


def _transposed_strip(
    layout: Layout,
    products: tuple[jax.Array, jax.Array],
    mask: jax.Array | None,
    lse: jax.Array,
    delta: jax.Array,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """p^T and ds^T of a tile from k q^T and v do^T ``[keys, queries]``, lse and delta rows."""
    x, bent = layout.logits(products[0])
    p = jnp.exp2(x - lse)
    if mask is not None:
        p = jnp.where(mask, p, 0.0)
    ds = p * (products[1] - delta)
    if bent is not None:
        ds = ds * (1.0 - bent * bent)
    return (p, ds) if layout.tiles.unpacked else (p.astype(dtype), ds.astype(dtype))


def _kernel(layout: Layout, table: Any, *given: Any) -> None:
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, *refs = given
    n = len(layout.pair_names)
    q_rows, kv_rows, refs = refs[:n], refs[n : 2 * n], refs[2 * n :]
    dk_ref, dv_ref, dk_acc, dv_acc, *columns = refs
    b, ki, g, t = (pl.program_id(axis) for axis in (0, 2, 3, 4))
    first = entry(layout, layout.kv_blocks, b, ki)
    start, full_start, full_stop, stop = (table[first + i] for i in range(4))
    qi = start + t
    block_q, block_kv, rows = layout.tiles.block_q, layout.tiles.block_kv, layout.tiles.rows

    @pl.when((t == 0) & (g == 0))
    def _begin() -> None:
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)
        for row, spread in zip(kv_rows, columns, strict=True):
            spread[...] = column(row[0])

    def products(strip: Any, queries: Any) -> tuple[jax.Array, jax.Array]:
        return (
            layout.dot(k_ref[0, 0, strip], q_ref[0, 0, queries], (1, 1)),
            layout.dot(v_ref[0, 0, strip], do_ref[0, 0, queries], (1, 1)),
        )

    def add(strip: Any, queries: Any, pair: tuple[jax.Array, jax.Array], mask: Any) -> None:
        q, do = q_ref[0, 0, queries], do_ref[0, 0, queries]
        lse, delta = lse_ref[0, 0, :, queries], delta_ref[0, 0, :, queries]
        p, ds = _transposed_strip(layout, pair, mask, lse, delta, q.dtype)
        dv_acc[strip] += layout.dot(p, do.astype(p.dtype), (1, 0))
        dk_acc[strip] += layout.dot(ds, q.astype(ds.dtype), (1, 0))

    full = (qi >= full_start) & (qi < full_stop)

    if layout.some_full:

        @pl.when(full)
        def _full_tile() -> None:
            everything = pl.ds(0, block_q)
            ready = products(pl.ds(0, rows), everything)
            for i in range(0, block_kv, rows):
                following = None
                if i + rows < block_kv:
                    following = products(pl.ds(i + rows, rows), everything)
                add(pl.ds(i, rows), everything, ready, None)
                ready = following

    if layout.some_partial:

        @pl.when((qi < stop) & ~full)
        def _masked_tile() -> None:
            edge_q, edge_kv = layout.tiles.edge(block_q), layout.tiles.edge(block_kv)
            across = block_q // edge_q

            def edge_tile(index: Any, carry: None) -> None:
                j = pl.multiple_of(index // across * edge_kv, edge_kv)
                i = pl.multiple_of(index % across * edge_q, edge_q)
                first_q, first_kv = qi * block_q + i, ki * block_kv + j

                @pl.when(touches(layout.rules, first_q, first_kv, edge_q, edge_kv))
                def _() -> None:
                    strip, queries = pl.ds(j, edge_kv), pl.ds(i, edge_q)
                    mask = visible(
                        layout.rules,
                        (edge_kv, edge_q),
                        first_q,
                        first_kv,
                        tuple(c[strip] for c in columns),
                        tuple(r[0, :, queries] for r in q_rows),
                        queries_walked=True,
                    )
                    add(strip, queries, products(strip, queries), mask)

            lax.fori_loop(0, block_kv // edge_kv * across, edge_tile, None)

    @pl.when((t == layout.steps - 1) & (g == layout.problem.group - 1))
    def _end() -> None:
        dk_ref[0, 0] = (dk_acc[...] * layout.problem.scale).astype(dk_ref.dtype)
        dv_ref[0, 0] = dv_acc[...].astype(dv_ref.dtype)


def key_gradients(
    layout: Layout,
    table: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    pairs: list[tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """dk ``[b, hk, k, d]`` and dv ``[b, hk, k, dv]`` of padded, head-major arrays.

    lse (base 2, large where a row sees nothing) and delta are float32 ``[b, h, 1, q]``.
    """
    p, tiles = layout.problem, layout.tiles
    d, dv = layout.dim, layout.value_dim
    specs = KeysHeld(layout)
    row_q, row_kv = [x for x, _ in pairs], [x for _, x in pairs]
    visited = p.batch * p.heads * layout.kv_padded * layout.steps * tiles.block_q
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
            out_specs=[specs.key(d), specs.key(dv)],
            scratch_shapes=[
                pltpu.VMEM((tiles.block_kv, d), jnp.float32),
                pltpu.VMEM((tiles.block_kv, dv), jnp.float32),
                *[pltpu.VMEM((tiles.block_kv, LANES), jnp.int32) for _ in pairs],
            ],
        ),
        out_shape=[
            result((p.batch, p.kv_heads, layout.kv_padded, d), p.dtype, q, k, v, do),
            result((p.batch, p.kv_heads, layout.kv_padded, dv), p.dtype, q, k, v, do),
        ],
        compiler_params=layout.compiler_params(specs.semantics, tiles.vmem(p, tiles.block_kv, 2)),
        cost_estimate=pl.CostEstimate(
            flops=4 * visited * (d + dv),
            transcendentals=visited,
            bytes_accessed=2 * (k.nbytes + v.nbytes)
            + visited // tiles.block_kv * (d + dv) * p.itemsize,
        ),
        interpret=layout.chip.interpret,
        name="ejkernel_flash_dkv",
    )(table, q, k, v, do, lse, delta, *row_q, *row_kv)

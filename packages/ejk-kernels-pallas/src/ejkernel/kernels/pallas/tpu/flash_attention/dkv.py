"""Gradients of keys and values on a TPU.

    p = exp(x - lse);  dv = p^T do;  ds = p * (do v^T - delta);  dk = scale * ds^T q

Keys are held and queries walked. Grid (batch, kv head, key block, head of the group, step): the
heads that share a key add up in its accumulators, in a fixed order. Tiles have two forms:

* ``[keys, queries]``, gradients ``[keys, d]``: plain products of what the exponentials give; lse
  and delta, one number a query, lie along lanes and are never spread. A matrix unit of 128 columns
  is full in all four products.
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

from ejkernel.kernels.pallas.compat import result
from ejkernel.kernels.pallas.tpu.common.masks import LANES, column, fit
from ejkernel.kernels.pallas.tpu.flash_attention.edges import (
    Place,
    edge_tiles,
    place_mask,
    strips,
)
from ejkernel.kernels.pallas.tpu.flash_attention.gradients import (
    Pair,
    overlapped,
    tile_gradients,
)
from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout
from ejkernel.kernels.pallas.tpu.flash_attention.specs import KeysHeld, entry


def _kernel(layout: Layout, table: Any, *given: Any) -> None:
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, *refs = given
    n = len(layout.pair_names)
    q_rows, kv_rows, refs = refs[:n], refs[n : 2 * n], refs[2 * n :]
    dk_ref, dv_ref, dk_acc, dv_acc, *columns = refs
    b, ki, g, t = (pl.program_id(axis) for axis in (0, 2, 3, 4))
    first = entry(layout, layout.kv_blocks, b, ki)
    start, full_start, full_stop, stop = (table[first + i] for i in range(4))
    qi = start + t
    tiles, wide = layout.tiles, layout.tiles.transposed

    @pl.when((t == 0) & (g == 0))
    def _begin() -> None:
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)
        if not wide:
            for row, spread in zip(kv_rows, columns, strict=True):
                spread[...] = column(row[0])

    def products(place: Place) -> Pair:
        queries, keys = place
        q, k, v, do = (
            q_ref[0, 0, queries],
            k_ref[0, 0, keys],
            v_ref[0, 0, keys],
            do_ref[0, 0, queries],
        )
        if wide:
            return layout.dot(q, k, (1, 1)), layout.dot(do, v, (1, 1))
        return layout.dot(k, q, (1, 1)), layout.dot(v, do, (1, 1))

    def add(place: Place, pair: Pair, mask: Any = None) -> None:
        queries, keys = place
        q, do = q_ref[0, 0, queries], do_ref[0, 0, queries]
        lse, delta = lse_ref[0, 0, :, queries], delta_ref[0, 0, :, queries]
        if wide:
            lse, delta = (fit(column(x), pair[0].shape[1]) for x in (lse, delta))
        p, ds = tile_gradients(layout, pair, mask, lse, delta, q.dtype)
        q, do = q.astype(ds.dtype), do.astype(p.dtype)
        if wide:
            dv_acc[:, keys] += layout.dot(do.T, p, (1, 0))
            dk_acc[:, keys] += layout.dot(q.T, ds, (1, 0))
        else:
            dv_acc[keys] += layout.dot(p, do, (1, 0))
            dk_acc[keys] += layout.dot(ds, q, (1, 0))

    def masked(place: Place, pair: Pair) -> None:
        queries, keys = place
        if wide:
            down = [column(r[0, :, queries]) for r in q_rows]
            across = [r[0, :, keys] for r in kv_rows]
        else:
            down, across = [c[keys] for c in columns], [r[0, :, queries] for r in q_rows]
        sides = dict(queries_on_lanes=not wide, check_queries=True)
        add(place, pair, place_mask(layout, qi, ki, place, down, across, **sides))

    def places(i: Any, j: Any, size_q: int, size_kv: int) -> list[Place]:
        q_strip = min(tiles.rows, size_q) if wide else size_q
        kv_strip = min(tiles.columns if wide else tiles.rows, size_kv)
        return [(x, y) for y in strips(j, size_kv, kv_strip) for x in strips(i, size_q, q_strip)]

    full = (qi >= full_start) & (qi < full_stop)

    if layout.some_full:

        @pl.when(full)
        def _full_tile() -> None:
            overlapped(places(0, 0, tiles.block_q, tiles.block_kv), products, add)

    if layout.some_partial:

        @pl.when((qi < stop) & ~full)
        def _masked_tile() -> None:
            def part(i: Any, j: Any) -> None:
                overlapped(places(i, j, tiles.edge_q, tiles.edge_kv), products, masked)

            edge_tiles(layout, qi, ki, part)

    @pl.when((t == layout.steps - 1) & (g == layout.problem.group - 1))
    def _end() -> None:
        dk, dv = dk_acc[...] * layout.problem.scale, dv_acc[...]
        dk_ref[0, 0] = (dk.T if wide else dk).astype(dk_ref.dtype)
        dv_ref[0, 0] = (dv.T if wide else dv).astype(dv_ref.dtype)


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
    if tiles.transposed:
        scratch = [pltpu.VMEM((width, tiles.block_kv), jnp.float32) for width in (d, dv)]
    else:
        scratch = [pltpu.VMEM((tiles.block_kv, width), jnp.float32) for width in (d, dv)]
        scratch += [pltpu.VMEM((tiles.block_kv, LANES), jnp.int32) for _ in pairs]
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
            scratch_shapes=scratch,
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

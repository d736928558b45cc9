"""What both backward kernels do with a tile: from products to p and ds, in strips that overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels.pallas.tpu.common.masks import touches
from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout

Pair = tuple[jax.Array, jax.Array]
Slice = Any


def tile_gradients(
    layout: Layout,
    products: Pair,
    mask: jax.Array | None,
    lse: jax.Array,
    delta: jax.Array,
    dtype: Any,
) -> Pair:
    """p and ds of a tile, as operands of the next products.

        p = exp2(x - lse);  ds = p * (dp - delta) * (1 - tanh^2)

    ``products`` are q k^T and do v^T, or both transposed; lse (base 2) and delta broadcast.
    """
    x, bent = layout.logits(products[0])
    p = jnp.exp2(x - lse)
    if mask is not None:
        p = jnp.where(mask, p, 0.0)
    ds = p * (products[1] - delta)
    if bent is not None:
        ds = ds * (1.0 - bent * bent)
    return (p, ds) if layout.tiles.unpacked else (p.astype(dtype), ds.astype(dtype))


def overlapped(
    places: Sequence[Any], products: Callable[..., Pair], add: Callable[..., None]
) -> None:
    """``add(place, products(place))`` for every place, the products one place ahead.

    Straight code: the compiler runs the matrix units on the next tile under the exponentials of
    this one.
    """
    ready = products(places[0])
    for n, place in enumerate(places):
        following = products(places[n + 1]) if n + 1 < len(places) else None
        add(place, ready)
        ready = following


def edge_tiles(
    layout: Layout, qi: Any, ki: Any, do_tile: Callable[[Slice, Slice, Any, Any], None]
) -> None:
    """Runs ``do_tile(queries, keys, first_q, first_kv)`` on the parts of a block that the band
    and the lengths let anything see."""
    tiles, rules = layout.tiles, layout.rules
    edge_q, edge_kv = tiles.edge(tiles.block_q), tiles.edge(tiles.block_kv)
    across = tiles.block_kv // edge_kv

    def one(index: Any, carry: None) -> None:
        i = pl.multiple_of(index // across * edge_q, edge_q)
        j = pl.multiple_of(index % across * edge_kv, edge_kv)
        first_q, first_kv = qi * tiles.block_q + i, ki * tiles.block_kv + j

        @pl.when(touches(rules, first_q, first_kv, edge_q, edge_kv))
        def _() -> None:
            do_tile(pl.ds(i, edge_q), pl.ds(j, edge_kv), first_q, first_kv)

    lax.fori_loop(0, tiles.block_q // edge_q * across, one, None)

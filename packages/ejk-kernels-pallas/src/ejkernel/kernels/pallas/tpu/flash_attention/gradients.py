"""What both backward kernels do with a tile: from products to p and ds, in strips that overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout

Pair = tuple[jax.Array, jax.Array]


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
    places: Sequence[Any], products: Callable[[Any], Any], add: Callable[..., None]
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

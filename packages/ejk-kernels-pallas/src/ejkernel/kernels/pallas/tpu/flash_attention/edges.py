"""Blocks that need an element mask: in parts, so that what nothing sees is skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels.pallas.tpu.common.masks import touches, visible
from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout

Place = tuple[Any, Any]  # slices of a block of queries and of a block of keys


def strips(first: Any, length: int, size: int) -> list[Any]:
    """Slices of ``size`` from ``first`` on; ``first`` may be traced."""
    starts = range(0, length, size)
    if isinstance(first, int):
        return [pl.ds(first + i, size) for i in starts]
    return [pl.ds(pl.multiple_of(first + i, size), size) for i in starts]


def edge_tiles(layout: Layout, qi: Any, ki: Any, do_part: Callable[[Any, Any], None]) -> None:
    """Runs ``do_part(i, j)`` on the parts of block (qi, ki) that the band and the lengths let
    anything see; each has ``edge_q`` by ``edge_kv`` pairs and starts at (i, j) in the block."""
    tiles, edge_q, edge_kv = layout.tiles, layout.tiles.edge_q, layout.tiles.edge_kv
    across = tiles.block_kv // edge_kv

    def one(index: Any, carry: None) -> None:
        i = pl.multiple_of(index // across * edge_q, edge_q)
        j = pl.multiple_of(index % across * edge_kv, edge_kv)
        first_q, first_kv = qi * tiles.block_q + i, ki * tiles.block_kv + j
        pl.when(touches(layout.rules, first_q, first_kv, edge_q, edge_kv))(lambda: do_part(i, j))

    lax.fori_loop(0, tiles.block_q // edge_q * across, one, None)


def place_mask(
    layout: Layout,
    qi: Any,
    ki: Any,
    place: Place,
    columns: Sequence[jax.Array],
    rows: Sequence[jax.Array],
    **sides: bool,
) -> jax.Array:
    """Element mask of a place in block (qi, ki); ``sides`` and the rest as ``visible``."""
    queries, keys = place
    shape = (queries.size, keys.size)
    return visible(
        layout.rules,
        shape[::-1] if sides["queries_on_lanes"] else shape,
        qi * layout.tiles.block_q + queries.start,
        ki * layout.tiles.block_kv + keys.start,
        tuple(columns),
        tuple(rows),
        **sides,
    )

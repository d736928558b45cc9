"""What a grid step does with the tile it visits: no mask, a mask in parts, or nothing at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels.pallas.tpu.common.masks import touches, visible
from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout

Place = tuple[Any, Any]  # slices of a block of queries and of a block of keys


def strips(first: Any, length: int, size: int) -> list[Any]:
    """Slices of at most ``size`` from ``first`` on; ``first`` may be traced."""
    size = min(size, length)
    starts = range(0, length, size)
    if isinstance(first, int):
        return [pl.ds(first + i, size) for i in starts]
    return [pl.ds(pl.multiple_of(first + i, size), size) for i in starts]


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


@dataclass(frozen=True)
class Step:
    """The tile of a grid step: block (qi, ki), and what the table says about the held block.

    Attributes:
        keys_held: whether queries are walked, not keys.
        queries_on_lanes: whether tiles are ``[keys, queries]``.
        full_start, full_stop, stop: walked blocks that need no mask, end of those visited.
    """

    layout: Layout
    qi: Any
    ki: Any
    full_start: Any
    full_stop: Any
    stop: Any
    keys_held: bool
    queries_on_lanes: bool

    def places(self, i: Any, j: Any, size_q: int, size_kv: int) -> list[Place]:
        """A part of the block from (i, j) on, cut into tiles of ``rows`` by ``columns``."""
        tiles = self.layout.tiles
        q, kv = tiles.rows, tiles.columns
        if self.queries_on_lanes:
            q, kv = kv, q
        queries, keys = strips(i, size_q, q), strips(j, size_kv, kv)
        if self.keys_held:
            return [(x, y) for y in keys for x in queries]
        return [(x, y) for x in queries for y in keys]

    def run(
        self,
        products: Callable[[Place], Any],
        add: Callable[[Place, Any], None],
        masked: Callable[[Place, Any], None],
    ) -> None:
        """Adds ``products`` of every visible place, by ``masked`` where elements are hidden."""
        layout, tiles = self.layout, self.layout.tiles
        walked = self.qi if self.keys_held else self.ki
        full = (walked >= self.full_start) & (walked < self.full_stop)

        if layout.some_full:

            @pl.when(full)
            def _full_tile() -> None:
                overlapped(self.places(0, 0, tiles.block_q, tiles.block_kv), products, add)

        if layout.some_partial:

            @pl.when((walked < self.stop) & ~full)
            def _masked_tile() -> None:
                self._parts(
                    lambda i, j: overlapped(
                        self.places(i, j, tiles.edge_q, tiles.edge_kv), products, masked
                    )
                )

    def _parts(self, do_part: Callable[[Any, Any], None]) -> None:
        """Runs ``do_part(i, j)`` on the parts of the block that the band and the lengths let
        anything see; each has ``edge_q`` by ``edge_kv`` pairs and starts at (i, j) in the block."""
        layout, tiles = self.layout, self.layout.tiles
        edge_q, edge_kv = tiles.edge_q, tiles.edge_kv
        across = tiles.block_kv // edge_kv

        def one(index: Any, carry: None) -> None:
            i = pl.multiple_of(index // across * edge_q, edge_q)
            j = pl.multiple_of(index % across * edge_kv, edge_kv)
            first_q, first_kv = self.qi * tiles.block_q + i, self.ki * tiles.block_kv + j
            seen = touches(layout.rules, first_q, first_kv, edge_q, edge_kv)
            pl.when(seen)(lambda: do_part(i, j))

        lax.fori_loop(0, tiles.block_q // edge_q * across, one, None)

    def mask(
        self, place: Place, columns: Sequence[jax.Array], rows: Sequence[jax.Array]
    ) -> jax.Array:
        """Element mask of a place; ``columns`` and ``rows`` as ``visible`` takes them."""
        queries, keys = place
        tiles, shape = self.layout.tiles, (queries.size, keys.size)
        return visible(
            self.layout.rules,
            shape[::-1] if self.queries_on_lanes else shape,
            self.qi * tiles.block_q + queries.start,
            self.ki * tiles.block_kv + keys.start,
            tuple(columns),
            tuple(rows),
            queries_on_lanes=self.queries_on_lanes,
            check_queries=self.keys_held,
        )


def step_of(
    layout: Layout,
    table: Any,
    first: Any,
    held: Any,
    step: Any,
    *,
    keys_held: bool = False,
    queries_on_lanes: bool = False,
) -> Step:
    """Step number ``step`` of block ``held``, whose entry in the table starts at ``first``."""
    start, full_start, full_stop, stop = (table[first + i] for i in range(4))
    walked = start + step
    qi, ki = (walked, held) if keys_held else (held, walked)
    return Step(layout, qi, ki, full_start, full_stop, stop, keys_held, queries_on_lanes)

"""One grid step: runs the visited tile without a mask, with a mask in parts, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels.pallas.tpu.common.masks import touches, visible
from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout
from ejkernel.kernels.pallas.tpu.flash_attention.specs import visited_block

TilePosition = tuple[Any, Any]  # slices of a block of queries and of a block of keys


def strips(first: Any, length: int, size: int) -> list[Any]:
    """Returns slices of at most ``size`` starting at ``first``, which may be traced."""
    size = min(size, length)
    starts = range(0, length, size)
    if isinstance(first, int):
        return [pl.ds(first + i, size) for i in starts]
    return [pl.ds(pl.multiple_of(first + i, size), size) for i in starts]


def overlap_scores(
    positions: Sequence[Any], scores: Callable[[Any], Any], add: Callable[..., None]
) -> None:
    """Runs ``add(position, scores(position))`` for every position, scores one position ahead.

    Straight-line code: the compiler runs the matrix units on the next tile under the exponentials
    of this one.
    """
    ready = scores(positions[0])
    for n, position in enumerate(positions):
        following = scores(positions[n + 1]) if n + 1 < len(positions) else None
        add(position, ready)
        ready = following


@dataclass(frozen=True)
class Step:
    """The tile of a grid step: block (qi, ki), and the table entry of the outer block.

    Attributes:
        keys_outer: whether the outer blocks are keys and the inner ones queries.
        queries_on_lanes: whether tiles are ``[keys, queries]``.
        full_start, full_stop, stop: inner blocks that need no mask, end of the visited blocks.
    """

    layout: Layout
    qi: Any
    ki: Any
    full_start: Any
    full_stop: Any
    stop: Any
    keys_outer: bool
    queries_on_lanes: bool

    def positions(self, i: Any, j: Any, size_q: int, size_kv: int) -> list[TilePosition]:
        """Returns the tiles of the part of the block that starts at (i, j) and has ``size_q``
        queries and ``size_kv`` keys; tiles have ``Tiles.rows`` by ``Tiles.columns`` pairs."""
        tiles = self.layout.tiles
        tile_q, tile_kv = tiles.rows, tiles.columns
        if self.queries_on_lanes:
            tile_q, tile_kv = tile_kv, tile_q
        query_strips, key_strips = strips(i, size_q, tile_q), strips(j, size_kv, tile_kv)
        if self.keys_outer:
            return [(queries, keys) for keys in key_strips for queries in query_strips]
        return [(queries, keys) for queries in query_strips for keys in key_strips]

    def run(
        self,
        scores: Callable[[TilePosition], Any],
        add: Callable[[TilePosition, Any], None],
        add_masked: Callable[[TilePosition, Any], None],
    ) -> None:
        """Runs ``add(position, scores(position))`` on every tile that has a visible pair, and
        ``add_masked`` in its place where the block has hidden pairs."""
        layout, tiles = self.layout, self.layout.tiles
        inner = self.qi if self.keys_outer else self.ki
        full = (inner >= self.full_start) & (inner < self.full_stop)

        if layout.has_full:

            @pl.when(full)
            def _full_tile() -> None:
                overlap_scores(self.positions(0, 0, tiles.block_q, tiles.block_kv), scores, add)

        if layout.has_partial:

            @pl.when((inner < self.stop) & ~full)
            def _masked_tile() -> None:
                self.visit_parts(
                    lambda i, j: overlap_scores(
                        self.positions(i, j, tiles.edge_q, tiles.edge_kv), scores, add_masked
                    )
                )

    def visit_parts(self, do_part: Callable[[Any, Any], None]) -> None:
        """Runs ``do_part(i, j)`` on the parts of the block that meet the band and the lengths;
        each has ``edge_q`` by ``edge_kv`` pairs and starts at (i, j) in the block."""
        layout, tiles = self.layout, self.layout.tiles
        edge_q, edge_kv = tiles.edge_q, tiles.edge_kv
        parts_across = tiles.block_kv // edge_kv

        def visit_part(index: Any, carry: None) -> None:
            i = pl.multiple_of(index // parts_across * edge_q, edge_q)
            j = pl.multiple_of(index % parts_across * edge_kv, edge_kv)
            first_q, first_kv = self.qi * tiles.block_q + i, self.ki * tiles.block_kv + j
            has_pairs = touches(layout.rules, first_q, first_kv, edge_q, edge_kv)
            pl.when(has_pairs)(lambda: do_part(i, j))

        lax.fori_loop(0, tiles.block_q // edge_q * parts_across, visit_part, None)

    def mask(
        self, position: TilePosition, columns: Sequence[jax.Array], rows: Sequence[jax.Array]
    ) -> jax.Array:
        """Element mask of a position; ``columns`` and ``rows`` as ``visible`` takes them."""
        queries, keys = position
        tiles, shape = self.layout.tiles, (queries.size, keys.size)
        return visible(
            self.layout.rules,
            shape[::-1] if self.queries_on_lanes else shape,
            self.qi * tiles.block_q + queries.start,
            self.ki * tiles.block_kv + keys.start,
            tuple(columns),
            tuple(rows),
            queries_on_lanes=self.queries_on_lanes,
            check_queries=self.keys_outer,
            check_keys=not self.keys_outer or self.layout.masks_padded_keys,
        )


def step_of(
    layout: Layout,
    table: Any,
    first: Any,
    outer: Any,
    step: Any,
    *,
    keys_outer: bool = False,
    queries_on_lanes: bool = False,
) -> Step:
    """Returns step ``step`` of block ``outer``, whose entry in the table starts at ``first``.

    ``table`` is in scalar memory, as ``masks.VisitedBlocks`` has it.
    """
    if layout.listed:
        inner = visited_block(layout, table, first, step)
        item = table[first + 1 + jnp.minimum(step, layout.steps - 1)]
        is_visited = step < table[first]
        stop = jnp.where(is_visited, inner + 1, inner)
        full_start, full_stop = inner, jnp.where(is_visited & (item % 2 == 1), inner + 1, inner)
    else:
        start, full_start, full_stop, stop = (table[first + i] for i in range(4))
        inner = start + step
    qi, ki = (inner, outer) if keys_outer else (outer, inner)
    return Step(layout, qi, ki, full_start, full_stop, stop, keys_outer, queries_on_lanes)

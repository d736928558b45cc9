"""Copies of blocks of a cache from device memory into the two buffers of a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.page_attention.tiles import Tiles

ROW_UNIT = 16  # rows, tokens times heads, that the start of a copy is a multiple of


@dataclass(frozen=True)
class Pages:
    """A paged cache: every page is a copy of its own, found in the block table.

    Attributes:
        tiles: pages of a block.
        pools: the arrays ``[pages, rows, dim]``. buffers: ``[2, pages of a block, rows, dim]``.
        semaphores: ``[2, arrays]``.
    """

    tiles: Tiles
    pools: tuple[Any, ...]
    buffers: tuple[Any, ...]
    semaphores: Any

    def first_token(self, block: Any) -> Any:
        """Returns the first token of a block."""
        return block * self.tiles.block

    def _copies(self, entry: Any, slot: Any, page_of_block: Any) -> list[Any]:
        """Returns the copies of a page of the pools to its place in a block, one for each array."""
        return [
            pltpu.make_async_copy(
                pool.at[entry], buffer.at[slot, page_of_block], self.semaphores.at[slot, n]
            )
            for n, (pool, buffer) in enumerate(zip(self.pools, self.buffers, strict=True))
        ]

    def _for_pages(self, block: Any, start: Any, end: Any, do: Any) -> None:
        """Runs ``do(page of the sequence, page of the block)`` on the pages of a block that have
        tokens from ``start`` to ``end``."""
        t = self.tiles
        first = jnp.maximum(start // t.tokens, block * t.pages)
        stop = jnp.minimum(pl.cdiv(end, t.tokens), (block + 1) * t.pages)
        lax.fori_loop(first, stop, lambda page, _: do(page, page - block * t.pages), None)

    def fetch(self, table: Any, block: Any, start: Any, end: Any, slot: Any) -> None:
        """Starts the copies of a block for the tokens from ``start`` to ``end``."""

        def start_page(page: Any, page_of_block: Any) -> None:
            for copy in self._copies(table[0, 0, page], slot, page_of_block):
                copy.start()

        self._for_pages(block, start, end, start_page)

    def wait(self, block: Any, start: Any, end: Any, slot: Any) -> None:
        """Waits for the copies of a block."""

        def wait_page(page: Any, page_of_block: Any) -> None:
            for copy in self._copies(0, slot, page_of_block):  # only the size of a copy counts
                copy.wait()

        self._for_pages(block, start, end, wait_page)


@dataclass(frozen=True)
class Rows:
    """A contiguous cache: a block is one copy of consecutive rows of a sequence.

    Attributes:
        tiles: one page, the tokens of a block. length: tokens of a sequence.
        heads: rows of a token. pools: the arrays ``[sequences, length * heads, dim]``.
        buffers, semaphores: as ``Pages``.
    """

    tiles: Tiles
    length: int
    heads: int
    pools: tuple[Any, ...]
    buffers: tuple[Any, ...]
    semaphores: Any

    def first_token(self, block: Any) -> Any:
        """Returns the first token of a block: the last block ends where the cache ends."""
        return jnp.minimum(block * self.tiles.tokens, self.length - self.tiles.tokens)

    def _copies(self, sequence: Any, first_row: Any, slot: Any) -> list[Any]:
        """Returns the copies of the rows of a block, one for each array."""
        rows = pl.ds(first_row, self.tiles.tokens * self.heads)
        return [
            pltpu.make_async_copy(
                pool.at[sequence, rows], buffer.at[slot, 0], self.semaphores.at[slot, n]
            )
            for n, (pool, buffer) in enumerate(zip(self.pools, self.buffers, strict=True))
        ]

    def fetch(self, table: Any, block: Any, start: Any, end: Any, slot: Any) -> None:
        """Starts the copies of a block; the table has the number of the sequence."""
        first_row = pl.multiple_of(self.first_token(block) * self.heads, ROW_UNIT)
        for copy in self._copies(table[0, 0, 0], first_row, slot):
            copy.start()

    def wait(self, block: Any, start: Any, end: Any, slot: Any) -> None:
        """Waits for the copies of a block."""
        for copy in self._copies(0, 0, slot):  # only the size of a copy counts
            copy.wait()

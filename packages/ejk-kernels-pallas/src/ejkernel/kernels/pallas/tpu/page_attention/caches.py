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

    def _for_pages(self, block: Any, start: Any, end: Any, do: Any) -> None:
        """Runs ``do(page of the sequence, page of the block)`` on pages with such tokens."""
        t = self.tiles
        first = jnp.maximum(start // t.tokens, block * t.pages)
        stop = jnp.minimum(pl.cdiv(end, t.tokens), (block + 1) * t.pages)
        lax.fori_loop(first, stop, lambda page, _: do(page, page - block * t.pages), None)

    def fetch(self, table: Any, block: Any, start: Any, end: Any, slot: Any) -> None:
        """Starts the copies of a block for the tokens from ``start`` to ``end``."""

        def start_page(page: Any, at: Any) -> None:
            entry = table[0, 0, page]
            for n, (pool, buffer) in enumerate(zip(self.pools, self.buffers, strict=True)):
                pltpu.make_async_copy(
                    pool.at[entry], buffer.at[slot, at], self.semaphores.at[slot, n]
                ).start()

        self._for_pages(block, start, end, start_page)

    def wait(self, block: Any, start: Any, end: Any, slot: Any) -> None:
        """Waits for the copies of a block."""

        def wait_page(page: Any, at: Any) -> None:
            for n, (pool, buffer) in enumerate(zip(self.pools, self.buffers, strict=True)):
                pltpu.make_async_copy(
                    pool.at[0], buffer.at[slot, at], self.semaphores.at[slot, n]
                ).wait()

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

    def fetch(self, table: Any, block: Any, start: Any, end: Any, slot: Any) -> None:
        """Starts the copies of a block; the table has the number of the sequence."""
        sequence = table[0, 0, 0]
        for n, (pool, buffer) in enumerate(zip(self.pools, self.buffers, strict=True)):
            rows = self.tiles.tokens * self.heads
            first = pl.multiple_of(self.first_token(block) * self.heads, ROW_UNIT)
            pltpu.make_async_copy(
                pool.at[sequence, pl.ds(first, rows)],
                buffer.at[slot, 0],
                self.semaphores.at[slot, n],
            ).start()

    def wait(self, block: Any, start: Any, end: Any, slot: Any) -> None:
        """Waits for the copies of a block."""
        for n, (pool, buffer) in enumerate(zip(self.pools, self.buffers, strict=True)):
            rows = self.tiles.tokens * self.heads
            pltpu.make_async_copy(
                pool.at[0, pl.ds(0, rows)], buffer.at[slot, 0], self.semaphores.at[slot, n]
            ).wait()

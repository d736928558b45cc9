"""Loaders of long prefill on Hopper: keys and values of a block, gathered from its pages by TMA.

``PagedLoader`` copies pages of the matmuls' dtype to the buffers that matmuls read.
``EightBitPagedLoader`` copies pages of 8 bits to staging memory, from which the same warpgroup
converts them to these buffers: an exact conversion, so that nothing else changes but the scales.

For what a loader is, and who calls which method, see ``flash_attention/kv_loader.py``. A tile is a
``PageTile`` of ``QueueScheduler`` here, or a ``DecodeTile`` of ``RowDecoder``, which calls
``source``, ``copy`` and ``clear_from``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.convert import convert_rows
from ejkernel.kernels.pallas.gpu.common.masks import hide_outside
from ejkernel.kernels.pallas.gpu.common.registers import LAYOUT, read
from ejkernel.kernels.pallas.gpu.common.warps import in_one_warp, in_warps
from ejkernel.kernels.pallas.gpu.common.work_counter import load_word
from ejkernel.kernels.pallas.gpu.flash_attention.forward_form import Form
from ejkernel.kernels.pallas.gpu.flash_attention.forward_softmax import F32, ROWS
from ejkernel.types.masks.structure import Band

CLEARED_COLUMNS = 64  # columns of values that are zeroed together
STAGED = ("k", "v")  # in the order of ``staged``


@dataclass(frozen=True)
class PagedLoader:
    """Keys and values of pages ``[pages, page_size, 2 * kv_heads, d]``, k and v of a head together.

    Attributes:
        form: the compiled form of the kernel.
        page_size: tokens of a page; it divides ``block_kv`` or is a multiple of it.
    """

    form: Form
    page_size: int

    def copies_of(self, keys: int) -> int:
        """Returns the number of TMA copies of a block of ``keys`` keys: one for every page."""
        return max(1, keys // self.page_size)

    @property
    def arrivals(self) -> int:
        """Arrivals that fill a buffer of keys or values: its TMA copies."""
        return self.copies_of(self.form.tiles.block_kv)

    def scratch(self) -> dict[str, Any]:
        """Returns the loader's own shared memory and barriers by name."""
        return {}

    def produce(self, kernel: Any, r: Any) -> None:
        """One warp copies queries and keys, another values.

        Each reads tables and waits for its own copies. What all warps of a warpgroup do, or do one
        after the other, takes time of the programs that compute, the more the smaller pages are.
        """
        scheduler = kernel.scheduler

        def per_tile(carry: Any) -> Any:
            i, n, number = carry  # tiles and key blocks that were loaded before, and the tile
            tile = scheduler.tile(r, number)
            first_row, last_block = scheduler.first_row(tile), tile.stop - 1
            blocks = tile.stop - tile.start

            def load_first_step() -> None:
                kernel.load_queries(r, tile, first_row, i)
                kernel.load(r, "k", tile, last_block, n)

            def load_steps(tensor: str, first_step: int) -> None:
                def load_step(step: Any, carry: Any) -> Any:
                    kernel.load(r, tensor, tile, last_block - step, n + step)
                    return carry

                lax.fori_loop(first_step, blocks, load_step, 0)

            in_warps(load_first_step)
            # the other warpgroups start on these copies while the tile is looked up
            next_number = scheduler.take_tile(r, i + 1)
            in_warps(partial(load_steps, "k", 1), partial(load_steps, "v", 0))
            return i + 1, n + blocks, next_number

        zero = jnp.int32(0)
        start = zero, zero, scheduler.take_tile(r, zero)
        lax.while_loop(lambda carry: carry[2] >= 0, per_tile, start)

    def key_block(self, r: Any, tile: Any, j: Any) -> Any:
        return j

    def source(self, r: Any, tile: Any, j: Any, keys: int | None = None) -> list[tuple[Any, Any]]:
        """Returns (page, range of its tokens) for every copy of the tile's key block j.

        ``keys``: keys of a block; None: ``block_kv``. Entries of the table are clipped to pages
        that exist: a block may reach past the table, and unused entries are arbitrary.
        """
        pages, columns = r.cache.shape[0], r.tables.shape[1]

        def page_at(column: Any) -> Any:
            page = load_word(r.tables, tile.sequence, lax.min(column, columns - 1))
            return lax.min(lax.max(page, 0), pages - 1)

        keys = keys or self.form.tiles.block_kv
        if self.page_size > keys:
            blocks = self.page_size // keys
            return [(page_at(lax.div(j, blocks)), pl.ds(lax.rem(j, blocks) * keys, keys))]
        copies = self.copies_of(keys)
        return [(page_at(j * copies + i), pl.ds(0, self.page_size)) for i in range(copies)]

    def copy(self, r: Any, tensor: str, tile: Any, source: Any, smem: Any, full: Any) -> None:
        """Starts the copies of ``source`` to ``smem [keys, d]``, which signal to ``full``."""
        cache_head = 2 * lax.div(tile.head, self.form.problem.group) + (tensor == "v")
        for i, (page, tokens) in enumerate(source):
            target = smem.at[pl.ds(i * tokens.size, tokens.size)]
            plgpu.copy_gmem_to_smem(r.cache.at[page, tokens, cache_head], target, full)

    def prepare_values(self, r: Any, tile: Any, j: Any, slot: Any) -> None:
        """Zeroes the values behind the last key.

        Both warpgroups do it, each before its own matmuls read them; what the other writes
        meanwhile is the same.
        """

        @pl.when(j >= tile.full_stop)
        def clear_behind() -> None:
            self.clear_from(r.v_smem.at[slot], tile.kv_len - j * self.form.tiles.block_kv)

    def clear_from(self, values: Any, first: Any) -> None:
        """Zeroes rows of ``values [keys, d]`` at and after ``first``.

        Their probability is 0, but 0 * NaN is NaN. ``rows.clear_rows`` writes less, but heads of 64
        are too narrow for it.
        """
        keys, columns = values.shape

        @pl.when(first < keys)
        def clear() -> None:
            for row in range(0, keys, ROWS):
                for column in range(0, columns, CLEARED_COLUMNS):
                    part = values.at[pl.ds(row, ROWS), pl.ds(column, CLEARED_COLUMNS)]
                    x = read(part, LAYOUT).astype(F32)
                    x = hide_outside(x, Band(), 0, rows_left=first - row, fill=0.0)
                    part[...] = x.astype(self.form.problem.dtype)
            plgpu.commit_smem()


@dataclass(frozen=True)
class EightBitPagedLoader(PagedLoader):
    """Pages of 8 bits, converted to the dtype of the matmuls in shared memory.

    Staging memory holds the keys of one block and its values. As soon as the warpgroup has
    converted either, it copies the same of the next block, which may be the next tile's: so it
    calls ``stage`` and ``convert`` where ``PagedLoader`` calls ``ForwardKernel.load``.

    Attributes:
        cache_dtype: dtype of the pages.
    """

    cache_dtype: str

    @property
    def arrivals(self) -> int:
        """Arrivals that fill a buffer of keys or values: of the warpgroup that has converted it."""
        return 1

    def scratch(self) -> dict[str, Any]:
        keys, count = self.form.tiles.block_kv, len(STAGED)
        shape = (count, keys, self.form.problem.dim)
        return {
            "staged": plgpu.SMEM(shape, jnp.dtype(self.cache_dtype)),
            "staged_full": plgpu.Barrier(num_arrivals=self.copies_of(keys), num_barriers=count),
        }

    def produce(self, kernel: Any, r: Any) -> None:
        """Copies queries; copies and converts keys and values, in the order of their use."""
        scheduler = kernel.scheduler

        def per_tile(carry: Any) -> Any:
            i, n, number = carry  # tiles and key blocks that were loaded before, and the tile
            tile = scheduler.tile(r, number)
            # behind the last values of the tile before, whose queries are then free or soon will be
            kernel.load_queries(r, tile, scheduler.first_row(tile), i)
            next_number = scheduler.take_tile(r, i + 1)
            blocks = tile.stop - tile.start

            def per_step(step: Any, n: Any) -> Any:
                is_last = step + 1 == blocks
                staged_number = jnp.where(is_last, next_number, number)
                # its ``full_stop`` remains this tile's, which no copy reads
                staged_tile = replace(tile, slot=staged_number)
                for tensor in STAGED:
                    self.convert(kernel, r, tensor, n)
                    next_step = jnp.where(is_last, 0, step + 1)
                    stage = partial(self.stage, r, tensor, staged_tile, next_step)
                    pl.when(staged_number >= 0)(stage)
                return n + 1

            return i + 1, lax.fori_loop(0, blocks, per_step, n), next_number

        zero = jnp.int32(0)
        first_number = scheduler.take_tile(r, zero)

        @pl.when(first_number >= 0)
        def stage_first() -> None:
            for tensor in STAGED:
                self.stage(r, tensor, scheduler.tile(r, first_number), zero)

        lax.while_loop(lambda carry: carry[2] >= 0, per_tile, (zero, zero, first_number))

    def stage(self, r: Any, tensor: str, tile: Any, step: Any) -> None:
        """Starts to copy "k" or "v" of a step of a tile to staging memory, in a warp for each.

        Steps go from the tile's last key block to its first.
        """
        index = STAGED.index(tensor)

        def copy() -> None:
            source = self.source(r, tile, tile.stop - 1 - step)
            self.copy(r, tensor, tile, source, r.staged.at[index], r.staged_full.at[index])

        in_one_warp(index, copy)

    def convert(self, kernel: Any, r: Any, tensor: str, n: Any) -> None:
        """Converts the staged block of "k" or "v", this program's n-th, to a free buffer.

        All threads of the warpgroup wait for the buffer and for the staged copies.
        """
        index = STAGED.index(tensor)
        buffer, full, wait_until_free = kernel.buffer_of(r, tensor, n)
        wait_until_free()
        plgpu.barrier_wait(r.staged_full.at[index])
        convert_rows(r.staged.at[index], buffer, self.cache_dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(full)

"""Loaders of long prefill on Hopper: keys and values of a block, gathered from its pages by TMA.

``PagedLoader`` copies pages of the matmuls' dtype to the buffers that matmuls read.
``EightBitPagedLoader`` copies pages of 8 bits to staging memory, from which the same warpgroup
converts them to these buffers: an exact conversion, so that nothing else changes but the scales.
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
STAGED = ("k", "v")  # in the order of their staging memory


@dataclass(frozen=True)
class PagedLoader:
    """Keys and values of pages ``[pages, page_size, 2 * kv_heads, d]``, heads interleaved.

    Attributes:
        form: the compiled form of the kernel.
        page_size: tokens of a page; it divides ``block_kv`` or is a multiple of it.
    """

    form: Form
    page_size: int

    @property
    def copies(self) -> int:
        """TMA copies of a block of keys."""
        return max(1, self.form.tiles.block_kv // self.page_size)

    @property
    def arrivals(self) -> int:
        """Arrivals that fill a buffer of keys or values: its TMA copies."""
        return self.copies

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
            i, n, number = carry
            tile = scheduler.tile(r, number)
            first, last = scheduler.first_row(tile), tile.stop - 1
            blocks = tile.stop - tile.start

            def load_first() -> None:
                kernel.load_queries(r, tile, first, i)
                kernel.load(r, "k", tile, last, n)

            def load_blocks(tensor: str, done: int) -> None:
                def load(x: Any, carry: Any) -> Any:
                    kernel.load(r, tensor, tile, last - x, n + x)
                    return carry

                lax.fori_loop(done, blocks, load, 0)

            in_warps(load_first)
            following = scheduler.number(r, i + 1)  # asking takes a while: after the first copies
            in_warps(partial(load_blocks, "k", 1), partial(load_blocks, "v", 0))
            return i + 1, n + blocks, following

        zero = jnp.int32(0)
        start = zero, zero, scheduler.number(r, zero)
        lax.while_loop(lambda carry: carry[2] >= 0, per_tile, start)

    def key_block(self, r: Any, tile: Any, j: Any) -> Any:
        return j

    def source(self, r: Any, tile: Any, j: Any, keys: int = 0) -> list[tuple[Any, Any]]:
        """Returns (page, its tokens) of every copy of block j of ``keys`` keys, 0: ``block_kv``."""
        pages, columns = r.cache.shape[0], r.tables.shape[1]

        def page_of(column):
            n = load_word(r.tables, tile.sequence, lax.min(column, columns - 1))
            return lax.min(lax.max(n, 0), pages - 1)

        block = keys or self.form.tiles.block_kv
        if self.page_size > block:
            blocks = self.page_size // block
            return [(page_of(lax.div(j, blocks)), pl.ds(lax.rem(j, blocks) * block, block))]
        copies = block // self.page_size
        return [(page_of(j * copies + i), pl.ds(0, self.page_size)) for i in range(copies)]

    def copy(self, r: Any, tensor: str, tile: Any, source: Any, smem: Any, full: Any) -> None:
        head = 2 * lax.div(tile.head, self.form.problem.group) + (tensor == "v")
        for i, (page, tokens) in enumerate(source):
            target = smem.at[pl.ds(i * tokens.size, tokens.size)]
            plgpu.copy_gmem_to_smem(r.cache.at[page, tokens, head], target, full)

    def prepare_values(self, r: Any, tile: Any, j: Any, slot: Any) -> None:
        """Zeroes the values behind the last key.

        Both warpgroups do it, each before its own matmuls read them; what the other writes
        meanwhile is the same.
        """

        @pl.when(j >= tile.full_stop)
        def last():
            self.clear(r.v_smem.at[slot], tile.kv_len - j * self.form.tiles.block_kv)

    def clear(self, values: Any, left: Any) -> None:
        """Zeroes the values from the ``left``-th on: their probability is 0, but 0 * NaN is NaN."""
        keys, columns = values.shape

        @pl.when(left < keys)
        def behind():
            for row in range(0, keys, ROWS):
                for column in range(0, columns, CLEARED_COLUMNS):
                    part = values.at[pl.ds(row, ROWS), pl.ds(column, CLEARED_COLUMNS)]
                    x = read(part, LAYOUT).astype(F32)
                    x = hide_outside(x, Band(), 0, rows_left=left - row, fill=0.0)
                    part[...] = x.astype(self.form.problem.dtype)
            plgpu.commit_smem()


@dataclass(frozen=True)
class EightBitPagedLoader(PagedLoader):
    """Pages of 8 bits, converted to the dtype of the matmuls in shared memory.

    The keys and the values of one block are in staging memory at a time. As soon as the warpgroup
    has converted either, it copies the same of the next block, which may be the next tile's.
    """

    cache_dtype: str

    @property
    def arrivals(self) -> int:
        """Arrivals that fill a buffer of keys or values: of the warpgroup that has converted it."""
        return 1

    def scratch(self) -> dict[str, Any]:
        t, dim = self.form.tiles, self.form.problem.dim
        count = len(STAGED)
        return {
            "staged": plgpu.SMEM((count, t.block_kv, dim), jnp.dtype(self.cache_dtype)),
            "staged_full": plgpu.Barrier(num_arrivals=self.copies, num_barriers=count),
        }

    def produce(self, kernel: Any, r: Any) -> None:
        """Copies queries; copies and converts keys and values, in the order of their use."""
        scheduler = kernel.scheduler

        def per_tile(carry: Any) -> Any:
            i, n, number = carry
            tile = scheduler.tile(r, number)
            # behind the last values of the tile before, whose queries are then free or soon will be
            kernel.load_queries(r, tile, scheduler.first_row(tile), i)
            following = scheduler.number(r, i + 1)
            blocks = tile.stop - tile.start

            def per_block(x: Any, n: Any) -> Any:
                is_last = x + 1 == blocks
                next_line = jnp.where(is_last, following, number)
                for tensor in STAGED:
                    self.convert(kernel, r, tensor, n)
                    stage_next = partial(self.stage, r, tensor, replace(tile, line=next_line))
                    step = jnp.where(is_last, 0, x + 1)
                    pl.when(next_line >= 0)(partial(stage_next, step))
                return n + 1

            return i + 1, lax.fori_loop(0, blocks, per_block, n), following

        zero = jnp.int32(0)
        first = scheduler.number(r, zero)

        @pl.when(first >= 0)
        def stage_first() -> None:
            for tensor in STAGED:
                self.stage(r, tensor, scheduler.tile(r, first), zero)

        lax.while_loop(lambda carry: carry[2] >= 0, per_tile, (zero, zero, first))

    def stage(self, r: Any, tensor: str, tile: Any, x: Any) -> None:
        """Starts to copy the bytes of a tile's x-th block; a warp for keys, another for values."""
        index = STAGED.index(tensor)

        def copy() -> None:
            source = self.source(r, tile, tile.stop - 1 - x)
            self.copy(r, tensor, tile, source, r.staged.at[index], r.staged_full.at[index])

        in_one_warp(index, copy)

    def convert(self, kernel: Any, r: Any, tensor: str, n: Any) -> None:
        """Converts the staged block of "k" or "v", this program's n-th, to a free buffer."""
        stages, index = self.form.tiles.stages, STAGED.index(tensor)
        smem, full, empty = (getattr(r, f"{tensor}_{x}") for x in ("smem", "full", "empty"))
        slot = lax.rem(n, stages)
        pl.when(n >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
        plgpu.barrier_wait(r.staged_full.at[index])
        convert_rows(r.staged.at[index], smem.at[slot], self.cache_dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(full.at[slot])

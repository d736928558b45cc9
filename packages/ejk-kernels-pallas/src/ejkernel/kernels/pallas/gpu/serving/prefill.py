"""Long prefill on Hopper: the forward kernel of flash attention on packed rows and page tables.

For the mainloop, its bound and its sources see ``flash_attention/forward.py``. A tile is
``block_q`` packed rows of one sequence and one query head. A block of keys is gathered by TMA: a
box for every page of the block, or one box where a page holds the block. Tiles begin at multiples
of 8 rows, the unit of the copies of q and o; rows of a tile that belong to other sequences are
computed but not stored.

Which tiles there are, and in which order, is a table of the schedule (``WorkTile``). A program that
is done takes the next tile from a counter, so that all programs end together however long their
tiles take. The warpgroup that copies takes tiles and tells the others. Some programs decode before
they take tiles (``decode``). Values behind the last key are zeroed before they are used, because 0
* NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.compat import untracked
from ejkernel.kernels.pallas.gpu.common.masks import hide_outside
from ejkernel.kernels.pallas.gpu.common.registers import LAYOUT, read
from ejkernel.kernels.pallas.gpu.common.rows import store_row_range
from ejkernel.kernels.pallas.gpu.common.warps import in_warps
from ejkernel.kernels.pallas.gpu.common.work_counter import (
    fetch_index_in_warpgroup,
    load_word,
    prefetch_index,
)
from ejkernel.kernels.pallas.gpu.flash_attention.epilogue import Epilogue
from ejkernel.kernels.pallas.gpu.flash_attention.forward import ForwardKernel
from ejkernel.kernels.pallas.gpu.flash_attention.forward_form import Form
from ejkernel.kernels.pallas.gpu.flash_attention.forward_softmax import F32, ROWS
from ejkernel.kernels.pallas.gpu.serving.decode import RowDecoder, decode_programs
from ejkernel.kernels.pallas.gpu.serving.tiles import can_decode, forward_tiles
from ejkernel.types.attention.problem import Problem
from ejkernel.types.masks.structure import Band, Rules
from ejkernel.types.serving.problem import RaggedProblem
from ejkernel.types.serving.schedule import ROW_ALIGNMENT, WorkTile, columns_of

COLUMNS = columns_of(WorkTile)
CLEARED_COLUMNS = 64  # columns of values that are zeroed together
TAKEN = 8  # tiles that are remembered: nobody falls half as many behind those who copy


def tile_of(number: Any, line: Callable[[Any, int], Any], last: int, heads: int) -> tuple[Any, ...]:
    """Returns (query head, sequence, row, first_row, end_row, kv_len) of an index of the queue.

    The index counts query heads of tiles. ``line(m, column)`` is an entry of the table of work
    tiles, ``last`` its last line. The head is -1 past the last tile.
    """
    m = jnp.minimum(lax.div(number, heads), last)
    columns = (COLUMNS.tiles_before, COLUMNS.tiles, COLUMNS.heads)
    before, tiles, together = (line(m, column) for column in columns)
    inside = number - before * heads
    group_size = jnp.maximum(tiles * together, 1)
    group = lax.div(inside, group_size)
    inside = inside - group * group_size
    m = jnp.minimum(before + lax.div(inside, together), last)
    head = jnp.where(tiles > 0, group * together + lax.rem(inside, together), -1)
    columns = (
        COLUMNS.sequence, COLUMNS.row, COLUMNS.first_row, COLUMNS.end_row, COLUMNS.kv_len
    )  # fmt: skip
    return (head, *(line(m, column) for column in columns))


class TakenTiles:
    """The tiles that were taken, in shared memory; a line is a result of ``tile_of``."""

    def __init__(self, words: Any) -> None:
        self.words = words

    def __getitem__(self, at: tuple[Any, int]) -> jax.Array:
        return load_word(self.words, *at)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("line", "full_stop"),
    meta_fields=("taken", "block_q", "block_kv"),
)
@dataclass(frozen=True)
class PageTile:
    """Rows of one sequence and head, and the key blocks they visit.

    Its properties lie in ``line`` of ``taken``, and are read where they are used: registers are
    few.
    """

    line: jax.Array
    full_stop: jax.Array
    taken: TakenTiles
    block_q: int
    block_kv: int

    batch: ClassVar[int] = 0
    start: ClassVar[int] = 0

    head = property(lambda self: self.taken[self.line, 0])
    sequence = property(lambda self: self.taken[self.line, 1])
    row = property(lambda self: self.taken[self.line, 2])
    first_row = property(lambda self: self.taken[self.line, 3])
    end_row = property(lambda self: self.taken[self.line, 4])
    kv_len = property(lambda self: self.taken[self.line, 5])

    @property
    def position(self) -> Any:
        """Position of the tile's first row."""
        return self.kv_len - self.end_row + self.row

    def full_blocks(self) -> Any:
        """Returns the block from which on some row does not see every key: ``full_stop``."""
        first = self.position + jnp.maximum(self.first_row - self.row, 0)
        return lax.div(jnp.maximum(first + 1, 0), self.block_kv)

    @property
    def stop(self) -> Any:
        end = self.position + jnp.minimum(self.end_row - self.row, self.block_q)
        return jnp.maximum(lax.div(jnp.maximum(end, 0) + self.block_kv - 1, self.block_kv), 1)


@dataclass(frozen=True)
class QueueScheduler:
    """Tiles from a queue: programs take one (tile, query head) after the other.

    Attributes:
        form: the compiled form of the kernel.
        grid: programs.
        decodes: whether some programs decode first.
    """

    form: Form
    grid: int
    decodes: bool

    prefetches_late: ClassVar[bool] = True

    def setup(self, r: Any) -> None:
        r.counter = pl.get_global(plgpu.SemaphoreType.REGULAR)
        r.taken_tiles = TakenTiles(r.queue)
        r.program = lax.axis_index("program")  # single warps cannot ask for it

    def begin_producer(self, r: Any) -> None:
        r.takes_tiles = True

    def run_consumer(self, r: Any, mainloop: Callable[[], None]) -> None:
        """Runs the mainloop of a consumer where its program has a tile."""
        r.takes_tiles = False
        r.first_number = self.number(r, jnp.int32(0))
        pl.when(r.first_number >= 0)(mainloop)

    def first_tile(self, r: Any) -> jax.Array:
        return r.first_number

    def number(self, r: Any, i: Any) -> jax.Array:
        """Returns the line of this program's i-th tile in ``r.queue``; called once, and in
        order."""
        line = lax.rem(i, TAKEN)
        if r.takes_tiles:
            self._take(r, i, line)
        else:
            plgpu.barrier_wait(r.taken.at[line])
        return jnp.where(r.queue[line, 0] >= 0, line, -1)

    def _take(self, r: Any, i: Any, line: Any) -> None:
        """Takes the next tile from the queue, and tells which it is.

        The counter was asked a tile ago. The first tile of a program that does not decode is known.
        """
        heads, last = self.form.problem.heads, r.work_tiles.shape[0] - 1
        decoding = decode_programs(r) if self.decodes else 0
        prefill_index = r.program - decoding
        is_first = i == 0
        number = fetch_index_in_warpgroup(r.counter, r.queue, line, is_first & (prefill_index < 0))
        is_own = is_first & (prefill_index >= 0)
        number = jnp.where(is_own, prefill_index, self.grid - decoding + number)
        values = tile_of(number, lambda m, c: r.work_tiles[m, c], last, heads)
        for column, value in enumerate(values):
            r.queue[line, column] = value
        prefetch_index(r.counter, r.queue, lax.rem(i + 1, TAKEN))
        plgpu.barrier_arrive(r.taken.at[line])

    def tile(self, r: Any, number: Any) -> PageTile:
        t = self.form.tiles
        tile = PageTile(number, number, r.taken_tiles, t.block_q, t.block_kv)
        return replace(tile, full_stop=tile.full_blocks())

    def first_row(self, tile: Any) -> Any:
        return pl.multiple_of(tile.row, ROW_ALIGNMENT)

    def position(self, tile: Any) -> Any:
        return tile.position

    def ahead(self, r: Any, i: Any, following: Any = None) -> tuple:
        return self.number(r, i), None, None

    def arrived(self, r: Any, ahead: tuple) -> PageTile:
        return self.tile(r, ahead[0])

    def scratch(self) -> dict[str, Any]:
        return {
            "queue": plgpu.SMEM((TAKEN, 8), jnp.int32),
            "taken": plgpu.Barrier(num_barriers=TAKEN),
        }


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

    def prepare_values(self, r: Any, tile: PageTile, j: Any, slot: Any) -> None:
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
class PackedEpilogue(Epilogue):
    """Stores the rows of a tile that belong to its sequence; no log-sum-exp."""

    keeps_lse: ClassVar[bool] = False

    def store(self, r: Any, tile: PageTile, part: jax.Array, column: int) -> None:
        first = self.scheduler.first_row(tile) + lax.axis_index("wg") * ROWS
        is_full = (tile.first_row <= first) & (tile.end_row >= first + ROWS)
        pl.when(is_full)(lambda: super(PackedEpilogue, self).store(r, tile, part, column))

        @pl.when(jnp.logical_not(is_full))
        def store_range():
            store_row_range(
                r.o, part, (tile.batch, first, tile.head, column),
                tile.first_row - first, tile.end_row - first,
            )  # fmt: skip


def prefill_kernel(problem: RaggedProblem, cores: int) -> ForwardKernel:
    """Returns the kernel of the sequences of long prefill, and of the decode rows given to it."""
    p, t = problem.paged, forward_tiles(problem.paged)
    capacity = -(-p.capacity // t.block_kv) * t.block_kv  # full blocks
    # all packed rows are one batch row, over as many keys as a sequence can have
    attention = Problem(
        1, problem.rows, capacity, p.heads, p.kv_heads, p.dim, p.dim, p.query_dtype, p.scale,
        p.soft_cap, rules=Rules(band=Band(hi=0)),
    )  # fmt: skip
    form = Form(attention, t, ())
    scheduler = QueueScheduler(form, cores, can_decode(p))
    return ForwardKernel(
        form,
        scheduler,
        PagedLoader(form, p.page_size),
        PackedEpilogue(form, scheduler),
        "ragged_page_attention_prefill",
        RowDecoder() if scheduler.decodes else None,
    )


def prefill(
    kernel: ForwardKernel, q: jax.Array, cache: jax.Array, tables: jax.Array,
    work_tiles: jax.Array, decode_rows: jax.Array,
) -> jax.Array:  # fmt: skip
    """Returns o [rows, h, d] of q [rows, h, d]; rows of no tile are unset.

    cache ``[pages, page_size, 2 * kv_heads, d]``, tables ``[n, columns]``; the others are tables of
    ``RaggedSchedule``.
    """
    inputs = ("q", "cache", "tables", "work_tiles", "decode_rows")
    outputs = {"o": jax.ShapeDtypeStruct((1, *q.shape), q.dtype)}
    run = untracked(kernel.launch(inputs, outputs), tuple(outputs.values()))
    (o,) = run(q[None], cache, tables, work_tiles, decode_rows)
    return o[0]

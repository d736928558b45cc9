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
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.compat import untracked
from ejkernel.kernels.pallas.gpu.common.rows import store_row_range
from ejkernel.kernels.pallas.gpu.common.work_counter import (
    fetch_index_in_warpgroup,
    load_word,
    prefetch_index,
)
from ejkernel.kernels.pallas.gpu.flash_attention.epilogue import Epilogue
from ejkernel.kernels.pallas.gpu.flash_attention.forward import ForwardKernel
from ejkernel.kernels.pallas.gpu.flash_attention.forward_form import Form
from ejkernel.kernels.pallas.gpu.flash_attention.forward_softmax import F32, ROWS, factors
from ejkernel.kernels.pallas.gpu.flash_attention.tile_scheduler import NextTile
from ejkernel.kernels.pallas.gpu.serving.decode import RowDecoder, decode_programs
from ejkernel.kernels.pallas.gpu.serving.prefill_loader import EightBitPagedLoader, PagedLoader
from ejkernel.kernels.pallas.gpu.serving.tiles import can_decode, forward_tiles
from ejkernel.types.attention.problem import Problem
from ejkernel.types.masks.structure import Band, Rules
from ejkernel.types.serving.problem import RaggedProblem
from ejkernel.types.serving.schedule import ROW_ALIGNMENT, WorkTile, columns_of

COLUMNS = columns_of(WorkTile)
TAKEN_SLOTS = 8  # of ``scheduled_tiles``: no consumer falls half as many behind the producer


class TakenTile(NamedTuple):
    """Columns of ``scheduled_tiles``: a tile of the queue, for one query head.

    Attributes:
        head: the query head; -1 past the last tile.
        sequence, row, first_row, end_row, kv_len: as of ``WorkTile``.
    """

    head: Any
    sequence: Any
    row: Any
    first_row: Any
    end_row: Any
    kv_len: Any


TAKEN_COLUMNS = columns_of(TakenTile)


def tile_of(
    index: Any, read_entry: Callable[[Any, int], Any], last_line: int, heads: int
) -> TakenTile:
    """Returns the tile at an index of the queue, which counts query heads of work tiles.

    A sequence has groups of ``WorkTile.heads`` heads, whose keys L2 holds, one after the other.
    Within a group the order is by tile, then by head.

    Args:
        index: of the queue.
        read_entry: returns the entry at (line, column) of the table of work tiles.
        last_line: last line of that table.
        heads: query heads.
    """
    # any line of the sequence will do: the three columns are the same in all of them
    line = jnp.minimum(lax.div(index, heads), last_line)
    columns = (COLUMNS.tiles_before, COLUMNS.tiles, COLUMNS.heads)
    tiles_before, tiles, group_heads = (read_entry(line, column) for column in columns)
    in_sequence = index - tiles_before * heads
    group_size = jnp.maximum(tiles * group_heads, 1)
    group = lax.div(in_sequence, group_size)
    in_group = in_sequence - group * group_size
    line = jnp.minimum(tiles_before + lax.div(in_group, group_heads), last_line)
    head = jnp.where(tiles > 0, group * group_heads + lax.rem(in_group, group_heads), -1)
    columns = (
        COLUMNS.sequence, COLUMNS.row, COLUMNS.first_row, COLUMNS.end_row, COLUMNS.kv_len
    )  # fmt: skip
    return TakenTile(head, *(read_entry(line, column) for column in columns))


class TakenTileReader:
    """Reads ``scheduled_tiles``, int32 ``[TAKEN_SLOTS, 8]`` in shared memory.

    A program has one: ``PageTile`` holds it as static data, and branches and loops that carry tiles
    compare static data by identity.
    """

    def __init__(self, words: Any) -> None:
        self.words = words

    def read(self, slot: Any, column: int) -> jax.Array:
        return load_word(self.words, slot, column)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("slot", "full_stop"),
    meta_fields=("reader", "block_q", "block_kv"),
)
@dataclass(frozen=True)
class PageTile:
    """Rows of one sequence and head, and the key blocks they visit: what ``schedule.Tile`` is to
    contiguous keys.

    The columns of ``TakenTile`` are read from shared memory where they are used: registers are few.

    Attributes:
        slot: slot of ``scheduled_tiles``.
        full_stop: first block of which some row does not see every key (``find_full_stop``).
        reader: reads ``scheduled_tiles``.
        block_q, block_kv: of ``ForwardTiles``.
        batch, start: 0: all packed rows are one batch row, and no window hides the first keys.
    """

    slot: jax.Array
    full_stop: jax.Array
    reader: TakenTileReader
    block_q: int
    block_kv: int

    batch: ClassVar[int] = 0
    start: ClassVar[int] = 0

    head = property(lambda self: self.reader.read(self.slot, TAKEN_COLUMNS.head))
    sequence = property(lambda self: self.reader.read(self.slot, TAKEN_COLUMNS.sequence))
    row = property(lambda self: self.reader.read(self.slot, TAKEN_COLUMNS.row))
    first_row = property(lambda self: self.reader.read(self.slot, TAKEN_COLUMNS.first_row))
    end_row = property(lambda self: self.reader.read(self.slot, TAKEN_COLUMNS.end_row))
    kv_len = property(lambda self: self.reader.read(self.slot, TAKEN_COLUMNS.kv_len))

    @property
    def position(self) -> Any:
        """Position of the tile's first row in its sequence's context."""
        return self.kv_len - self.end_row + self.row

    def find_full_stop(self) -> Any:
        """Computes ``full_stop``, which every step of the mainloop compares: it stays in a
        register."""
        first = self.position + jnp.maximum(self.first_row - self.row, 0)
        return lax.div(jnp.maximum(first + 1, 0), self.block_kv)

    @property
    def stop(self) -> Any:
        """The block after the last that a row sees; at least 1, as the mainloop visits one."""
        end = self.position + jnp.minimum(self.end_row - self.row, self.block_q)
        return jnp.maximum(lax.div(jnp.maximum(end, 0) + self.block_kv - 1, self.block_kv), 1)


@dataclass(frozen=True)
class QueueScheduler:
    """Tiles from a queue: programs take one (tile, query head) after the other.

    The producer takes tiles (``take_tile``) and writes them to ``scheduled_tiles``; consumers wait
    for them (``number``). Both get the slot of the tile, which is its number for ``tile``.

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
        """Adds to ``r``: counter, program (single warps cannot ask for it) and tile_reader."""
        r.counter = pl.get_global(plgpu.SemaphoreType.REGULAR)
        r.tile_reader = TakenTileReader(r.scheduled_tiles)
        r.program = lax.axis_index("program")

    def run_consumer(self, r: Any, mainloop: Callable[[], None]) -> None:
        """Runs the mainloop of a consumer where its program has a tile."""
        r.first_number = self.number(r, jnp.int32(0))  # a barrier is waited for only once
        pl.when(r.first_number >= 0)(mainloop)

    def first_tile(self, r: Any) -> jax.Array:
        return r.first_number

    def number(self, r: Any, i: Any) -> jax.Array:
        """Waits for this program's i-th tile and returns its slot, -1 after the last.

        For consumers, once for each tile and in order.
        """
        slot = lax.rem(i, TAKEN_SLOTS)
        plgpu.barrier_wait(r.tile_full.at[slot])
        return self._slot_if_any(r, slot)

    def take_tile(self, r: Any, i: Any) -> jax.Array:
        """Takes this program's i-th tile for all warpgroups; returns its slot, -1 after the last.

        For the producer, once for each tile and in order.
        """
        slot = lax.rem(i, TAKEN_SLOTS)
        heads, last_line = self.form.problem.heads, r.work_tiles.shape[0] - 1
        decoding = decode_programs(r) if self.decodes else 0
        prefill_index = r.program - decoding
        is_first = i == 0
        # prefetched while the tile before was copied, except before the first
        fetches = is_first & (prefill_index < 0)
        index = fetch_index_in_warpgroup(r.counter, r.scheduled_tiles, slot, fetches)
        # a program that does not decode begins with the tile of its own index, without the counter
        is_own = is_first & (prefill_index >= 0)
        index = jnp.where(is_own, prefill_index, self.grid - decoding + index)
        tile = tile_of(index, lambda line, column: r.work_tiles[line, column], last_line, heads)
        for column, value in enumerate(tile):
            r.scheduled_tiles[slot, column] = value
        prefetch_index(r.counter, r.scheduled_tiles, lax.rem(i + 1, TAKEN_SLOTS))
        plgpu.barrier_arrive(r.tile_full.at[slot])
        return self._slot_if_any(r, slot)

    def _slot_if_any(self, r: Any, slot: Any) -> jax.Array:
        return jnp.where(r.scheduled_tiles[slot, TAKEN_COLUMNS.head] >= 0, slot, -1)

    def tile(self, r: Any, number: Any) -> PageTile:
        t = self.form.tiles
        # ``full_stop`` is a function of the other fields
        tile = PageTile(number, number, r.tile_reader, t.block_q, t.block_kv)
        return replace(tile, full_stop=tile.find_full_stop())

    def first_row(self, tile: Any) -> Any:
        return pl.multiple_of(tile.row, ROW_ALIGNMENT)

    def position(self, tile: Any) -> Any:
        return tile.position

    def read_ahead(self, r: Any, i: Any, following: Any = None) -> NextTile:
        return NextTile(self.number(r, i))

    def tile_of(self, r: Any, ahead: NextTile) -> PageTile:
        return self.tile(r, ahead.number)

    def scratch(self) -> dict[str, Any]:
        return {
            # the columns of ``TakenTile``, one unused, the index that the counter returned
            "scheduled_tiles": plgpu.SMEM((TAKEN_SLOTS, 8), jnp.int32),
            "tile_full": plgpu.Barrier(num_barriers=TAKEN_SLOTS),
        }


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


def prefill_kernel(problem: RaggedProblem, cores: int, *, scaled: bool = False) -> ForwardKernel:
    """Returns the kernel of the sequences of long prefill, and of the decode rows given to it.

    ``scaled``: whether the cache has scales.
    """
    p, t = problem.paged, forward_tiles(problem.paged)
    capacity = -(-p.capacity // t.block_kv) * t.block_kv  # full blocks
    # all packed rows are one batch row, over as many keys as a sequence can have
    attention = Problem(
        1, problem.rows, capacity, p.heads, p.kv_heads, p.dim, p.dim, p.query_dtype, p.scale,
        p.soft_cap, rules=Rules(band=Band(hi=0)),
    )  # fmt: skip
    form = Form(attention, t, ("factors",) if scaled else ())
    scheduler = QueueScheduler(form, cores, can_decode(p))
    loader = PagedLoader(form, p.page_size)
    if p.is_eight_bit:
        loader = EightBitPagedLoader(form, p.page_size, p.key_dtype)
    return ForwardKernel(
        form,
        scheduler,
        loader,
        PackedEpilogue(form, scheduler),
        "ragged_page_attention_prefill",
        RowDecoder() if scheduler.decodes else None,
    )


def scale_factors(
    form: Form, k_scale: jax.Array | None, v_scale: jax.Array | None
) -> jax.Array | None:
    """Returns the factors of every query head for scales ``[1, 1 or kv_heads]``; None without."""
    if k_scale is None and v_scale is None:
        return None
    p = form.problem

    def of_heads(scale: jax.Array | None) -> jax.Array:
        scale = jnp.ones((1, 1)) if scale is None else scale
        of_key_heads = jnp.broadcast_to(scale.astype(F32), (1, p.heads // p.group))
        return jnp.repeat(of_key_heads, p.group, axis=1)

    return factors(form, p.scale * of_heads(k_scale), of_heads(v_scale))


def prefill(
    kernel: ForwardKernel, q: jax.Array, cache: jax.Array, tables: jax.Array,
    work_tiles: jax.Array, decode_rows: jax.Array, factors: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Returns o [rows, h, d] of q [rows, h, d]; rows of no tile are unset.

    cache ``[pages, page_size, 2 * kv_heads, d]``, tables ``[n, columns]``; work_tiles and
    decode_rows are tables of ``RaggedSchedule``; factors as ``scale_factors`` returns them, for a
    ``scaled`` kernel.
    """
    inputs = {
        "q": q[None],
        "cache": cache,
        "tables": tables,
        "work_tiles": work_tiles,
        "decode_rows": decode_rows,
    }
    if factors is not None:
        inputs["factors"] = factors
    outputs = {"o": jax.ShapeDtypeStruct((1, *q.shape), q.dtype)}
    run = untracked(kernel.launch(tuple(inputs), outputs), tuple(outputs.values()))
    (o,) = run(*inputs.values())
    return o[0]

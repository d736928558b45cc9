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
from ejkernel.kernels.pallas.gpu.serving.decode import RowDecoder, decode_programs
from ejkernel.kernels.pallas.gpu.serving.prefill_loader import EightBitPagedLoader, PagedLoader
from ejkernel.kernels.pallas.gpu.serving.tiles import can_decode, forward_tiles
from ejkernel.types.attention.problem import Problem
from ejkernel.types.masks.structure import Band, Rules
from ejkernel.types.serving.problem import RaggedProblem
from ejkernel.types.serving.schedule import ROW_ALIGNMENT, WorkTile, columns_of

COLUMNS = columns_of(WorkTile)
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

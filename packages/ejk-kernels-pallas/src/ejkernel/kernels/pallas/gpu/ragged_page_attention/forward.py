"""Flash attention's forward kernel on pages: packed rows of sequences with many new tokens.

The core, its bound and its sources are those of ``flash_attention/forward.py``. Here a tile is
``block_q`` packed rows of one sequence and one query head, and a block of keys is gathered by TMA:
a box for every page of the block, or one where a page holds it. Tiles begin at multiples of 8 rows,
which is what copies of q and o move together; rows of a tile that belong to other sequences are
computed but not stored. The schedule says which tiles there are and in which order (``WorkTile``);
a program that is done takes the next, so that all end together however long they take. The
warpgroup that copies takes it, and tells the others. Before, some programs decode (``decode``).
Values behind the last key are set to 0 before they are used, whatever the memory held.
"""

from __future__ import annotations

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
from ejkernel.kernels.pallas.gpu.common.tickets import ask_ahead, taken_by_warpgroup, word
from ejkernel.kernels.pallas.gpu.common.warps import in_warps
from ejkernel.kernels.pallas.gpu.flash_attention.forward import Forward
from ejkernel.kernels.pallas.gpu.flash_attention.forward_softmax import F32, ROWS
from ejkernel.kernels.pallas.gpu.ragged_page_attention import decode
from ejkernel.kernels.pallas.gpu.ragged_page_attention.walks import tile_of
from ejkernel.types.masks.structure import Band

COLUMNS = 64  # of values that are looked at together
TAKEN = 8  # tiles that are remembered: nobody falls half as many behind those who copy


class Said:
    """Numbers of the tiles that were taken, in shared memory, a line for each.

    Head, sequence, row, first, last and length: the first row of the tile; those from ``first`` on
    and before ``last`` are the sequence's, which has ``length`` keys.
    """

    def __init__(self, words: Any) -> None:
        self.words = words

    def __getitem__(self, at: tuple[Any, int]) -> jax.Array:
        return word(self.words, *at)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("line", "full_stop"),
    meta_fields=("said", "block_q", "block_kv"),
)
@dataclass(frozen=True)
class PageTile:
    """Rows of one sequence and head, and the key blocks they visit, as those of ``Tile``.

    What it is stands in ``line`` of ``said``, and is read where it is used: registers are few.
    """

    line: jax.Array
    full_stop: jax.Array
    said: Said
    block_q: int
    block_kv: int

    batch: ClassVar[int] = 0
    start: ClassVar[int] = 0

    head = property(lambda self: self.said[self.line, 0])
    sequence = property(lambda self: self.said[self.line, 1])
    row = property(lambda self: self.said[self.line, 2])
    first = property(lambda self: self.said[self.line, 3])
    last = property(lambda self: self.said[self.line, 4])
    length = property(lambda self: self.said[self.line, 5])

    @property
    def position(self) -> Any:
        """Of the tile's first row."""
        return self.length - self.last + self.row

    def all_see(self) -> Any:
        """The block from which on some row does not see every key: ``full_stop``."""
        first = self.position + jnp.maximum(self.first - self.row, 0)
        return lax.div(jnp.maximum(first + 1, 0), self.block_kv)

    @property
    def stop(self) -> Any:
        end = self.position + jnp.minimum(self.last - self.row, self.block_q)
        return jnp.maximum(lax.div(jnp.maximum(end, 0) + self.block_kv - 1, self.block_kv), 1)


@dataclass(frozen=True)
class PagedForward(Forward):
    """The kernel of one form; ``attend`` is it.

    Of ``problem`` the queries are one batch row of all packed rows, the keys as many as a sequence
    can have.

    Attributes:
        page: tokens of a page; it divides ``block_kv`` or is a multiple of it.
        decodes: whether there may be sequences of one row that are decoded here.
    """

    page: int = 0
    decodes: bool = False

    kernel_name: ClassVar[str] = "ragged_page_attention_prefill"
    keeps_lse: ClassVar[bool] = False
    late: ClassVar[bool] = True

    @property
    def copies(self) -> int:
        return max(1, self.tiles.block_kv // self.page)

    @property
    def grid(self) -> int:
        return self.programs

    # ---- tiles ------------------------------------------------------------------------------

    def opened(self, r: Any) -> None:
        r.counter = pl.get_global(plgpu.SemaphoreType.REGULAR)
        r.said = Said(r.queue)
        r.program = lax.axis_index("program")  # single warps cannot ask for it

    def produce(self, r: Any) -> None:
        """One warp copies queries and keys, another values.

        Each reads tables and waits for its own: what all of a warpgroup do, or one after the other,
        takes the time of the programs that compute, the more the smaller pages are.
        """
        r.takes = True
        if self.decodes:
            decode.copy(self, r)

        def per_tile(carry: Any) -> Any:
            i, n, number = carry
            tile = self.tile(r, number)
            first, last, blocks = self.first_row(tile), tile.stop - 1, tile.stop - tile.start

            def begin() -> None:
                self.load_queries(r, tile, first, i)
                self.load(r, "k", tile, last, n)

            def rest(which: str, done: int) -> None:
                def one(x: Any, nothing: Any) -> Any:
                    self.load(r, which, tile, last - x, n + x)
                    return nothing

                lax.fori_loop(done, blocks, one, 0)

            in_warps(begin)
            following = self.number(r, i + 1)  # asking takes a while: after the first copies
            in_warps(partial(rest, "k", 1), partial(rest, "v", 0))
            return i + 1, n + blocks, following

        zero = jnp.int32(0)
        start = zero, zero, self.number(r, zero)
        lax.while_loop(lambda carry: carry[2] >= 0, per_tile, start)

    def consume(self, r: Any) -> None:
        r.takes = False
        if self.decodes:
            decode.attend(self, r)
        r.begun = self.number(r, jnp.int32(0))
        pl.when(r.begun >= 0)(lambda: super(PagedForward, self).consume(r))

    def first(self, r: Any) -> jax.Array:
        return r.begun

    def number(self, r: Any, i: Any) -> jax.Array:
        """Where ``r.queue`` has this program's i-th tile; asked for once, and in order."""
        place = lax.rem(i, TAKEN)
        if r.takes:
            self.take(r, i, place)
        else:
            plgpu.barrier_wait(r.taken.at[place])
        return jnp.where(r.queue[place, 0] >= 0, place, -1)

    def take(self, r: Any, i: Any, place: Any) -> None:
        """Takes the next tile from the queue, and says which it is.

        It was asked for a tile ago. The first of a program that does not decode is known.
        """
        heads, last = self.problem.heads, r.lines.shape[0] - 1
        decoding = decode.programs(r) if self.decodes else 0
        own = r.program - decoding
        first = i == 0
        number = taken_by_warpgroup(r.counter, r.queue, place, first & (own < 0))
        number = jnp.where(first & (own >= 0), own, self.grid - decoding + number)
        said = tile_of(number, lambda m, c: r.lines[m, c], last, heads)
        for column, value in enumerate(said):
            r.queue[place, column] = value
        ask_ahead(r.counter, r.queue, lax.rem(i + 1, TAKEN))
        plgpu.barrier_arrive(r.taken.at[place])

    def tile(self, r: Any, number: Any) -> PageTile:
        tile = PageTile(number, number, r.said, self.tiles.block_q, self.tiles.block_kv)
        return replace(tile, full_stop=tile.all_see())

    def first_row(self, tile: PageTile) -> Any:
        return pl.multiple_of(tile.row, 8)

    def position(self, tile: PageTile) -> Any:
        return tile.position

    # ---- keys and values --------------------------------------------------------------------

    def place(self, r: Any, tile: Any, j: Any, keys: int = 0) -> list[tuple[Any, Any]]:
        """Page and tokens of it of every copy of the j-th block, or the j-th ``keys`` keys."""
        pages, columns = r.cache.shape[0], r.tables.shape[1]

        def page(column):
            n = word(r.tables, tile.sequence, lax.min(column, columns - 1))
            return lax.min(lax.max(n, 0), pages - 1)

        block = keys or self.tiles.block_kv
        if self.page > block:
            blocks = self.page // block
            return [(page(lax.div(j, blocks)), pl.ds(lax.rem(j, blocks) * block, block))]
        copies = block // self.page
        return [(page(j * copies + i), pl.ds(0, self.page)) for i in range(copies)]

    def copy(self, r: Any, which: str, tile: Any, place: Any, smem: Any, ready: Any) -> None:
        head = 2 * lax.div(tile.head, self.problem.group) + (which == "v")
        for i, (page, tokens) in enumerate(place):
            source = r.cache.at[page, tokens, head]
            to = smem.at[pl.ds(i * tokens.size, tokens.size)]
            plgpu.copy_gmem_to_smem(source, to, ready)

    def arrived_values(self, r: Any, tile: PageTile, j: Any, slot: Any) -> None:
        """Values behind the last key to 0.

        Both warpgroups do it, each before its own products read them; what the other writes
        meanwhile is the same.
        """

        @pl.when(j >= tile.full_stop)
        def last():
            self.clear(r.v_smem.at[slot], tile.length - j * self.tiles.block_kv)

    def clear(self, values: Any, left: Any) -> None:
        """Values from the ``left``-th on to 0: they are multiplied by 0, which not all memory
        bears."""
        keys, columns = values.shape

        @pl.when(left < keys)
        def behind():
            for row in range(0, keys, ROWS):
                for column in range(0, columns, COLUMNS):
                    part = values.at[pl.ds(row, ROWS), pl.ds(column, COLUMNS)]
                    x = read(part, LAYOUT).astype(F32)
                    x = hide_outside(x, Band(), 0, rows_left=left - row, fill=0.0)
                    part[...] = x.astype(self.problem.dtype)
            plgpu.commit_smem()

    # ---- output -----------------------------------------------------------------------------

    def store(self, r: Any, tile: PageTile, part: jax.Array, column: int) -> None:
        first = self.first_row(tile) + lax.axis_index("wg") * ROWS
        whole = (tile.first <= first) & (tile.last >= first + ROWS)
        pl.when(whole)(lambda: super(PagedForward, self).store(r, tile, part, column))

        @pl.when(jnp.logical_not(whole))
        def some():
            store_row_range(
                r.o, part, (tile.batch, first, tile.head, column),
                tile.first - first, tile.last - first,
            )  # fmt: skip

    # ---- launch -----------------------------------------------------------------------------

    def _scratch(self) -> dict[str, Any]:
        own = {
            "queue": plgpu.SMEM((TAKEN, 8), jnp.int32),
            "taken": plgpu.Barrier(num_barriers=TAKEN),
        }
        return super()._scratch() | own | (decode.scratch(self) if self.decodes else {})

    def attend(
        self, q: jax.Array, cache: jax.Array, tables: jax.Array, lines: jax.Array,
        decoded: jax.Array,
    ) -> jax.Array:  # fmt: skip
        """o [rows, h, d] of q [rows, h, d]; rows of no tile are whatever the memory held.

        cache ``[pages, page, 2 * kv heads, d]``, tables ``[n, columns]``, lines and decoded are
        ``RaggedSchedule.work_tiles`` and ``decode_rows``.
        """
        inputs = ("q", "cache", "tables", "lines", "decoded")
        outputs = {"o": jax.ShapeDtypeStruct((1, *q.shape), q.dtype)}
        run = untracked(self.launch(inputs, outputs), tuple(outputs.values()))
        (o,) = run(q[None], cache, tables, lines, decoded)
        return o[0]

"""Flash attention's forward kernel on pages: packed rows of sequences with many new tokens.

The core, its bound and its sources are those of ``flash_attention/forward.py``. Here a tile is
``block_q`` packed rows of one sequence and one query head, and a block of keys is gathered by TMA:
a box for every page of the block, or one where a page holds it. Tiles begin at multiples of 8 rows,
which is what copies of q and o move together; rows of a tile that belong to other sequences are
computed but not stored. ``walks`` says which tiles there are, the longest first; programs take
them in turns, back and forth. A cluster takes two heads of one key head, and each of its programs
copies half of every page to both. Values behind the last key are set to 0 before they are used,
whatever the memory held.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.masks import LAYOUT, hide_outside, read
from ejkernel.kernels.pallas.gpu.common.rows import store_rows
from ejkernel.kernels.pallas.gpu.flash_attention.forward import Forward
from ejkernel.kernels.pallas.gpu.flash_attention.forward_form import MEMBER
from ejkernel.kernels.pallas.gpu.flash_attention.forward_softmax import F32, ROWS
from ejkernel.types.structure import Band

COLUMNS = 64  # of values that are looked at together


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("head", "sequence", "row", "first", "last", "length"),
    meta_fields=("block_q", "block_kv"),
)
@dataclass(frozen=True)
class PageTile:
    """Rows of one sequence and head, and the key blocks they visit, as those of ``Tile``.

    ``row`` is the first of the tile; those from ``first`` on and before ``last`` are the
    sequence's, which has ``length`` keys. What follows from these is computed where it is used:
    registers are few.
    """

    head: jax.Array
    sequence: jax.Array
    row: jax.Array
    first: jax.Array
    last: jax.Array
    length: jax.Array
    block_q: int
    block_kv: int

    batch: ClassVar[int] = 0
    start: ClassVar[int] = 0

    @property
    def position(self) -> Any:
        """Of the tile's first row."""
        return self.length - self.last + self.row

    @property
    def full_stop(self) -> Any:
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
    """

    page: int = 0

    kernel_name: ClassVar[str] = "ragged_page_attention_prefill"
    keeps_lse: ClassVar[bool] = False

    @property
    def copies(self) -> int:
        return max(1, self.tiles.block_kv // self.page)

    @property
    def grid(self) -> int:
        return self.programs // self.tiles.cluster

    @property
    def units(self) -> int:
        """Programs, or pairs of them, that a tile's rows take: one for each head or two."""
        return self.problem.heads // self.tiles.cluster

    # ---- tiles ------------------------------------------------------------------------------

    def number(self, r: Any, i: Any) -> jax.Array:
        program = lax.axis_index("program")
        program = jnp.where(lax.rem(i, 2) == 1, self.grid - 1 - program, program)
        number = i * self.grid + program
        tiles = r.until[r.until.shape[0] - 1]
        return jnp.where(number < tiles * self.units, number, -1)

    def has_tiles(self, r: Any) -> jax.Array | None:
        return self.number(r, jnp.int32(0)) >= 0

    def tile(self, r: Any, number: Any) -> PageTile:
        t = self.tiles
        n, head = lax.div(number, self.units), lax.rem(number, self.units)
        if t.cluster > 1:
            head = head * t.cluster + lax.axis_index(MEMBER)
        return PageTile(head, *(r.walks[n, c] for c in range(5)), t.block_q, t.block_kv)

    def first_row(self, tile: PageTile) -> Any:
        return pl.multiple_of(tile.row, 8)

    def position(self, tile: PageTile) -> Any:
        return tile.position

    # ---- keys and values --------------------------------------------------------------------

    def place(self, r: Any, tile: PageTile, j: Any) -> list[tuple[Any, Any]]:
        """Page and tokens of it of every copy."""
        pages, columns = r.cache.shape[0], r.tables.shape[1]

        def page(column):
            n = r.tables[tile.sequence, jnp.minimum(column, columns - 1)]
            return jnp.clip(n, 0, pages - 1)

        block = self.tiles.block_kv
        if self.page > block:
            blocks = self.page // block
            return [(page(lax.div(j, blocks)), pl.ds(lax.rem(j, blocks) * block, block))]
        return [(page(j * self.copies + i), pl.ds(0, self.page)) for i in range(self.copies)]

    def copy(self, r: Any, which: str, tile: PageTile, place: Any, smem: Any, ready: Any) -> None:
        head = 2 * lax.div(tile.head, self.problem.group) + (which == "v")
        axes = MEMBER if self.tiles.cluster > 1 else None
        for i, (page, tokens) in enumerate(place):
            rows = pl.ds(i * self.page, min(self.page, self.tiles.block_kv))
            source = r.cache.at[page, tokens, head]
            plgpu.copy_gmem_to_smem(source, smem.at[rows], ready, collective_axes=axes)

    def arrived_values(self, r: Any, tile: PageTile, j: Any, slot: Any) -> None:
        """Values behind the last key to 0: they are multiplied by 0, which not all memory bears.

        Both warpgroups do it, each before its own products read them; what the other writes
        meanwhile is the same.
        """
        t, p = self.tiles, self.problem
        left = tile.length - j * t.block_kv

        @pl.when(left < t.block_kv)
        def clear():
            for row in range(0, t.block_kv, ROWS):
                for column in range(0, p.value_dim, COLUMNS):
                    part = r.v_smem.at[slot, pl.ds(row, ROWS), pl.ds(column, COLUMNS)]
                    x = read(part, LAYOUT).astype(F32)
                    x = hide_outside(x, Band(), 0, rows_left=left - row, fill=0.0)
                    part[...] = x.astype(p.dtype)
            plgpu.commit_smem()

    # ---- output -----------------------------------------------------------------------------

    def store(self, r: Any, tile: PageTile, part: jax.Array, column: int) -> None:
        first = self.first_row(tile) + lax.axis_index("wg") * ROWS
        whole = (tile.first <= first) & (tile.last >= first + ROWS)
        pl.when(whole)(lambda: super(PagedForward, self).store(r, tile, part, column))

        @pl.when(jnp.logical_not(whole))
        def some():
            store_rows(
                r.o, part, (tile.batch, first, tile.head, column),
                tile.first - first, tile.last - first,
            )  # fmt: skip

    # ---- launch -----------------------------------------------------------------------------

    def attend(
        self, q: jax.Array, cache: jax.Array, tables: jax.Array, walks: jax.Array, until: jax.Array
    ) -> jax.Array:
        """o [rows, h, d] of q [rows, h, d]; rows of no tile are whatever the memory held.

        cache ``[pages, page, 2 * kv heads, d]``, tables ``[n, columns]``, walks ``[tiles, 5]``,
        until ``[n]``, as ``walks`` has them.
        """
        inputs = ("q", "cache", "tables", "walks", "until")
        outputs = {"o": jax.ShapeDtypeStruct((1, *q.shape), q.dtype)}
        (o,) = self.launch(inputs, outputs)(q[None], cache, tables, walks, until)
        return o[0]

"""Static tile schedule of the forward kernel: which program computes which tiles, in which order.

A scheduler tells the mainloop which tile a program computes as its i-th, which rows and key blocks
the tile has, and when to ask for the next one. ``StaticScheduler`` reads tiles from a table that is
made before the launch, from lengths that are known or that a small kernel orders (``list_kernel``).
``serving.prefill.QueueScheduler`` takes them from a queue.

Who calls what: ``ForwardKernel.launch`` calls ``setup`` in all warpgroups and ``run_consumer`` in
consumers. Loaders and ``TileLoop`` call ``read_ahead`` for the next tile and ``tile_of`` when they
get to it; masks and the epilogue call ``first_row`` and ``position``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common import schedule
from ejkernel.kernels.pallas.gpu.common.lane_softmax import set_flag_if_any
from ejkernel.kernels.pallas.gpu.common.masks import row_of
from ejkernel.kernels.pallas.gpu.common.schedule import Tile
from ejkernel.kernels.pallas.gpu.flash_attention.forward_form import MEMBER, Form
from ejkernel.kernels.pallas.gpu.flash_attention.list_kernel import (
    Lengths,
    TileBits,
    longest_first,
    make_lists,
)
from ejkernel.types.attention.problem import Problem
from ejkernel.types.masks.blocks import cdiv

FLAG_WORDS = 4  # at least: with more tiles than bits several tiles share a flag
WORD = 32  # bits
SORTED = 256  # tiles ordered together by length: two a program, their keys and values fit L2


class NextTile(NamedTuple):
    """The tile after the current one, as far as it is read.

    Attributes:
        number: number of the tile, negative after the last; an argument of ``scheduler.tile``.
        tile: the tile, where arrays in memory decide its key blocks: then it is read early. None
            where it is computed when it is needed.
        following: number of the tile after it, where ``tile`` is read early, else None.
    """

    number: Any
    tile: Any = None
    following: Any = None


def _with_end_marker(order: np.ndarray) -> np.ndarray:
    """Adds a second -1 to every program's tiles: the number after the next tile's is read too."""
    return np.pad(order, [(0, 0), (0, 1)], constant_values=-1)


def _even_order(rows: int, costs: np.ndarray, group: int, programs: int) -> np.ndarray:
    """Returns the order of tiles of ``group`` heads at once, or of twice as many.

    A last group of few heads begins with long tiles when the other programs are nearly done: eight
    heads of 256 and 8k, one after the other, end 12% late by simulation, two together 1%.
    """
    padded = np.append(np.tile(costs, rows) + schedule.TILE_COST, 0.0)  # -1 is no tile
    once, twice = (schedule.assign(rows, costs, group * n, programs) for n in (1, 2))
    ends = [padded[order].sum(axis=1).max() for order in (once, twice)]
    return twice if ends[1] < 0.996 * ends[0] else once


def sorted_rows(rows: int, blocks: int, tiles: int = SORTED) -> int:
    """Returns the number of rows of (batch, head) whose tiles are ordered together."""
    return max(d for d in range(1, max(tiles // blocks, 1) + 1) if rows % d == 0)


def known_order(lengths: np.ndarray, problem: Problem, programs: int) -> np.ndarray:
    """Returns the order of tiles of known lengths ``[#b, #h, blocks]``, with a leading axis.

    More tiles are ordered together where the last program then ends sooner by more than the cost
    of keys that no longer fit L2: under a causal mask a call of 16k took 188 us, not 197, without
    one 345, not 340.
    """
    blocks = lengths.shape[2]
    full = np.broadcast_to(lengths, (problem.batch, problem.heads, blocks)).reshape(-1, blocks)
    rows = len(full)
    grid = min(programs, rows * blocks)
    orders = [
        schedule.assign_lengths(full, sorted_rows(rows, blocks, tiles), grid)
        for tiles in (SORTED, 2 * SORTED)
    ]
    costs = np.append(full.reshape(-1) + schedule.TILE_COST, 0.0)  # -1 is no tile
    near, far = (costs[order].sum(axis=1).max() for order in orders)
    return _with_end_marker(orders[1] if far < 0.97 * near else orders[0])[None]


def traced_order(lengths: jax.Array, problem: Problem, programs: int) -> jax.Array:
    """Returns the order like ``known_order``, for lengths computed on the device."""
    blocks = lengths.shape[2]
    rows = problem.batch * problem.heads
    order = _assigned_places(rows, blocks, min(programs, rows * blocks))
    flat, most = order.reshape(-1), np.iinfo(np.int32).max
    # slots of tiles in the order of their places, then slots after a program's last tile
    slots = np.argsort(np.where(flat < 0, most, flat), kind="stable").astype(np.int32)
    lengths = jnp.broadcast_to(lengths, (problem.batch, problem.heads, blocks))
    lengths = lengths.reshape(-1, sorted_rows(rows, blocks) * blocks)
    (tiles,) = longest_first(Lengths(lengths, slots))
    return tiles.reshape(1, *order.shape)


def with_lists(problem: Problem, tensors: dict[str, Any], programs: int) -> dict[str, Any]:
    """Returns the operands with the lists of their tiles and the order of tiles."""
    tensors = dict(tensors)
    if "tiles" in tensors:
        ((tensors["lists"], lengths),) = make_lists(TileBits(tensors.pop("tiles"), by_query=True))
    elif "lists" in tensors:
        lengths = tensors["lists"][..., 1]
    else:
        return tensors
    if "order" not in tensors:
        tensors["order"] = traced_order(lengths, problem, programs)
    return tensors


def _assigned_places(rows: int, blocks: int, programs: int) -> np.ndarray:
    """Assigns places of tiles to programs; the longest tile of a few rows has their first place."""
    group = sorted_rows(rows, blocks)
    return _with_end_marker(schedule.assign_places(rows // group, group * blocks, programs))


@dataclass(frozen=True)
class StaticScheduler:
    """Tiles from a table.

    Attributes:
        form: the compiled form of the kernel.
        programs: the most programs that run at once: the multiprocessors.
        flag_words: words of the flags of tiles that need maxima (see ``with_flags``).
    """

    form: Form
    programs: int
    flag_words: int = FLAG_WORDS

    prefetches_late: ClassVar[bool] = False
    """Whether the next tile is asked for in the last step of a tile, since asking takes a while."""

    @property
    def q_blocks(self) -> int:
        return -(-self.form.problem.q_len // self.form.tiles.block_q)

    @property
    def strips(self) -> int:
        """Tiles of a head: query blocks, where the blocks of a cluster count once."""
        return -(-self.q_blocks // self.form.tiles.cluster)

    @property
    def at_once(self) -> int:
        """Programs that run at once, of which a cluster counts as one."""
        p = self.form.problem
        count = self.strips * p.batch * p.heads
        return min(self.programs // self.form.tiles.cluster, count)

    @property
    def grid(self) -> int:
        return len(self._guided()) if self._is_guided else self.at_once

    @property
    def _is_guided(self) -> bool:
        return self.form.tiles.guided and not self.form.read

    def _costs(self) -> np.ndarray:
        p, t = self.form.problem, self.form.tiles
        strip = t.cluster * t.block_q
        return schedule.band_costs(p.q_len, p.kv_len, self.form.rules.band, strip, t.block_kv)

    def _guided(self) -> np.ndarray:
        p, group = self.form.problem, self.form.tiles.head_group
        return schedule.assign_guided(p.batch * p.heads, self._costs(), group, self.at_once)

    # ---- before the launch ------------------------------------------------------------------

    def order(self, operands: dict[str, jax.Array]) -> jax.Array:
        """Returns the tiles of each program, int32 ``[programs, n]``; -1 after the last."""
        p, t, n = self.form.problem, self.form.tiles, self.strips
        rows = p.batch * p.heads
        if "order" in operands:
            return operands["order"][0]
        if "ranges" in operands:
            ranges = operands["ranges"]
            return self._order_by_length(ranges[..., 3] - ranges[..., 0], rows, n)
        if self._is_guided:
            return jnp.asarray(_with_end_marker(self._guided()))
        order = _even_order(rows, self._costs(), t.head_group, self.at_once)
        return jnp.asarray(_with_end_marker(order))

    def _order_by_length(self, lengths: jax.Array, rows: int, n: int) -> jax.Array:
        """Assigns slots ahead of time; the longest tile of a few heads takes the first slot."""
        p = self.form.problem
        slots = sorted_rows(rows, n) * n
        order = _assigned_places(rows, n, self.at_once)
        lengths = jnp.broadcast_to(lengths, (p.batch, p.heads, n))
        longest = jnp.argsort(-lengths.reshape(-1, slots), axis=-1).astype(jnp.int32)
        tile = order // slots * slots + longest[order // slots, order % slots]
        return jnp.where(order < 0, -1, tile)

    # ---- in the kernel ----------------------------------------------------------------------

    def setup(self, r: Any) -> None:
        """Does nothing: the table is an operand."""

    def run_consumer(self, r: Any, mainloop: Callable[[], None]) -> None:
        """Runs the mainloop of a consumer: every program has a tile."""
        mainloop()

    def first_tile(self, r: Any) -> Any:
        """Returns the number of this program's first tile."""
        return self.number(r, 0)

    def number(self, r: Any, i: Any) -> jax.Array:
        """Returns the number of this program's i-th tile, negative after the last."""
        return r.order[lax.axis_index("program"), i]

    def tile(self, r: Any, number: Any) -> Tile:
        p, t = self.form.problem, self.form.tiles
        row, block = lax.div(number, self.strips), lax.rem(number, self.strips)
        if t.cluster > 1:
            block = block * t.cluster + lax.axis_index(MEMBER)
        batch, head = lax.div(row, p.heads), lax.rem(row, p.heads)
        if self.form.listed:
            row = row_of(r.lists, batch, head)
            full, count = r.lists[*row, block, 0], r.lists[*row, block, 1]
            return Tile(batch, head, block, jnp.int32(0), jnp.int32(0), full, count)
        if self.form.rules.arrays:
            row = row_of(r.ranges, batch, head)
            start, full_start, full_stop, stop = (r.ranges[*row, block, c] for c in range(4))
            stop = jnp.maximum(stop, 1)
            start = jnp.minimum(start, stop - 1)
        else:
            first = block * t.block_q
            last = jnp.minimum(first + t.block_q, p.q_len) - 1
            start, full_start, full_stop, stop = schedule.band_blocks(
                first, last, p.kv_len, self.form.rules.band, t.block_kv
            )
        return Tile(batch, head, block, start, full_start, full_stop, stop)

    def first_row(self, tile: Any) -> jax.Array:
        """Returns the first row of q and o of a tile."""
        return tile.block * self.form.tiles.block_q

    def position(self, tile: Any) -> jax.Array:
        """Returns the position among the keys, as masks count, of a tile's first row."""
        return self.first_row(tile)

    def read_ahead(self, r: Any, i: Any, following: Any = None) -> NextTile:
        """Reads this program's i-th tile while the one before is computed.

        ``following``: its number, if ``NextTile.following`` of the tile before has it.
        """
        if not self.form.read:
            return NextTile(self.number(r, i))
        number = self.number(r, i) if following is None else following
        return NextTile(number, self.tile(r, jnp.maximum(number, 0)), self.number(r, i + 1))

    def tile_of(self, r: Any, ahead: NextTile) -> Tile:
        """Returns the tile that was read ahead."""
        return self.tile(r, ahead.number) if ahead.tile is None else ahead.tile

    def scratch(self) -> dict[str, Any]:
        t = self.form.tiles
        if not t.unshifted_first:
            return {}
        return {"needs_maxima": plgpu.SMEM((t.consumers, self.flag_words), jnp.int32)}

    # ---- tiles to compute again ---------------------------------------------------------------

    def with_flags(self, order: jax.Array) -> StaticScheduler:
        """Returns the scheduler with as many flags as the tiles in ``order`` need."""
        if not self.form.tiles.flag_per_tile:
            return self
        return replace(self, flag_words=max(FLAG_WORDS, cdiv(order.shape[1], WORD)))

    def clear_flags(self, r: Any) -> None:
        """Clears the flags of this consumer."""
        for word in range(self.flag_words):
            r.needs_maxima[lax.axis_index("wg"), word] = 0

    def flag(self, r: Any, i: Any, rows: jax.Array) -> None:
        """Flags this program's i-th tile where one of ``rows`` is not 0."""
        set_flag_if_any(
            r.needs_maxima, lax.axis_index("wg"), lax.div(i, self.tiles_per_flag(r)), rows
        )

    def tiles_per_flag(self, r: Any) -> int:
        """Returns the number of tiles that share a flag."""
        return cdiv(r.order.shape[1], self.flag_words * WORD)

    @property
    def of_flagged(self) -> FlaggedScheduler:
        """The scheduler of the flagged tiles."""
        return FlaggedScheduler(self.form, self.programs, self.flag_words)


@dataclass(frozen=True)
class FlaggedScheduler(StaticScheduler):
    """The tiles of a table that consumers of a program have flagged, in the order of the table."""

    def _word(self, r: Any, n: Any) -> jax.Array:
        """Returns the n-th word of flags, of any consumer."""
        words = [r.needs_maxima[consumer, n] for consumer in range(self.form.tiles.consumers)]
        return functools.reduce(lax.bitwise_or, words)

    def is_any_flagged(self, r: Any) -> jax.Array:
        """Returns whether a consumer of this program flagged a tile."""
        words = [self._word(r, n) for n in range(self.flag_words)]
        return functools.reduce(lax.bitwise_or, words) != 0

    def number(self, r: Any, i: Any) -> jax.Array:
        """Returns the number of the i-th flagged tile, -1 after the last.

        Counts set flags, the first one first; a flag stands for ``tiles_per_flag`` tiles in a row.
        """
        tiles_per_flag, columns = self.tiles_per_flag(r), r.order.shape[1]
        bits = self.flag_words * WORD

        def is_not_found(carry: Any) -> jax.Array:
            bit, flags_before = carry
            return (flags_before >= 0) & (bit < bits)

        def read_bit(carry: Any) -> Any:
            bit, flags_before = carry
            word = self._word(r, lax.div(bit, WORD))
            is_set = lax.shift_right_logical(word, lax.rem(bit, WORD)) & 1
            return bit + 1, flags_before - is_set

        next_bit, flags_before = lax.while_loop(
            is_not_found, read_bit, (jnp.int32(0), lax.div(i, tiles_per_flag))
        )
        column = (next_bit - 1) * tiles_per_flag + lax.rem(i, tiles_per_flag)
        # the last column is -1
        column = jnp.where(flags_before >= 0, columns - 1, jnp.minimum(column, columns - 1))
        return r.order[lax.axis_index("program"), column]

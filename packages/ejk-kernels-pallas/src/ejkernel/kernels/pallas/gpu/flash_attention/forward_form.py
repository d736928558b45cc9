"""Static form of the forward kernel: the sizes of a call, and its tiles in their order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.pallas.common.units import unit
from ejkernel.kernels.pallas.gpu.common import schedule
from ejkernel.kernels.pallas.gpu.common.masks import row_of
from ejkernel.kernels.pallas.gpu.common.schedule import Tile
from ejkernel.kernels.pallas.gpu.flash_attention.list_kernel import (
    Lengths,
    TileBits,
    longest_first,
    make_lists,
)
from ejkernel.kernels.pallas.gpu.flash_attention.lists import COUNTS
from ejkernel.kernels.pallas.gpu.flash_attention.tiles import ForwardTiles
from ejkernel.types.attention.problem import LOG2E, Problem
from ejkernel.types.masks.structure import Rules

MEMBER = "member"  # the axis of programs in a cluster
SORTED = 256  # tiles ordered together by length: two a program, their keys and values fit L2


def _read_ahead(order: np.ndarray) -> np.ndarray:
    """Adds one end marker: indices are read one tile ahead."""
    return np.pad(order, [(0, 0), (0, 1)], constant_values=-1)


def sorted_rows(rows: int, blocks: int, tiles: int = SORTED) -> int:
    """Returns the number of rows of (batch, head) whose tiles are ordered together."""
    return max(d for d in range(1, max(tiles // blocks, 1) + 1) if rows % d == 0)


def known_order(lengths: np.ndarray, problem: Problem, programs: int) -> np.ndarray:
    """Returns ``Form.order`` for known lengths ``[#b, #h, blocks]``, with a leading axis.

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
    return _read_ahead(orders[1] if far < 0.97 * near else orders[0])[None]


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
    return _read_ahead(schedule.assign_places(rows // group, group * blocks, programs))


@dataclass(frozen=True)
class Form:
    """One compiled form of the kernel.

    Attributes:
        problem, tiles: what is computed and how. operands: names of the operands: in addition to q,
        k and v, ``ranges`` int32 [#b, #h, blocks, 4],
            ``lists`` and ``bits`` (see ``lists``), with ``order``, ``q_ids`` and ``kv_ids`` int32
            [#b, padded length], ``sink`` float32 [#b, h], ``order`` as ``known_order`` makes it.
        programs: number of programs: the multiprocessors.
    """

    problem: Problem
    tiles: ForwardTiles
    operands: tuple[str, ...]
    programs: int

    kernel_name: ClassVar[str] = "flash_attention_forward"
    keeps_lse: ClassVar[bool] = True
    # whether the next tile is read with the last block of a tile: where reading it is slow
    late: ClassVar[bool] = False

    # ---- sizes ------------------------------------------------------------------------------

    @property
    def rules(self) -> Rules:
        return self.problem.rules

    @property
    def copies(self) -> int:
        """Number of TMA copies of a block of keys."""
        return 1

    @property
    def q_blocks(self) -> int:
        return -(-self.problem.q_len // self.tiles.block_q)

    @property
    def strips(self) -> int:
        """Tiles of a head: query blocks, with a cluster counted once."""
        return -(-self.q_blocks // self.tiles.cluster)

    @property
    def grid(self) -> int:
        count = self.strips * self.problem.batch * self.problem.heads
        return min(self.programs // self.tiles.cluster, count)

    @property
    def log2_scale(self) -> float:
        """Positive factor of base-2 logits: of tanh of capped ones, else of dot products."""
        return unit(self.problem) * LOG2E

    @property
    def fused(self) -> bool:
        """Returns whether probabilities are exponentials of one multiply-add (see ``softmax``)."""
        if self.shift is not None or self.problem.dtype == "float16":
            return False
        # wide heads have no registers for its row state: they spill and lose 14%
        return max(self.problem.dim, self.problem.value_dim) <= 128

    @property
    def large(self) -> float:
        """Bound, 2^30 in base 2: values of at least this are multiplied by ``power``."""
        return min(2.0**30 / self.log2_scale, float(np.finfo(np.float32).max))

    @property
    def power(self) -> float:
        """A power of two for ``log2_scale``; finite logits stay finite."""
        return 2.0 ** math.floor(math.log2(unit(self.problem)))

    @property
    def shift(self) -> float | None:
        """Constant shift of capped base-2 logits; None if they are shifted by the rows' maxima.

        They lie in [-c, c]. Up to c = 80 (a cap of 55) exponentials so shifted lie in
        [2^-80, 2^80], and float32 leaves 2^46 on either side for values and for the number of keys.
        float16 lacks that range for p.
        """
        p, c = self.problem, math.ceil(self.log2_scale)
        if p.soft_cap is None or c > 80 or p.dtype != "bfloat16":
            return None
        return float(min(c, 80 - c))

    @property
    def listed(self) -> bool:
        """Returns whether tiles visit lists of blocks."""
        return "lists" in self.operands

    @property
    def read(self) -> bool:
        """Returns whether the blocks of a tile are read from memory."""
        return self.listed or self.rules.arrays

    @property
    def masks(self) -> bool:
        """Returns whether any block may need an element mask."""
        ragged = self.problem.kv_len % self.tiles.block_kv != 0
        return ragged or self.read or not self.rules.band.empty

    # ---- tiles ------------------------------------------------------------------------------

    def order(self, tensors: dict[str, jax.Array]) -> jax.Array:
        """The tiles of each program, int32 ``[programs, n]``; -1 after the last.

        ``tensors``: the operands by name.
        """
        p, t, n = self.problem, self.tiles, self.strips
        rows = p.batch * p.heads
        if "order" in tensors:
            return tensors["order"][0]
        if "ranges" in tensors:
            ranges = tensors["ranges"]
            return self._order_by_length(ranges[..., 3] - ranges[..., 0], rows, n)
        strip = t.cluster * t.block_q
        costs = schedule.band_costs(p.q_len, p.kv_len, self.rules.band, strip, t.block_kv)
        return jnp.asarray(_read_ahead(schedule.assign(rows, costs, t.head_group, self.grid)))

    def _order_by_length(self, lengths: jax.Array, rows: int, n: int) -> jax.Array:
        """Assigns places ahead of time; the longest tile of a few heads takes the first."""
        places = sorted_rows(rows, n) * n
        order = _assigned_places(rows, n, self.grid)
        lengths = jnp.broadcast_to(lengths, (self.problem.batch, self.problem.heads, n))
        longest = jnp.argsort(-lengths.reshape(-1, places), axis=-1).astype(jnp.int32)
        tile = order // places * places + longest[order // places, order % places]
        return jnp.where(order < 0, -1, tile)

    def number(self, r: Any, i: Any) -> jax.Array:
        """Index of this program's i-th tile, negative after the last."""
        return r.order[lax.axis_index("program"), i]

    def tile(self, r: Any, number: Any) -> Any:
        p, t = self.problem, self.tiles
        row, block = lax.div(number, self.strips), lax.rem(number, self.strips)
        if t.cluster > 1:
            block = block * t.cluster + lax.axis_index(MEMBER)
        batch, head = lax.div(row, p.heads), lax.rem(row, p.heads)
        if self.listed:
            row = row_of(r.lists, batch, head)
            full, count = r.lists[*row, block, 0], r.lists[*row, block, 1]
            return Tile(batch, head, block, jnp.int32(0), jnp.int32(0), full, count)
        if self.rules.arrays:
            row = row_of(r.ranges, batch, head)
            start, full_start, full_stop, stop = (r.ranges[*row, block, c] for c in range(4))
            stop = jnp.maximum(stop, 1)
            start = jnp.minimum(start, stop - 1)
        else:
            first = block * t.block_q
            last = jnp.minimum(first + t.block_q, p.q_len) - 1
            start, full_start, full_stop, stop = schedule.band_blocks(
                first, last, p.kv_len, self.rules.band, t.block_kv
            )
        return Tile(batch, head, block, start, full_start, full_stop, stop)

    def key_block(self, r: Any, tile: Tile, j: Any) -> Any:
        """Returns the key block at position j of a tile's list or range."""
        if not self.listed:
            return j
        return r.lists[*row_of(r.lists, tile.batch, tile.head), tile.block, COUNTS + j]

    def first_row(self, tile: Any) -> jax.Array:
        """Row of q, and of o, with which a tile begins."""
        return tile.block * self.tiles.block_q

    def position(self, tile: Any) -> jax.Array:
        """Position of its first row among the keys, for masks."""
        return self.first_row(tile)

    def first(self, r: Any) -> jax.Array:
        """Index of this program's first tile."""
        return self.number(r, 0)

    def opened(self, r: Any) -> None:
        """Runs first in all warpgroups of a program: nothing here."""

    def ahead(self, r: Any, i: Any, following: Any = None) -> tuple:
        """Prefetches tile i, one tile early: (index, blocks, index of the next).

        Blocks are read from memory, for the index ``following`` read earlier, only if arrays
        decide them; else they are computed when the tile begins.
        """
        if not self.read:
            return self.number(r, i), None, None
        number = self.number(r, i) if following is None else following
        return number, self.tile(r, jnp.maximum(number, 0)), self.number(r, i + 1)

    def arrived(self, r: Any, ahead: tuple) -> Tile:
        number, tile, _ = ahead
        return self.tile(r, number) if tile is None else tile

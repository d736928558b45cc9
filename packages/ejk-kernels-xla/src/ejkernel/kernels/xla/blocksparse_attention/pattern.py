"""Lists of the tiles a head visits, from the block pattern and every other mask.

A tile is visited if the pattern allows any of its blocks and the other masks may show any of its
pairs. Query heads of one key/value head share a list, of the tiles that any of them needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.xla._common.blocks import take_block
from ejkernel.types import MaskInfo, PreparedMask, prepare_mask
from ejkernel.types.masks.blocks import BlockRange
from ejkernel.types.masks.fields import MaskFields, with_private
from ejkernel.types.masks.hidden import seen_keys
from ejkernel.types.masks.pattern import inside_blocks, visited_tiles
from ejkernel.types.masks.prepare import Tiling

# the other masks are only read tile by tile; the lists give the tiles to visit
_NO_RANGES = (BlockRange(*(np.zeros(0, np.int32),) * 4),) * 2


@dataclass(frozen=True)
class Grid:
    """Lengths of tiles and of the pattern's blocks for a call of these lengths and heads."""

    tiling: Tiling
    q_block: int
    kv_block: int
    kv_heads: int
    groups: int

    @property
    def aligned(self) -> bool:
        """True if no tile holds pairs of two blocks of the pattern."""
        t = self.tiling
        blocks = (self.q_block, self.kv_block)
        return inside_blocks(blocks, t.q_len, t.kv_len, t.block_q, t.block_kv)

    def per_head(self, x: Any) -> Any:
        """``[#b, #h, ...]`` -> ``[#b, #hk, 1|g, ...]``."""
        split = (1, 1) if x.shape[1] == 1 else (self.kv_heads, self.groups)
        return x.reshape(x.shape[0], *split, *x.shape[2:])


def visible_tiles(grid: Grid, mask: MaskInfo, pattern: jax.Array | None) -> jax.Array:
    """bool ``[#b, #hk, nq, nk]``: the tiles to visit."""
    blocks = None if pattern is None else (grid.q_block, grid.kv_block)
    return grid.per_head(jnp.asarray(visited_tiles(mask, pattern, blocks, *grid.tiling)[0])).any(2)


def _terms(grid: Grid, mask: MaskInfo) -> tuple[MaskFields, ...]:
    """The masks cut into tiles, with every array ``[#b, #hk, 1, ...]`` as one head needs it."""

    def tokens(x: Any) -> Any:
        if x is None:
            return None
        return grid.per_head(x)[:, :, None] if x.ndim == 3 else x[:, None, None]

    def dense(x: Any) -> Any:
        return None if x is None else grid.per_head(x)[:, :, None]

    return tuple(
        with_private(
            term,
            attention_mask=dense(term.attention_mask),
            q_segment_ids=tokens(term.q_segment_ids),
            kv_segment_ids=tokens(term.kv_segment_ids),
            q_positions=tokens(term.q_positions),
            kv_positions=tokens(term.kv_positions),
        )
        for term in prepare_mask(mask, **grid.tiling._asdict()).terms
    )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("seen", "inner", "count", "order", "pattern", "terms"),
    meta_fields=("grid", "by_key"),
)
@dataclass(frozen=True)
class HeadMask:
    """A ``BlockMask`` of one batch row and key/value head; ``build`` has all, ``[#b, #hk, ...]``.

    Outer tiles are query tiles, or key tiles with ``by_key``; inner tiles are the other kind.

    seen: bool ``[nq, nk]``, the tiles to visit.
    inner: int32 ``[outer, inner]``, for each outer tile first the tiles to visit, then the others.
    count: int32 ``[outer]``, how many to visit.
    order: int32 ``[outer]``, tiles with most visits first, so that heads mapped together have
        about equally many at any time; None for heads mapped one by one.
    pattern: bool ``[1|g, blocks of queries, blocks of keys]``; None if ``seen`` says it all.
    terms: the other masks.
    """

    seen: jax.Array
    inner: jax.Array
    count: jax.Array
    order: jax.Array | None
    pattern: jax.Array | None
    terms: tuple[MaskFields, ...]
    grid: Grid
    by_key: bool

    @classmethod
    def build(
        cls, grid: Grid, mask: MaskInfo, pattern: jax.Array | None, *, by_key: bool, together: bool
    ) -> HeadMask:
        """``mask`` with ``pattern`` ``[#b, #h, blocks of queries, blocks of keys]`` or None."""
        seen = visible_tiles(grid, mask, pattern)
        visits = seen.swapaxes(-1, -2) if by_key else seen
        count = visits.sum(-1, dtype=jnp.int32)
        inner = jnp.argsort(~visits, axis=-1, stable=True).astype(jnp.int32)
        order = None
        if together:
            order = jnp.argsort(-count, axis=-1, stable=True).astype(jnp.int32)
        if pattern is not None:
            pattern = grid.per_head(pattern)
            if grid.aligned and pattern.shape[2] == 1:
                pattern = None
        return cls(seen, inner, count, order, pattern, _terms(grid, mask), grid, by_key)

    def _range(self, outer: Any) -> tuple[Any, Any]:
        return 0, take_block(self.count, outer)

    def _index(self, outer: Any, step: Any) -> jax.Array:
        return self.inner[outer, step]

    kv_range = q_range = _range
    kv_index = q_index = _index

    @property
    def q_order(self) -> jax.Array | None:
        return None if self.by_key else self.order

    @property
    def kv_order(self) -> jax.Array | None:
        return self.order if self.by_key else None

    def visited(self, qi: Any, ki: Any) -> jax.Array:
        """Returns bool ``[]``: False for steps of a finished head mapped with an unfinished one."""
        return self.seen[qi, ki]

    def seen_keys(self) -> jax.Array:
        """Returns bool ``[1, k]``: a head mapped with others also visits keys that no row sees."""
        t = self.grid.tiling
        seen = jnp.repeat(self.seen.any(0), t.block_kv)[None]
        keys = seen_keys(self.terms, t.q_len, t.kv_len)
        if keys is None:
            return seen
        missing = seen.shape[1] - t.kv_len  # keys come padded to whole tiles
        return seen & (keys if keys.shape[1] == 1 else jnp.pad(keys, ((0, 0), (0, missing))))

    def tile(self, qi: Any, ki: Any) -> jax.Array | None:
        """bool ``[1, 1|g, block_q, block_kv]`` of a tile to visit; None if nothing is hidden."""
        t = self.grid.tiling
        shown = PreparedMask(t, self.terms, *_NO_RANGES).tile(qi, ki)
        if self.pattern is not None:
            rows = self._blocks(qi, t.block_q, self.grid.q_block, self.pattern.shape[1])
            cols = self._blocks(ki, t.block_kv, self.grid.kv_block, self.pattern.shape[2])
            pattern = self.pattern[:, rows[:, None], cols][None]
            shown = pattern if shown is None else shown & pattern
        if shown is None:
            return None
        return jnp.broadcast_to(shown, (*shown.shape[:2], t.block_q, t.block_kv))

    def _blocks(self, number: Any, tile: int, block: int, count: int) -> jax.Array:
        """The pattern's block of every index in a tile; one for all where tiles are aligned."""
        width = 1 if self.grid.aligned else tile
        index = number * tile + jnp.arange(width, dtype=jnp.int32)
        return jnp.minimum(index // block, count - 1)

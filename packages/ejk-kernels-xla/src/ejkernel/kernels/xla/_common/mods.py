"""score_mod and mask_mod of a call, one tile at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.xla._common.layout import Layout
from ejkernel.types.arrays import namespace
from ejkernel.types.masks.blocks import BlockRange, matrix_range
from ejkernel.types.masks.pattern import in_tiles
from ejkernel.types.masks.prepare import PreparedMask, entry_at
from ejkernel.types.masks.rules import both
from ejkernel.types.mods import Mod, apply_mod, known_blocks

Pull = Callable[[jax.Array], tuple[jax.Array, tuple[jax.Array, ...]]]


def _indices(layout: Layout, qi: Any, ki: Any) -> list[jax.Array]:
    """Indices b ``[b]``, h ``[hk, g]``, q ``[bq]``, k ``[bk]`` of a tile.

    Those past the ends repeat the last: a function reads nothing that no pair has.
    """
    heads = layout.kv_heads * layout.groups
    b, h = jnp.arange(layout.batch), jnp.arange(heads).reshape(layout.kv_heads, layout.groups)
    q = jnp.minimum(qi * layout.block_q + jnp.arange(layout.block_q), layout.q_len - 1)
    k = jnp.minimum(ki * layout.block_kv + jnp.arange(layout.block_kv), layout.kv_len - 1)
    return [x.astype(jnp.int32) for x in (b, h, q, k)]


class TileScores:
    """A score_mod on tiles of logits ``[b, hk, g, bq, bk]``."""

    def __init__(self, mod: Mod, layout: Layout) -> None:
        self.mod, self.layout = mod, layout
        kinds = (jnp.issubdtype(x.dtype, jnp.floating) for x in mod.arrays)
        self.smooth = tuple(i for i, is_float in enumerate(kinds) if is_float)
        """Numbers of the captured arrays that have gradients."""

    @property
    def floats(self) -> tuple[Any, ...]:
        """The captured arrays that have gradients."""
        return tuple(self.mod.arrays[i] for i in self.smooth)

    def __call__(self, x: jax.Array, qi: Any, ki: Any) -> jax.Array:
        return self._scores(x, self.floats, qi, ki)

    def with_pullback(self, x: jax.Array, qi: Any, ki: Any) -> tuple[jax.Array, Pull]:
        """Returns the scores, and the function from their gradient to that of x and ``floats``."""
        return jax.vjp(lambda x, floats: self._scores(x, floats, qi, ki), x, self.floats)

    def _scores(self, x: jax.Array, floats: tuple[Any, ...], qi: Any, ki: Any) -> jax.Array:
        mod, arrays = self.mod, list(self.mod.arrays)
        for i, array in zip(self.smooth, floats, strict=True):
            arrays[i] = array
        mod = Mod(mod.program, arrays, mod.origin)
        scores = apply_mod(mod, *_indices(self.layout, qi, ki), x.astype(mod.program.dtype))
        return scores.astype(x.dtype)


@jax.tree_util.register_pytree_node_class
class ModMask:
    """A prepared mask and a mask_mod, as ``blocks.BlockMask``."""

    def __init__(self, mask: PreparedMask, mod: Mod, layout: Layout) -> None:
        self.mask, self.mod, self.layout = mask, mod, layout
        self.ranges: tuple[BlockRange, BlockRange] | None = None
        sizes = (layout.q_len, layout.kv_len)
        heads = layout.kv_heads * layout.groups
        block_map = known_blocks(mod, *sizes, batch=layout.batch, heads=heads)
        if block_map is not None:
            states, size = block_map
            tiles = (layout.block_q, layout.block_kv)
            visible, _ = in_tiles(states > 0, (size, size), *sizes, *tiles)
            visible, xp = visible.any((0, 1)), namespace(visible)
            self.ranges = tuple(matrix_range(xp, x, x) for x in (visible, visible.T))  # ty: ignore[invalid-assignment]

    def tree_flatten(self) -> tuple[tuple, Layout]:
        return (self.mask, self.mod), self.layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, children: tuple) -> ModMask:
        return cls(*children, layout)

    def tile(self, qi: Any, ki: Any) -> jax.Array:
        b, h, q, k = _indices(self.layout, qi, ki)
        return both(self.mask.tile(qi, ki), apply_mod(self.mod, b, h.reshape(-1), q, k))

    def kv_range(self, qi: Any) -> tuple[Any, Any]:
        return self._narrowed(self.mask.kv_range(qi), 0, qi)

    def q_range(self, ki: Any) -> tuple[Any, Any]:
        return self._narrowed(self.mask.q_range(ki), 1, ki)

    def seen_keys(self) -> Any:
        """Keys that some query may see by the prepared mask."""
        return self.mask.seen_keys()

    def _narrowed(self, bounds: tuple[Any, Any], axis: int, number: Any) -> tuple[Any, Any]:
        if self.ranges is None:
            return bounds
        ours = self.ranges[axis]
        start, stop = (entry_at(x, number) for x in (ours.start, ours.stop))
        if all(isinstance(x, (int, np.integer)) for x in (*bounds, start, stop)):
            return max(bounds[0], start), min(bounds[1], stop)
        return jnp.maximum(bounds[0], start), jnp.minimum(bounds[1], stop)

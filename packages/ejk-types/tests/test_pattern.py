"""Patterns of blocks as tiles see them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types.masks.pattern import FEW, in_tiles


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("blocks", [(16, 16), (7, 40), (2, 3), (100, 5)])
def test_tiles_have_the_blocks_that_they_meet(blocks, traced):
    """One by one where a tile meets few, as a reduction where they are many."""
    q, k, tile = 90, 75, (32, 24)
    assert (max(tile) > FEW * min(blocks)) == (blocks == (2, 3))
    chosen = np.random.default_rng(1).random((1, 2, -(-q // blocks[0]), -(-k // blocks[1]))) < 0.7
    found = in_tiles(jnp.asarray(chosen) if traced else chosen, blocks, q, k, *tile)
    pairs = chosen[:, :, np.arange(q) // blocks[0]][..., np.arange(k) // blocks[1]]
    for i, j in np.ndindex(3, 4):
        part = pairs[:, :, 32 * i : 32 * (i + 1), 24 * j : 24 * (j + 1)]
        for x, whole in zip(found, (part.any((2, 3)), part.all((2, 3))), strict=True):
            np.testing.assert_array_equal(x[:, :, i, j], whole)

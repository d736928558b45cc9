"""The smallest kernel with something to tune, for tests of tuning."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from ejkernel.ops import Kernel, OpConfig
from ejkernel.ops.params import tile_field


@dataclass(frozen=True)
class Tile(OpConfig):
    tile: int | None = tile_field()


class Doubled(Kernel[Tile, jax.Array]):
    """``2 x``, with tiles to choose from; three elements cannot be done."""

    trained = False

    def __init__(self, name: str, *tiles: int):
        super().__init__(name)
        self.tiles = tiles

    def run(self, x, *, cfg):
        if x.shape == (3,):
            raise RuntimeError("no such shape")
        return x * 2

    def config_space(self, inv):
        return [Tile("xla", tile=tile) for tile in self.tiles]

"""The smallest kernels with something to choose, for tests of choosing and tuning."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel, OpConfig
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


@dataclass(frozen=True)
class Config:
    """The factor of ``Scale``."""

    scale: float = 1.0


class Scale(Kernel[Config, jax.Array]):
    """Multiplies by what the config says, so that results tell which config ran."""

    space = ()

    def run(self, x, *, power=1, cfg):
        return x * cfg.scale**power

    def heuristic_cfg(self, inv):
        return Config(1.0)

    def config_space(self, inv):
        return self.space


def scale_of(result, x):
    """Returns the factor that was multiplied by."""
    return float(result[0] / x[0])


def make_executor(**options):
    """Returns an executor and the list of the events of its choices."""
    events = []
    options.setdefault("cache", ConfigCache())
    chain = ConfigSelectorChain(on_event=lambda name, _: events.append(name), **options)
    return Executor(chain), events

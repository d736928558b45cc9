"""Tiles of mean pooling on TPU."""

from __future__ import annotations

from dataclasses import dataclass

from ejkernel.kernels.pallas.tpu.common.chip import LANES, SUBLANES, Chip
from ejkernel.types.problems.mean_pooling import PoolingProblem

# Elements of a block: a step takes at least a microsecond to fetch, several times its own overhead.
BLOCK = 2**19


@dataclass(frozen=True)
class Tiles:
    """Blocks of both kernels.

    Attributes:
        groups: whole groups of a block, which ``chunks`` pools; 0: ``segments`` pools, whose
            groups have any number of blocks.
        rows: rows of a block.
        channels: channels of a block.
    """

    groups: int
    rows: int
    channels: int

    def vmem(self, p: PoolingProblem) -> int:
        """Bytes of vector memory: two buffers of x, and its float32 values under a mask."""
        return self.rows * self.channels * (2 * p.itemsize + 3 * 4)


def choose(p: PoolingProblem, chip: Chip) -> Tiles:
    """Blocks of whole groups where a block of at least 128 channels holds them, else of rows."""
    unit = 16 if p.itemsize == 2 else 8
    widths = [p.channels] if p.channels <= LANES else [512, 256, LANES]
    if not p.sequences:
        for width in widths:
            groups = min(BLOCK // (width * p.chunk) // unit * unit, p.groups)
            if groups * p.chunk != p.rows and groups * p.chunk % SUBLANES:
                # no block may end within a register, save where the array does
                groups = -(-groups // unit) * unit
            if groups:
                return Tiles(groups, groups * p.chunk, min(width, p.channels))
    rows = p.batch * p.rows
    block = min(512, -(-rows // LANES) * LANES)
    return Tiles(0, block, p.channels if p.channels <= 1024 else 1024)

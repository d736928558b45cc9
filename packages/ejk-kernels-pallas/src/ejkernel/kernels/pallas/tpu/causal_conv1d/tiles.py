"""Blocks of the short causal convolution on TPU."""

from __future__ import annotations

from dataclasses import dataclass

from ejkernel.kernels.pallas.tpu.common.chip import Chip
from ejkernel.types.problems.convolution import ConvolutionProblem

HALO = 16
"""Rows before and after a block that are loaded with it: a register of bfloat16, and at least as
many as the 7 rows that the other taps of a row reach."""


@dataclass(frozen=True)
class Tiles:
    """Rows and channels of a block of both passes; rows are a multiple of ``HALO``."""

    rows: int
    channels: int

    def vmem(self) -> int:
        """Bytes of vector memory of the backward pass, which has about a dozen float32 blocks."""
        return 12 * (self.rows + 2 * HALO) * self.channels * 4


def choose(p: ConvolutionProblem, chip: Chip) -> Tiles:
    """Returns blocks that take at least a microsecond to fetch, several times a step's overhead."""
    rows = min(256, -(-p.rows // HALO) * HALO)
    return Tiles(rows, p.channels if p.channels <= 512 else 512)

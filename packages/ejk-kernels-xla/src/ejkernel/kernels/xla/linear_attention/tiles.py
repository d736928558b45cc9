"""Chunk length of linear attention."""

from __future__ import annotations

from dataclasses import dataclass

from ejkernel.kernels.xla._common.tiles import Steps
from ejkernel.types.arrays import size_of

# below this many tokens the recurrence itself is cheaper than any chunk
STEP_LIMIT = 16
# matmuls cost 2 s d (c + 2 d), the exponentials s log2(c) d: flat between 32 and 128 on a CPU
DEFAULT_CHUNK = 64


@dataclass(frozen=True)
class Chunk(Steps):
    """Tokens of a chunk."""

    time_tile: int

    def __post_init__(self) -> None:
        if self.time_tile < 1 or self.time_tile & (self.time_tile - 1):
            raise ValueError(f"time_tile: must be a power of two, got {self.time_tile}")


def choose(tokens: int, sequences: int) -> Chunk:
    """Sequences are padded to whole chunks: no longer than the mean one needs."""
    mean = max(size_of(tokens) // max(sequences, 1), 1)
    return Chunk(min(DEFAULT_CHUNK, max(16, 1 << (mean - 1).bit_length())))

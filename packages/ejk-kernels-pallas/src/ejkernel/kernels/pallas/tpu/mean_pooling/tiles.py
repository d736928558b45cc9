"""Static properties and tiles of mean pooling on TPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ejkernel.kernels.pallas.tpu.common.chip import Chip

LANES = 128
# Elements of a block: a step takes at least a microsecond to fetch, several times its own overhead.
BLOCK = 2**19


@dataclass(frozen=True)
class Problem:
    """Static properties of a call.

    Attributes:
        batch, rows, channels: of x; one batch row where it is packed.
        chunk: rows of a group, 0 for whole sequences.
        sequences: packed sequences, 0 where x is not packed.
        masked: whether some rows may not count.
        dtype: of x.
    """

    batch: int
    rows: int
    channels: int
    chunk: int
    sequences: int
    masked: bool
    dtype: str

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def group(self) -> int:
        """Rows of a group of x that is not packed."""
        return self.chunk or self.rows

    @property
    def groups(self) -> int:
        """Groups of a batch row of x that is not packed."""
        return -(-self.rows // self.group)


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

    def vmem(self, p: Problem) -> int:
        """Bytes of vector memory: two buffers of x, and its float32 values under a mask."""
        return self.rows * self.channels * (2 * p.itemsize + 3 * 4)


def problem_of(a: Mapping[str, Any]) -> Problem:
    """The static properties of a call whose arguments are canonical."""
    x, cu = a["x"], a["cu_seqlens"]
    batch, rows, *channels = x.shape if cu is None else (1, *x.shape)
    width = 1
    for size in channels:
        width *= size
    sequences = 0 if cu is None else cu.shape[0] - 1
    masked = a["attention_mask"] is not None
    return Problem(batch, rows, width, a["chunk_size"] or 0, sequences, masked, x.dtype.name)


def choose(p: Problem, chip: Chip) -> Tiles:
    """Blocks of whole groups where a block of at least 128 channels holds them, else of rows."""
    unit = 16 if p.itemsize == 2 else 8
    widths = [p.channels] if p.channels <= LANES else [512, 256, LANES]
    if not p.sequences:
        for width in widths:
            groups = min(BLOCK // (width * p.group) // unit * unit, p.groups)
            if groups:
                return Tiles(groups, groups * p.group, min(width, p.channels))
    rows = p.batch * p.rows
    block = min(512, -(-rows // LANES) * LANES)
    return Tiles(0, block, p.channels if p.channels <= 1024 else 1024)

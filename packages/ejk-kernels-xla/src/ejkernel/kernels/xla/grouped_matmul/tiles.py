"""Rows per step of a grouped matmul."""

from __future__ import annotations

from dataclasses import dataclass

from ejkernel.kernels.xla._common.tiles import Steps
from ejkernel.types.arrays import size_of

# fewer rows do not fill the vector units, more gain nothing
SMALLEST, LARGEST = 16, 256


@dataclass(frozen=True)
class RowTile(Steps):
    """Rows of one step."""

    block_m: int


def row_tile(rows: int, groups: int) -> RowTile:
    """The largest power of two within the mean run of rows.

    A run of random length wastes half a tile, so half the work at worst; smaller tiles waste less
    but read every matrix more often.
    """
    mean = size_of(rows) // max(groups, 1)
    return RowTile(min(LARGEST, max(SMALLEST, 1 << max(mean, 1).bit_length() - 1)))

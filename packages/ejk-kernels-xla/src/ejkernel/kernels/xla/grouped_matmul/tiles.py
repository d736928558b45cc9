"""Rows per step of a grouped matmul."""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel.types.attention import field

# a product of fewer rows does not fill the vector units, of more gains nothing
SMALLEST, LARGEST = 16, 256


def row_tile(rows: int, groups: int, cfg: Any) -> int:
    """What ``cfg.block_m`` says, else the largest power of two within the mean run of rows.

    A run of random length wastes half a tile, so half the work at worst; smaller tiles waste less
    but read every matrix more often.
    """
    tile = field(cfg, "block_m")
    if tile is not None:
        if tile < 1:
            raise ValueError(f"block_m: must be at least 1, got {tile}")
        return int(tile)
    mean = rows // max(groups, 1)
    return min(LARGEST, max(SMALLEST, 1 << max(mean, 1).bit_length() - 1))


def heuristic(inv: Any) -> dict[str, Any]:
    """The config fields that suit a call."""
    return {"block_m": row_tile(inv.arguments["lhs"].shape[0], inv.arguments["rhs"].shape[0], None)}


def sample_inputs(inv: Any, rng: Any) -> tuple[tuple, dict[str, Any]]:
    """Groups of equal size. Everything else is drawn by the caller."""
    rows, sizes = inv.arguments["lhs"].shape[0], inv.arguments["group_sizes"].shape[0]
    ends = np.linspace(0, rows, sizes + 1).astype(np.int32)
    return (), {"group_sizes": np.diff(ends)}

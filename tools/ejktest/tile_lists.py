"""The content of tile lists on Hopper, and the order in which programs run."""

from __future__ import annotations

import numpy as np

from ejkernel.kernels.pallas.gpu.flash_attention.lists import COUNTS, EVERY, LIMIT, SOME


def of_queries(tiles: np.ndarray) -> np.ndarray:
    """Returns key blocks to visit for int8 tiles ``[.., rows, n]``, bits SOME and EVERY."""
    n = tiles.shape[-1]
    out = np.full((*tiles.shape[:-1], COUNTS + n), n, np.int32)
    for at in np.ndindex(tiles.shape[:-1]):
        row = tiles[at]
        full, partial = (np.flatnonzero(row == x) for x in (SOME + EVERY, SOME))
        out[at][:COUNTS] = len(full), max(len(full) + len(partial), 1)
        out[at][COUNTS : COUNTS + len(full) + len(partial)] = [*full, *partial]
    return out


def of_keys(tiles: np.ndarray) -> np.ndarray:
    """Returns query blocks to visit."""
    out = np.zeros((*tiles.shape[:-1], 1 + tiles.shape[-1]), np.int32)
    for at in np.ndindex(tiles.shape[:-1]):
        row = tiles[at]
        visits = np.flatnonzero(row)
        out[at][0] = len(visits)
        out[at][1 : 1 + len(visits)] = visits + np.where(row[visits] == SOME, LIMIT, 0)
    return out


def longest_first(lengths: np.ndarray, slots: np.ndarray | None) -> np.ndarray:
    """Returns tiles of lengths ``[groups, places]`` at their slots, a group's tiles by length."""
    groups, places = lengths.shape
    ordered = np.argsort(-lengths, axis=1, kind="stable") + np.arange(groups)[:, None] * places
    if slots is None:
        return ordered.reshape(-1)
    out = np.full(len(slots), -1)
    out[slots[: groups * places]] = ordered.reshape(-1)
    return out

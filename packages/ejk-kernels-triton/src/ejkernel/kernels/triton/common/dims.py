"""Head dims as the powers of two that Triton's tiles need."""

from __future__ import annotations

import functools


@functools.cache  # called about thirty times for one call's tiles
def split_dim(dim: int) -> tuple[int, int]:
    """Returns (main, tail): powers of two that cover ``dim`` columns; tail is 0 if one is enough.

    80 -> (64, 16), 96 -> (64, 32), 112 -> (64, 64), 192 -> (128, 64). MMAs need 16 columns.
    """
    main = max(16, 1 << (dim.bit_length() - 1))
    if dim <= main:
        return main, 0
    return main, max(16, 1 << (dim - main - 1).bit_length())


@functools.cache
def exact_dim(dim: int) -> bool:
    """Returns whether ``split_dim`` needs no padding."""
    return sum(split_dim(dim)) == dim

"""Buckets of lengths: calls whose lengths share a bucket share a config."""

from __future__ import annotations

import math
from collections.abc import Sequence

SMALLEST = 16


class Bucket(int):
    """A size that stands for its whole bucket: keys remember which axes have one."""


def bucket(n: int, smallest: int = SMALLEST) -> Bucket:
    """The next power of two that is at least ``n`` and at least ``smallest``."""
    return Bucket(smallest if n <= smallest else 1 << (int(n) - 1).bit_length())


def bucket_shape(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """``shape`` with the sizes of ``axes`` (negative counts from the end) replaced by buckets."""
    rank = len(shape)
    chosen = {axis % rank for axis in axes} if rank else set()
    return tuple(bucket(n) if i in chosen else int(n) for i, n in enumerate(shape))


def bucket_distance(a: Sequence[int], b: Sequence[int]) -> float:
    """How far two shapes lie apart: the sum of |log2| of the ratios of their sizes.

    Infinite for different ranks, and where one size is zero and the other is not.
    """
    if len(a) != len(b):
        return math.inf
    total = 0.0
    for m, n in zip(a, b, strict=True):
        if m == n:
            continue
        if m <= 0 or n <= 0:
            return math.inf
        total += abs(math.log2(m / n))
    return total

"""Buckets of lengths: calls whose lengths share a bucket share a config."""

from __future__ import annotations

from collections.abc import Sequence

from ejkernel.ops.utils.symbolic import is_symbolic

SMALLEST = 16


class Bucket(int):
    """A size that stands for its whole bucket: keys remember which axes have one."""


def bucket(n: int, smallest: int = SMALLEST) -> int:
    """The next power of two that is at least ``n`` and at least ``smallest``.

    A symbolic size has no bucket and stays what it is.
    """
    if is_symbolic(n):
        return n
    return Bucket(smallest if n <= smallest else 1 << (int(n) - 1).bit_length())


def bucket_shape(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """``shape`` with the sizes of ``axes`` (negative counts from the end) replaced by buckets."""
    rank = len(shape)
    chosen = {axis % rank for axis in axes} if rank else set()
    return tuple(bucket(n) if i in chosen else int(n) for i, n in enumerate(shape))

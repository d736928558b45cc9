"""Buckets of lengths: calls whose lengths share a bucket share a config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

SMALLEST = 16


class Bucket(int):
    """A size that stands for its whole bucket: keys remember which axes have one."""


def bucket(n: int) -> int:
    """The next power of two that is at least ``n`` and at least ``SMALLEST``.

    A symbolic size has no bucket and stays what it is.
    """
    if is_symbolic(n):
        return n
    return Bucket(SMALLEST if n <= SMALLEST else 1 << (int(n) - 1).bit_length())


def bucket_shape(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """``shape`` with the sizes of ``axes`` (negative counts from the end) replaced by buckets."""
    rank = len(shape)
    chosen = {axis % rank for axis in axes} if rank else set()
    return tuple(bucket(n) if i in chosen else int(n) for i, n in enumerate(shape))


LARGE = 8192
"""What heuristics take a symbolic size for."""


def is_symbolic(size: Any) -> bool:
    """Returns whether an axis size is an expression, not an integer."""
    return not isinstance(size, (int, np.integer))


def has_symbols(tree: Any) -> bool:
    """Returns whether some array of ``tree`` has a symbolic size."""
    import jax  # here, so that caches and configs work without loading JAX

    for leaf in jax.tree.leaves(tree):
        shape = getattr(leaf, "shape", ())
        if isinstance(shape, tuple):
            for n in shape:
                if type(n) is not int and is_symbolic(n):
                    return True
    return False


def with_numbers(tree: Any) -> Any:
    """``tree`` with abstract arrays whose symbolic sizes are ``LARGE``."""
    import jax

    def with_large_sizes(leaf: Any) -> Any:
        if not has_symbols([leaf]):
            return leaf
        shape = tuple(LARGE if is_symbolic(n) else n for n in leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(with_large_sizes, tree)

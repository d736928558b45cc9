"""Symbolic sizes, as ``jax.export`` has them: what a key says of them, and what heuristics see."""

from __future__ import annotations

from typing import Any

import numpy as np

LARGE = 8192
"""What heuristics take a symbolic size for."""


def is_symbolic(size: Any) -> bool:
    """Whether an axis size is an expression and no number."""
    return not isinstance(size, (int, np.integer))


def has_symbols(tree: Any) -> bool:
    """Whether some array of ``tree`` has a symbolic size."""
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

    def one(leaf: Any) -> Any:
        if not has_symbols([leaf]):
            return leaf
        shape = tuple(LARGE if is_symbolic(n) else n for n in leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(one, tree)

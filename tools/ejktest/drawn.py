"""Random arrays for the tests of every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def array(x: Any, dtype: Any = None) -> jax.Array:
    """``jnp.asarray``, which compiles a program for every shape: this compiles none."""
    x = np.asarray(x)
    return jax.device_put(x if dtype is None else x.astype(jnp.dtype(dtype)))


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    """Draws normal values, different for every shape."""
    return array(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


@partial(jax.jit, static_argnums=0)
def pulled(function: Callable[..., Any], smooth: tuple[Any, ...], *others: Any) -> Any:
    """Returns ``(out, gradients, cotangent)`` of ``function(*smooth, *others)``, all traced."""
    out, back = jax.vjp(lambda *smooth: function(*smooth, *others), *smooth)
    cotangent = normal(*out.shape, seed=3, dtype=out.dtype)
    return out, back(cotangent), cotangent


def wild_tables(
    rng: np.random.Generator, lens: Sequence[int], page_size: int
) -> tuple[np.ndarray, int]:
    """Returns tables with pages out of order and invalid entries, and the pages: three unused."""
    counts = [-(-n // page_size) for n in lens]
    pages = sum(counts) + 3
    order = rng.permutation(pages)
    tables = np.full((len(lens), max(1, *counts)), -1, np.int32)
    start = 0
    for row, n in zip(tables, counts, strict=True):
        row[:n] = order[start : start + n]
        start += n
    tables[tables < 0] = rng.choice([-1, 2**30, 2**31 - 1, -(2**31), pages], (tables < 0).sum())
    return tables, pages


def grow_tree(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ancestors ``[count, count]`` of each node of a random tree, itself included, and
    their depths. A node follows its parent, and there may be several roots."""
    ancestors, depths = np.eye(count, dtype=bool), np.zeros(count, np.int32)
    for node in range(1, count):
        parent = rng.integers(-1, node)  # -1: another root
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
            depths[node] = depths[parent] + 1
    return ancestors, depths

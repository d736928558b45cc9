"""Differences between the supported JAX versions, and nothing else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def varying_axes(x: Any) -> frozenset:
    """Mesh axes over which ``x`` varies inside a shard_map that tracks it; else empty."""
    aval = jax.typeof(x)
    for name in ("manual_axis_type", "mat"):
        kind = getattr(aval, name, None)
        if kind is not None:
            return kind.varying
    return getattr(aval, "vma", frozenset())


def vary(tree: Any, axes: frozenset) -> Any:
    """Every array of ``tree`` marked as varying over ``axes`` too; the values are unchanged."""
    if not axes:
        return tree

    def mark(x: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def vary_alike(tree: Any) -> Any:
    """The arrays of ``tree``, all marked as varying over every axis that one of them varies over.

    Inside shard_map JAX then sums the gradients of those that were replicated.
    """
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))
    return vary(jax.tree.map(jnp.asarray, tree), axes) if axes else tree


def zeros(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.Array:
    """Zeros that vary over the mesh axes over which ``like`` does, to start a loop with."""
    return vary(jnp.zeros(shape, dtype), varying_axes(like))

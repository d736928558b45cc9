"""Arrays inside a shard_map that tracks over which mesh axes they vary."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def varying_axes(*arrays: Any) -> frozenset:
    """Mesh axes over which one of ``arrays`` varies where shard_map tracks it; else empty."""
    kinds = (getattr(jax.typeof(x), "manual_axis_type", None) for x in arrays)
    return frozenset().union(*(kind.varying for kind in kinds if kind is not None))


def vary(tree: Any, axes: frozenset) -> Any:
    """Every array of ``tree`` marked as varying over ``axes`` too; the values are unchanged."""

    def mark(x: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(jnp.asarray(x), missing, to="varying") if missing else x

    return jax.tree.map(mark, tree) if axes else tree


def vary_alike(tree: Any, axes: frozenset = frozenset()) -> Any:
    """The arrays of ``tree``, varying over ``axes`` and over every axis that one of them does.

    Inside shard_map JAX then adds the gradients of replicated arrays over the devices.
    """
    return vary(tree, axes | varying_axes(*jax.tree.leaves(tree)))


def vary_like(tree: Any, like: Any) -> Any:
    """The arrays of ``tree``, varying over every axis that ``like`` does too."""
    return vary(tree, varying_axes(like))


def vary_over(tree: Any, axis: str) -> Any:
    """The arrays of ``tree``, varying alike and, where shard_map tracks it, over ``axis``."""
    return vary_alike(tree, varying_axes(jax.lax.axis_index(axis)))


def zeros(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.Array:
    """Zeros that vary over the mesh axes over which ``like`` does, to start a loop with."""
    return vary(jnp.zeros(shape, dtype), varying_axes(like))

"""Differences between the supported JAX versions, and nothing else."""

from __future__ import annotations

from typing import Any

import jax


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

"""Differences between versions of JAX, and what its public interface does not say."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def ambient_mesh() -> Any:
    """The mesh of ``jax.set_mesh`` or of ``with mesh:``, None without one."""
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        return abstract
    try:  # `with mesh:` is kept apart, and only the internal module tells without a warning
        from jax._src import mesh as internal

        physical = internal.thread_resources.env.physical_mesh
    except (ImportError, AttributeError):
        return None
    return None if physical.empty else physical


def is_explicit(mesh: Any) -> bool:
    """Whether arrays carry their sharding over this mesh in their type."""
    kinds = getattr(mesh, "axis_types", None) or ()
    return any(kind == jax.sharding.AxisType.Explicit for kind in kinds)


def placed(x: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    """The same values laid out over ``mesh`` by ``spec``."""
    sharding = NamedSharding(mesh, spec)
    if is_explicit(mesh):
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)

"""Differences between versions of JAX, and properties that its public interface lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel.ops import compat
from ejkernel.ops.varying import varying_axes


def ambient_mesh() -> Any:
    """The mesh of ``jax.set_mesh`` or of ``with mesh:``, None without one."""
    return next((mesh for mesh in compat.ambient_mesh() if not mesh.empty), None)


def explicit_axes(mesh: Any) -> tuple[str, ...]:
    """The axes of a mesh over which arrays carry their sharding in their type."""
    kinds = getattr(mesh, "axis_types", None) or ()
    explicit = jax.sharding.AxisType.Explicit
    return tuple(a for a, kind in zip(mesh.axis_names, kinds, strict=False) if kind == explicit)


def typed_sharding(x: Any) -> NamedSharding | None:
    """The sharding in the type of an array, None where its type has none."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def placed(x: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    """Returns the values sharded over ``mesh`` by ``spec``; of mixed axes, over explicit ones."""
    explicit = explicit_axes(mesh)
    if not explicit:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    if len(explicit) < len(mesh.axis_names):  # types name no automatic axis
        spec = _of_axes(spec, explicit)
    now = typed_sharding(x)
    if now is not None and not now.mesh.empty and _entries(now.spec) == _entries(spec):
        return x  # resharding would replicate it over the axes left to the compiler
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _of_axes(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    entries = [() if e is None else (e,) if isinstance(e, str) else e for e in spec]
    return PartitionSpec(*(tuple(axis for axis in e if axis in axes) or None for e in entries))


def _entries(spec: PartitionSpec) -> list[Any]:
    entries = [e[0] if isinstance(e, tuple) and len(e) == 1 else e or None for e in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return entries


def automatic_mesh(arrays: Any) -> Any:
    """The mesh that the type of one of the arrays names, if the compiler shards over all its axes.

    None without one.
    """
    for x in jax.tree.leaves(arrays):
        mesh = compat.mesh_of(x) if isinstance(x, jax.Array) else None
        if mesh is not None and not mesh.empty and not other_than_automatic(mesh):
            return mesh
    return None


def other_than_automatic(mesh: Any) -> bool:
    """Returns whether the compiler does not shard over some axis of a mesh."""
    return any(kind != jax.sharding.AxisType.Auto for kind in mesh.axis_types)


def over_axes(
    f: Callable[..., Any], mesh: Any, axes: tuple[str, ...], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """``f`` under ``shard_map`` over some axes of a mesh, compiled as a whole.

    Inside a shard_map of the caller that tracks over which axes arrays vary, this one does too.
    """

    def run(*args: Any) -> Any:
        tracked = bool(varying_axes(*jax.tree.leaves(args)))
        # none named means all of them: under vmap JAX then leaves out the one that is mapped
        names = set() if axes == tuple(mesh.axis_names) else set(axes)
        mapped = jax.shard_map(
            f,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=names,
            check_vma=tracked,
        )
        return jax.jit(mapped)(*args)

    return run

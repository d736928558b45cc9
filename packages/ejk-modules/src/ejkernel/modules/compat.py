"""Differences between versions of JAX, and properties that its public interface lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ejkernel.ops import compat
from ejkernel.ops.varying import varying_axes


def ambient_mesh() -> Any:
    """The mesh of ``jax.set_mesh`` or of ``with mesh:``, None without one."""
    return next((mesh for mesh in compat.ambient_mesh() if not mesh.empty), None)


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

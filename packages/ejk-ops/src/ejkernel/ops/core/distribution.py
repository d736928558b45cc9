"""Distribution of a kernel over a mesh by given partition specs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ejkernel.ops.compat import explicit_axes, placed
from ejkernel.ops.core.flat_tree import FlatTree


class LocalCall(Protocol):
    """The call of one shard, from its arguments.

    ``sequence_axes``: the mesh axes over which the sequence of the call is sharded.
    """

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sequence_axes: tuple[str, ...] = ()
    ) -> Any: ...


def check_mesh_and_specs(name: str, mesh: Any, in_specs: Any, out_specs: Any) -> None:
    """Raises ValueError for a mesh without specs, without devices or not in force; or none."""
    if mesh is not None and in_specs is None:
        raise ValueError(
            f"{name}: mesh was given without in_specs: expected one PartitionSpec per array "
            "argument, e.g. in_specs=(PartitionSpec('dp'), ...)"
        )
    if mesh is None and (in_specs is not None or out_specs is not None):
        argument = "in_specs" if in_specs is not None else "out_specs"
        raise ValueError(f"{name}: {argument} was given without mesh")
    if in_specs is None:
        return
    if not mesh.size:
        raise ValueError(f"{name}: mesh: expected one with devices, given {mesh!r}")
    in_force = jax.sharding.get_abstract_mesh()
    if not in_force.empty and mesh.abstract_mesh != in_force:
        raise ValueError(
            f"{name}: mesh: given {mesh!r}, expected the one in force, as by jax.set_mesh or a "
            f"shard_map around the call: jax.sharding.get_abstract_mesh(), which is {in_force}"
        )


def distribute_by_specs(
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    placement: tuple[Any, Any, Any],
    call: LocalCall,
) -> Any:
    """``call`` under ``jax.shard_map``; specs follow the array leaves, the rest is replicated."""
    check_mesh_and_specs(name, *placement)
    mesh, in_specs, out_specs = placement
    names = list(kwargs)  # flattening a dict would sort them
    tree = FlatTree.flatten((args, [kwargs[n] for n in names]))
    arrays = tree.arrays
    specs = [PartitionSpec() if spec is None else spec for spec in in_specs]
    if len(specs) > len(arrays):
        raise ValueError(
            f"{name}: in_specs has {len(specs)} entries, but the call has "
            f"{len(arrays)} array arguments"
        )
    specs += [PartitionSpec()] * (len(arrays) - len(specs))
    if out_specs is None:
        out_specs = specs[0] if specs else PartitionSpec()
    elif not isinstance(out_specs, PartitionSpec):
        out_specs = tuple(out_specs)

    if explicit_axes(mesh):  # there shard_map takes no array that is placed otherwise
        arrays = [placed(jnp.asarray(x), mesh, s) for x, s in zip(arrays, specs, strict=True)]

    def shard(*arrays: Any) -> Any:
        local_args, values = tree.with_arrays(arrays)
        return call(local_args, dict(zip(names, values, strict=True)))

    mapped = jax.shard_map(
        shard, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=False
    )
    return mapped(*arrays)

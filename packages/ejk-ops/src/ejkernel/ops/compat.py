"""The one place that knows differences between JAX versions and JAX's inner modules."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax._src import dispatch, distributed, mesh, sharding_impls
from jax.core import Tracer

__all__ = [
    "Coordination",
    "Tracer",
    "ambient_mesh",
    "coordination",
    "is_partitioned",
    "kernel_times",
    "mesh_of",
    "needs_devices",
    "on_mesh",
    "settings",
]

settings: Any = jax.config
"""``jax.config``, whose attributes no type checker knows."""


class Coordination(NamedTuple):
    """JAX's coordination service as this process sees it."""

    client: Any
    process_id: int
    num_processes: int


def coordination() -> Coordination | None:
    """The coordination service of a job of several processes, None in a job of one.

    ``jax.distributed`` offers no public handle to its key-value store. Starts no backend.
    """
    state = distributed.global_state
    count = state.num_processes or 1
    if count < 2:
        return None
    return Coordination(state.client, int(state.process_id or 0), int(count))


def ambient_mesh() -> tuple[Any, Any]:
    """The meshes in force here: of ``jax.set_mesh``, and of ``with mesh:``, which is older."""
    return mesh.get_abstract_mesh(), mesh.thread_resources.env.physical_mesh


def mesh_of(x: Any) -> Any:
    """The mesh that the type of an array names, empty or None without one."""
    return getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)


def on_mesh(aval: Any, mesh: Any) -> Any:
    """The type of an array on ``mesh``, sharded as the compiler likes."""
    if mesh is None or not aval.sharding.mesh.empty:
        return aval
    spec = jax.sharding.PartitionSpec(*[None] * len(aval.shape))
    return aval.update(sharding=jax.sharding.NamedSharding(mesh, spec))


def needs_devices(primitive: Any) -> None:
    """Lets JAX lower programs with ``primitive`` for the devices that they run on."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def is_partitioned(context: Any) -> bool:
    """Returns whether the compiler partitions the program that is being lowered.

    Not where it is for one device, inside a ``shard_map`` over the whole mesh, nor where it is
    exported, as the devices are then unknown.
    """
    where = context.module_context.axis_context
    if isinstance(where, sharding_impls.SPMDAxisContext):
        return set(where.manual_axes) != set(where.mesh.axis_names)
    if isinstance(where, sharding_impls.ShardingContext):
        return where.num_devices > 1 and where.device_assignment is not None
    return False


def kernel_times(compiled: Any, arguments: Any, calls: int, *, detach: bool = True) -> list[float]:
    """Milliseconds that the GPU kernels of each of ``calls`` calls took together, by CUPTI.

    JAX's profiler for its own Mosaic kernels counts the kernels of any compiled program.
    ``detach``: take CUPTI out of the process afterwards.

    Raises:
        ImportError, RuntimeError, AttributeError: this JAX or this machine offers no CUPTI.
    """
    from jax.experimental.mosaic.gpu import profiler

    cupti = profiler.Cupti(finalize=detach)
    _, times = cupti.measure(compiled, iterations=calls)(*arguments)
    if times is None:
        return []
    return list(times) if isinstance(times, (list, tuple)) else [times]

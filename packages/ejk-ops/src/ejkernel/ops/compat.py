"""The one place that knows differences between JAX versions and JAX's inner modules."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import core, dispatch, distributed, mesh, sharding_impls
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

__all__ = [
    "Coordination",
    "Tracer",
    "ambient_mesh",
    "coordination",
    "device_tiles",
    "explicit_axes",
    "finds_partitioned_programs",
    "is_partitioned",
    "kernel_times",
    "mapped_mesh_axes",
    "mesh_of",
    "needs_devices",
    "on_mesh",
    "over_automatic_axes",
    "placed",
    "settings",
    "trace_settings",
    "typed_sharding",
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


def mapped_mesh_axes() -> tuple[str, ...]:
    """The mesh axes over which a ``vmap`` around the caller shards, by its ``spmd_axis_name``."""
    names = core.get_axis_env().spmd_axis_names
    return tuple(names) if names else ()


def mesh_of(x: Any) -> Any:
    """The mesh that the type of an array names, empty or None without one."""
    return getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)


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


def on_mesh(aval: Any, mesh: Any) -> Any:
    """The type of an array on ``mesh``, sharded as the compiler likes."""
    if mesh is None or not aval.sharding.mesh.empty:
        return aval
    spec = PartitionSpec(*[None] * len(aval.shape))
    return aval.update(sharding=NamedSharding(mesh, spec))


def needs_devices(primitive: Any) -> None:
    """Lets JAX lower programs with ``primitive`` for the devices that they run on."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def is_partitioned(context: Any) -> bool:
    """Returns whether the compiler partitions the program that is being lowered.

    False for one device, for TPUs, inside a ``shard_map`` over the full mesh, for arrays on several
    meshes, and for export, as the devices are then unknown.
    """
    module = context.module_context
    if module.lowering_parameters.for_export or "tpu" in module.platforms:
        return False  # libtpu has no custom partitioning
    where = module.axis_context
    if isinstance(where, sharding_impls.SPMDAxisContext):
        return set(where.manual_axes) != set(where.mesh.axis_names)
    if isinstance(where, sharding_impls.ShardingContext):
        return where.num_devices > 1 and where.abstract_mesh is not None
    return False


def over_automatic_axes(context: Any) -> tuple[Any, Any]:
    """The context of a lowering as if the program had no axes but those the compiler shards over.

    Inside a ``shard_map`` over some axes of a mesh XLA asks about one of its groups of devices.

    Returns:
        The context, and the full mesh where it has more axes, else None.
    """
    module = context.module_context
    where = module.axis_context
    if not isinstance(where, sharding_impls.SPMDAxisContext):
        return context, None
    sizes = dict(where.mesh.shape)
    # the order of devices matters to XLA, which of them they are does not
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    full = jax.sharding.Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))
    names = tuple(name for name in sizes if name not in where.manual_axes)
    group = tuple(devices[: math.prod(sizes[name] for name in names)])
    mesh = jax.sharding.AbstractMesh(tuple(sizes[name] for name in names), names)
    outside = sharding_impls.ShardingContext(len(group), group, mesh)
    return context.replace(module_context=module.replace(axis_context=outside)), full


def device_tiles(x: Any) -> np.ndarray:
    """Returns the indices of the devices that have each tile of an array, by its sharding.

    One axis for each axis of the array, and one for the devices of a tile.
    """
    rank = len(x.shape)
    sharding = None if x.sharding is None else x.sharding._to_xla_hlo_sharding(rank)
    if sharding is None or not sharding.is_tiled():
        return np.zeros((1,) * (rank + 1), int)
    sizes = sharding.tile_assignment_dimensions()
    return np.reshape(sharding.tile_assignment_devices(), (*sizes[:rank], -1))


def trace_settings() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Gives a context with JAX's settings of this moment, for a trace in another thread."""
    values = (
        (jax.enable_x64, settings.jax_enable_x64),
        (jax.default_matmul_precision, settings.jax_default_matmul_precision),
        (jax.numpy_rank_promotion, settings.jax_numpy_rank_promotion),
        (jax.numpy_dtype_promotion, settings.jax_numpy_dtype_promotion),
    )

    @contextlib.contextmanager
    def same() -> Generator[None]:
        with contextlib.ExitStack() as stack:
            for setting, value in values:
                stack.enter_context(setting(value))
            yield

    return same


def finds_partitioned_programs() -> bool:
    """Returns whether JAX's cache on disk knows programs with our partitioning by their texts."""
    return bool(settings.jax_remove_custom_partitioning_ptr_from_cache_key)


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

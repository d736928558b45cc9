"""The one place that knows differences between JAX versions and JAX's inner modules."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax._src import distributed, mesh
from jax.core import Tracer

__all__ = ["Coordination", "Tracer", "ambient_mesh", "coordination", "kernel_times", "settings"]

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

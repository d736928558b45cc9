"""The one place that knows differences between JAX versions and JAX's inner modules."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax._src import distributed, mesh
from jax.core import Tracer

__all__ = [
    "INLINE",
    "Coordination",
    "Tracer",
    "ambient_mesh",
    "coordination",
    "kernel_times",
    "settings",
    "vary",
    "vary_alike",
    "varying_axes",
]

# What ``jax.jit(inline=...)`` needs so that a surrounding trace sees the operations themselves:
# since 0.12 plain True leaves the inlining to the compiler.
INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True

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
    return vary(tree, frozenset().union(*map(varying_axes, jax.tree.leaves(tree))))

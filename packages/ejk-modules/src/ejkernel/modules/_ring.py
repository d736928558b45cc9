"""Where ring_attention runs: inside a shard_map of the caller, or inside one of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ejkernel.modules._distribute import distribute
from ejkernel.modules._explicit import explicit_mesh
from ejkernel.modules.compat import ambient_mesh, explicit_axes
from ejkernel.types.calls.ring_attention import axis_is_bound, check_ring_lengths

if TYPE_CHECKING:
    from ejkernel.modules._op import Operation

Arguments = dict[str, Any]
asking: ContextVar[bool] = ContextVar("ejkernel_ring_asking", default=False)
"""Whether a call is only asked about, so that arrays without a mesh stand for one device's."""
THREE_WAYS = (
    "call it inside shard_map where the axis is bound, pass mesh=, or enter a mesh "
    "(with mesh: or jax.set_mesh)"
)


def run(
    op: Operation,
    a: Arguments,
    mesh: Any,
    in_specs: Any,
    out_specs: Any,
    call: Callable[[tuple, dict[str, Any]], Any],
) -> Any:
    """Local arrays go straight to the kernel, global ones through a shard_map over the ring.

    Raises:
        ValueError: neither a bound axis nor a mesh, or both.
    """
    axis = a["axis_name"]
    if axis_is_bound(axis):
        given = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise ValueError(
                f"{extra[0]}: given where axis_name {axis!r} is already bound, expected None"
            )
        return call((), a)
    typed = explicit_mesh(a) if mesh is in_specs is out_specs is None else None
    if typed is not None and axis in explicit_axes(typed):
        check_ring_lengths(a, typed.shape[axis], whole_keys=1)
        return distribute(op, a, None, None, None, call, ring_axis=axis)
    if mesh is None:
        mesh = ambient_mesh()
    if asking.get() and (mesh is None or axis not in mesh.shape):
        return call((), a)
    if mesh is None or axis not in mesh.shape:
        where = "no mesh is given" if mesh is None else f"the mesh has {', '.join(mesh.shape)}"
        raise ValueError(
            f"axis_name: {axis!r} is not bound here and {where}; expected one of: {THREE_WAYS}"
        )
    check_ring_lengths(a, mesh.shape[axis], whole_keys=1)
    specs = in_specs
    if specs is None:
        from jax.sharding import PartitionSpec

        specs = (PartitionSpec(None, axis, None, None),) * 3
    return distribute(op, a, mesh, specs, out_specs, call, ring_axis=axis)

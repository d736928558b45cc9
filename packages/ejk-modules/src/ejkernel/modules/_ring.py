"""Where ring_attention runs: inside a shard_map of the caller, or inside one of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax

from ejkernel.modules._distribute import distribute
from ejkernel.modules.compat import ambient_mesh, axis_is_bound
from ejkernel.types import combine_masks
from ejkernel.types.calls.settle.errors import invalid

if TYPE_CHECKING:
    from ejkernel.modules._op import Operation

Arguments = dict[str, Any]
asking: ContextVar[bool] = ContextVar("ejkernel_ring_asking", default=False)
"""Whether a call is only asked about, so that arrays without a mesh stand for one device's."""
LAYOUTS = ("contiguous", "zigzag")
THREE_WAYS = (
    "call it inside shard_map where the axis is bound, pass mesh=, or enter a mesh "
    "(with mesh: or jax.set_mesh)"
)


def check_layout(a: Arguments) -> None:
    """A known layout, and lengths that fit it where the arrays are one device's."""
    if a["layout"] not in LAYOUTS:
        raise ValueError(f"layout: given {a['layout']!r}, expected one of {', '.join(LAYOUTS)}")
    if axis_is_bound(a["axis_name"]):
        _check_lengths(a, 1, whole_keys=jax.lax.axis_size(a["axis_name"]))


def masks(a: Arguments) -> None:
    """Segment ids of keys default to those of queries; array masks fit their arrays."""
    q_ids, kv_ids = a["q_segment_ids"], a["kv_segment_ids"]
    query, key = a["query"], a["key"]
    if q_ids is None and kv_ids is not None:
        raise ValueError("kv_segment_ids: given without q_segment_ids, expected both or neither")
    if q_ids is not None and kv_ids is None:
        if query.shape[1] != key.shape[1]:
            raise invalid("kv_segment_ids", "an array, since q_len and kv_len differ", kv_ids)
        a["kv_segment_ids"] = q_ids
    if a["mask_info"] is None or axis_is_bound(a["axis_name"]):
        return
    a["mask_info"] = combine_masks(
        a["mask_info"],
        q_len=query.shape[1],
        kv_len=key.shape[1],
        batch=query.shape[0],
        heads=query.shape[2],
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
    if mesh is None:
        mesh = ambient_mesh()
    if asking.get() and (mesh is None or axis not in mesh.shape):
        return call((), a)
    if mesh is None or axis not in mesh.shape:
        where = "no mesh is given" if mesh is None else f"the mesh has {', '.join(mesh.shape)}"
        raise ValueError(
            f"axis_name: {axis!r} is not bound here and {where}; expected one of: {THREE_WAYS}"
        )
    _check_lengths(a, mesh.shape[axis], whole_keys=1)
    specs = in_specs
    if specs is None:
        from jax.sharding import PartitionSpec

        specs = (PartitionSpec(None, axis, None, None),) * 3
    return distribute(op, a, mesh, specs, out_specs, call, ring_axis=axis)


def _check_lengths(a: Arguments, devices: int, *, whole_keys: int) -> None:
    """Lengths divide over the ring; the key axis of a bias is whole."""
    step = devices * (2 if a["layout"] == "zigzag" else 1)
    for name in ("query", "key"):
        if a[name].shape[1] % step:
            why = f"the {devices} devices of axis {a['axis_name']!r}"
            if a["layout"] == "zigzag":
                why = f"two chunks on each of {why}" if devices > 1 else "the two chunks of zigzag"
            raise invalid(name, f"a length divisible by {step}, for {why}", a[name])
    keys = a["key"].shape[1] * whole_keys
    if a["bias"] is not None and a["bias"].shape[-1] != keys:
        raise invalid("bias", f"all {keys} keys on its last axis", a["bias"])

"""Fingerprints of shardings: what of an array's layout over a mesh may change a compiled kernel."""

from __future__ import annotations

from typing import Any

import jax


def sharding_fingerprint(array: Any) -> str | None:
    """Mesh axis sizes and partition of an array, e.g. ``"mesh(x=2,y=4)spec(x,-,y+z)"``.

    Args:
        array: a jax or numpy array, a tracer, or a ShapeDtypeStruct.

    Returns:
        None for numpy arrays and for arrays that every device holds whole. Device ids never
        enter, so equal layouts on different hosts have equal fingerprints.
    """
    sharding = getattr(array, "sharding", None)
    if sharding is None:  # a tracer keeps it in its type
        sharding = getattr(getattr(array, "aval", None), "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding):
        return None
    if isinstance(sharding, jax.sharding.NamedSharding):
        return _named(sharding)
    if sharding.is_fully_replicated or sharding.num_devices == 1:
        return None
    local = sharding.shard_shape(tuple(array.shape))
    return f"{type(sharding).__name__}(devices={sharding.num_devices})shard{tuple(local)}"


def _named(sharding: jax.sharding.NamedSharding) -> str | None:
    sizes = dict(sharding.mesh.shape)
    entries = []
    for entry in sharding.spec:
        names = entry if isinstance(entry, tuple) else (entry,)
        # an axis of size one, or one left to the compiler, does not split anything
        entries.append([n for n in names if isinstance(n, str) and sizes.get(n, 1) > 1])
    while entries and not entries[-1]:
        entries.pop()
    if not entries:
        return None
    mesh = ",".join(f"{name}={size}" for name, size in sizes.items())
    return f"mesh({mesh})spec({','.join('+'.join(names) or '-' for names in entries)})"

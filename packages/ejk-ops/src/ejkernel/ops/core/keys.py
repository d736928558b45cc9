"""Cache keys: equal for calls that share a configuration.

A key reads ``<kernel>.v<version>@<device fingerprint>#<32 hex digits>``. The digits hash everything
that may change the compiled kernel: requested platform, structure of the arguments, and for every
array its (bucketed) shape, its dtype and its sharding. Values of arrays and of floats never enter.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.core.route import Route
from ejkernel.ops.utils.buckets import Bucket, is_symbolic

SCHEMA = 1
"""Enters every key: raised when the meaning of a key changes."""

DIGITS = 32


ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
"""Types that enter as shape and dtype: jax and numpy arrays, tracers, abstract arrays."""
_PLAIN = (type(None), bool, int, float, str)


def is_array(x: object) -> bool:
    """Returns whether ``x`` enters as shape and dtype."""
    return isinstance(x, ARRAYS)


def has_gradient(x: Any) -> bool:
    """Returns whether ``x`` is an array with a gradient: one of floats, but not of 8-bit ones."""
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact) and np.dtype(x.dtype).itemsize > 1


def _type_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _describe(x: Any) -> Any:
    """A static value as JSON that is the same in every process."""
    if isinstance(x, enum.Enum):
        return {"enum": f"{_type_name(type(x))}.{x.name}"}
    if x is None or isinstance(x, (bool, str, int)):
        return x
    if isinstance(x, (float, complex)):
        return {"number": type(x).__name__}
    if isinstance(x, (tuple, list)):
        return [_describe(v) for v in x]
    if isinstance(x, Mapping):
        return {"map": sorted(([_describe(k), _describe(v)] for k, v in x.items()), key=str)}
    if isinstance(x, (set, frozenset)):
        return {"set": sorted((_describe(v) for v in x), key=str)}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = {f.name: _describe(getattr(x, f.name)) for f in dataclasses.fields(x)}
        return {"data": _type_name(type(x)), "fields": fields}
    return _describe_object(x)


def _describe_object(x: Any) -> Any:
    if isinstance(x, (type, np.dtype)) or hasattr(x, "dtype"):
        try:
            return {"dtype": np.dtype(x).name}
        except (TypeError, ValueError):
            pass
    if callable(x):
        name = getattr(x, "__qualname__", None) or getattr(x, "__name__", None)
        if name:
            return {"callable": f"{getattr(x, '__module__', '')}.{name}"}
    text = repr(x)
    # an address would make the key differ from process to process
    return {"object": _type_name(type(x)), "repr": None if " at 0x" in text else text}


def _describe_array(x: Any, shape: Any) -> Any:
    dtype = x.dtype
    if isinstance(x, (np.ndarray, np.generic)):  # as JAX will see it
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return {
        "shape": [int(n) if isinstance(n, int) or not is_symbolic(n) else str(n) for n in shape],
        "dtype": str(dtype),
        "sharding": sharding_fingerprint(x),
        "free": [axis for axis, n in enumerate(shape) if isinstance(n, Bucket)],
    }


def _describe_tree(x: Any, array: Callable[[Any], Any]) -> Any:
    """A pytree, level by level in flattening order: structure, static fields, arrays."""
    if is_array(x):
        return array(x)
    node = None if x is None else jax.tree_util.default_registry.flatten_one_level(x)
    if node is None:
        return _describe(x)
    children, static = node
    described = [_describe_tree(child, array) for child in children]
    if isinstance(x, (tuple, list)) and not hasattr(x, "_fields"):
        return described
    return {"node": _type_name(type(x)), "children": described, "static": _describe(static)}


def leaf_names(argument: str, value: Any) -> list[str]:
    """Names of the arrays in an argument, e.g. ``query`` or ``mask_info.q_segment_ids``."""
    paths = jax.tree_util.tree_flatten_with_path(value)[0]
    return [argument + jax.tree_util.keystr(path) for path, leaf in paths if is_array(leaf)]


def _describe_argument(name: str, value: Any, buckets: Mapping[str, Any]) -> Any:
    if isinstance(value, ARRAYS):
        return _describe_array(value, buckets.get(name, value.shape))
    if type(value) in _PLAIN:
        return _describe(value)
    names = iter(leaf_names(name, value))
    return _describe_tree(value, lambda x: _describe_array(x, buckets.get(next(names), x.shape)))


def key_payload(
    kernel: str,
    version: int,
    arguments: Mapping[str, Any],
    buckets: Mapping[str, Any],
    route: Route,
    device: str,
) -> dict[str, Any]:
    """Everything that the key of a call hashes, as JSON; also what shipped tables match on.

    Args:
        kernel, version: name and version of the kernel.
        arguments: its arguments by name.
        buckets: shapes that the key holds instead of exact ones, by the names of arrays.
        route: where it is asked to run.
        device: fingerprint of the device that it is meant for.
    """
    payload: dict[str, Any] = {
        "schema": SCHEMA,
        "kernel": kernel,
        "version": version,
        "device": device,
        "platform": "auto" if route.platform is None else route.platform.value,
        "arguments": {
            name: _describe_argument(name, value, buckets) for name, value in arguments.items()
        },
    }
    if route.batch_invariant:
        payload["batch_invariant"] = True
    if route.mesh_axes:
        payload["mesh"] = [[name, size] for name, size in route.mesh_axes]
        payload["specs"] = [str(route.in_specs), str(route.out_specs)]
    return payload


def payload_key(payload: Mapping[str, Any]) -> str:
    """The key of a payload."""
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
    return f"{payload['kernel']}.v{payload['version']}@{payload['device']}#{digest}"


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

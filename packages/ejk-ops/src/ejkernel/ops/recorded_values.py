"""Values of recorded calls as JSON: shapes, dtypes, shardings and static arguments.

Classes are looked up among those that ``utils.allowed`` has, and nothing is imported for a file.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ejkernel.ops.core.keys import is_array
from ejkernel.ops.platforms import Backend, Platform
from ejkernel.ops.utils.allowed import allow_in_files, allowed_class, class_name


def expect(holds: bool, field: str, value: Any) -> None:
    """ValueError about the ``value`` of a field unless it ``holds``."""
    if not holds:
        raise ValueError(f"{field} cannot be {value!r:.80}")


def expect_text(x: Any) -> str:
    """Returns ``x``; ValueError unless it is a string."""
    expect(isinstance(x, str), "a name", x)
    return x


def encode_value(x: Any) -> Any:
    """Returns a value as JSON; other types become an object with one key that names the type."""
    if is_array(x):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return {"key": list(x.shape)}
        sharding = getattr(x, "sharding", None)
        placed = [] if sharding is None else [_encode_sharding(sharding)]
        return {"array": [str(np.dtype(x.dtype)), list(x.shape), *placed]}
    if isinstance(x, enum.Enum):
        return {"enum": [class_name(type(x)), x.name]}
    if x is None or isinstance(x, (bool, int, str)):
        return x
    if isinstance(x, float):
        return x if math.isfinite(x) else {"float": str(x)}
    if isinstance(x, PartitionSpec):
        return {"spec": _encode_spec(x)}
    if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        return {type(x).__name__: [encode_value(v) for v in x]}
    if isinstance(x, Mapping):
        return {"map": [[encode_value(k), encode_value(v)] for k, v in x.items()]}
    if isinstance(x, (type, np.dtype)):
        return {"dtype": np.dtype(x).name}
    node = jax.tree_util.default_registry.flatten_one_level(x)
    if node is not None:
        children, static = node
        inner = [encode_value(child) for child in children]
        return {"node": [class_name(type(x)), encode_value(static), inner]}
    if dataclasses.is_dataclass(x):
        fields = {f.name: encode_value(getattr(x, f.name)) for f in dataclasses.fields(x)}
        return {"data": [class_name(type(x)), fields]}
    raise TypeError(f"{type(x).__qualname__} {x!r} has no JSON form")


def encode_mesh(mesh: Any) -> list[list[Any]]:
    """``[name, size, type]`` of every axis; which devices there are no key depends on."""
    types = [axis_type.name for axis_type in mesh.axis_types]
    return [list(axis) for axis in zip(mesh.axis_names, mesh.axis_sizes, types, strict=True)]


def _encode_sharding(sharding: Any) -> list[Any]:
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"an array has a sharding without JSON form: {sharding!r:.80}")
    return [encode_mesh(sharding.mesh), _encode_spec(sharding.spec)]


def _encode_spec(spec: PartitionSpec) -> list[Any]:
    entries = [list(entry) if isinstance(entry, tuple) else entry for entry in spec]
    for name in _names(entries):
        if not isinstance(name, str):
            raise TypeError(f"{spec!r} has no JSON form")
    return entries


def _names(entries: Iterable[Any]) -> list[Any]:
    """The mesh axes of a spec in JSON."""
    names: list[Any] = []
    for entry in entries:
        names += entry if isinstance(entry, list) else [] if entry is None else [entry]
    return names


def decode_value(x: Any) -> Any:
    """Returns the value that ``encode_value`` wrote; ValueError for any other JSON."""
    if not isinstance(x, dict):
        expect(x is None or isinstance(x, (bool, int, float, str)), "a value", x)
        return x
    expect(len(x) == 1 and next(iter(x)) in _DECODERS, "a value", x)
    ((kind, value),) = x.items()
    return _DECODERS[kind](value)


def _pair(value: Any) -> tuple[Any, Any]:
    expect(isinstance(value, list) and len(value) == 2, "a pair", value)
    return value[0], value[1]


def _entries(value: Any) -> list[Any]:
    expect(isinstance(value, list), "a list", value)
    return value


def _shape(value: Any) -> tuple[int, ...]:
    for size in _entries(value):
        expect(type(size) is int and size >= 0, "a size", size)
    return tuple(value)


def _dtype(value: Any) -> np.dtype:
    dtype = np.dtype(jax.numpy.dtype(expect_text(value)))
    number = jax.numpy.issubdtype(dtype, np.number) or dtype == np.bool_
    expect(number and dtype.name == value, "a dtype", value)  # no fields, strings or objects
    return dtype


def _decode_array(value: Any) -> jax.ShapeDtypeStruct:
    expect(isinstance(value, list) and len(value) in (2, 3), "an array", value)
    dtype, shape, *placed = value
    sharding = _decode_sharding(placed[0]) if placed else None
    return jax.ShapeDtypeStruct(_shape(shape), _dtype(dtype), sharding=sharding)


def _decode_sharding(value: Any) -> NamedSharding:
    mesh, spec = _pair(value)
    return NamedSharding(decode_mesh(mesh), _decode_spec(spec))


def decode_mesh(value: Any) -> AbstractMesh:
    axes = [_entries(axis) for axis in _entries(value)]
    expect(all(len(axis) == 3 for axis in axes), "a mesh", value)
    sizes = _shape([size for _, size, _ in axes])
    types = tuple(AxisType[expect_text(kind)] for _, _, kind in axes)
    return AbstractMesh(sizes, tuple(expect_text(name) for name, _, _ in axes), types)


def _decode_spec(value: Any) -> PartitionSpec:
    for name in _names(_entries(value)):
        expect_text(name)
    return PartitionSpec(*(tuple(x) if isinstance(x, list) else x for x in value))


def _decode_key(shape: Any) -> jax.ShapeDtypeStruct:
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.ShapeDtypeStruct(_shape(shape), key.dtype)


def _decode_enum(value: Any) -> enum.Enum:
    name, member = _pair(value)
    members = allowed_class(name, enum.Enum).__members__
    expect(isinstance(member, str) and member in members, f"a member of {name}", member)
    return members[member]


def _decode_node(value: Any) -> Any:
    expect(isinstance(value, list) and len(value) == 3, "a pytree node", value)
    name, static, children = value
    cls = allowed_class(name, object)
    inner = [decode_value(child) for child in _entries(children)]
    leaves: list[Any] = []
    structures = []
    for child in inner:
        flat, structure = jax.tree_util.tree_flatten(child)
        leaves += flat
        structures.append(structure)
    structure = jax.tree_util.PyTreeDef.from_node_data_and_children(
        jax.tree_util.default_registry, (cls, decode_value(static)), structures
    )
    return jax.tree_util.tree_unflatten(structure, leaves)


def _decode_data(value: Any) -> Any:
    name, fields = _pair(value)
    cls = allowed_class(name, object)
    expect(dataclasses.is_dataclass(cls) and isinstance(fields, dict), "a record", value)
    return cls(**{k: decode_value(v) for k, v in fields.items()})


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "array": _decode_array,
    "key": _decode_key,
    "enum": _decode_enum,
    "float": lambda v: float(expect_text(v)),
    "list": lambda v: [decode_value(x) for x in _entries(v)],
    "tuple": lambda v: tuple(decode_value(x) for x in _entries(v)),
    "map": lambda v: {decode_value(k): decode_value(x) for k, x in map(_pair, _entries(v))},
    "dtype": _dtype,
    "spec": _decode_spec,
    "node": _decode_node,
    "data": _decode_data,
}

for _type in (jax.lax.Precision, jax.lax.DotAlgorithmPreset, Platform, Backend):
    allow_in_files(_type)

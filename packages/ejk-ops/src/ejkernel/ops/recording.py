"""Recorded calls in a file, and the calls behind the stamps of a lowered program.

Both give invocations that ``autotune_recorded`` tunes without running the program again. The file
is JSON: shapes, dtypes, shardings and static arguments of every call, no values of arrays. Classes
in it are looked up among those that ``utils.allowed`` has; a call that names another is left out.
Keys are computed from the calls: a file cannot have one call tuned in the name of another.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ejkernel.ops import registry
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.keys import is_array
from ejkernel.ops.core.route import Route, specs_key
from ejkernel.ops.errors import warn_once
from ejkernel.ops.platforms import Backend, Platform
from ejkernel.ops.utils.allowed import UnknownClass, allow_in_files, allowed_class, class_name
from ejkernel.ops.utils.files import parse_json, read_text, write_output
from ejkernel.ops.utils.labels import find_labels_in_lowered, key_digits, stamped_calls

SCHEMA = 2
KIND = "ejkernel invocations"


def save_invocations(
    path: str | os.PathLike[str], invocations: Iterable[Invocation] | None = None
) -> int:
    """Write calls to a file, replacing it.

    Args:
        path: the file; its folder must exist.
        invocations: None = those recorded so far (``EJKERNEL_OPS_RECORD=1``).

    Returns:
        How many were written. A call whose static arguments have no JSON form (a callable, say)
        is left out with a warning.
    """
    calls = []
    for inv in registry.get_invocations() if invocations is None else invocations:
        try:
            calls.append(_encode_call(inv))
        except (TypeError, ValueError) as error:
            warn_once(
                ("save", inv.kernel.name), f"a call of {inv.kernel.name} is left out: {error}"
            )
    lines = ",\n  ".join(json.dumps(call) for call in calls)
    text = f'{{"schema": {SCHEMA}, "kind": {json.dumps(KIND)}, "calls": [\n  {lines}\n]}}\n'
    write_output(path, text)
    return len(calls)


def load_invocations(path: str | os.PathLike[str]) -> list[Invocation]:
    """The calls of a file that ``save_invocations`` wrote, as calls on the device at hand.

    Nothing is imported for the file, and no object is made whose class was not declared: a kernel
    is declared by its definition, other types by ``allow_in_files``. A call that names anything
    else, whose kernel has another version now, or that the kernel refuses, is left out with a
    warning.

    Raises:
        OSError: unreadable.
        ValueError: not such a file, or one that a newer version wrote.
    """
    try:
        content = parse_json(read_text(path))
        kind, schema, calls = content["kind"], content["schema"], content["calls"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no recorded calls: {error!r}") from None
    if kind != KIND or schema != SCHEMA or not isinstance(calls, list):
        raise ValueError(f"{path} holds {kind!r} of schema {schema!r}, expected {KIND!r}, {SCHEMA}")
    invocations = []
    for call in calls:
        try:
            invocations.append(_decode_call(call).bound)
        except Exception as error:  # whatever the classes raise for values that are none of theirs
            name = call.get("key") if isinstance(call, dict) else None
            told = f"{path}: a call is left out: {name!r}: {_reason(error)}"
            warn_once(("load", told), told)
    return invocations


def invocations_in_lowered(lowered: Any, known: Iterable[Invocation] = ()) -> list[Invocation]:
    """The calls behind the stamps of a lowered or compiled program, one per key, in order.

    Needs ``EJKERNEL_OPS_STAMP`` (hash or json) while the program is traced. This process knows
    what it stamped; of another process's program the hash stamps are looked up among ``known``
    and the recorded calls. Stamps with unknown calls are left out.

    Args:
        lowered: a ``jax.stages.Lowered`` or ``Compiled``.
        known: calls to look among, e.g. ``load_invocations(path)``.
    """
    by_digits = {key_digits(i.key): i for i in (*registry.get_invocations(), *known)}
    invocations: dict[str, Invocation] = {}
    for label in find_labels_in_lowered(lowered):
        calls = stamped_calls(label)
        if not calls and "#" in label:
            other = by_digits.get(label.rpartition("#")[2])
            calls = [] if other is None else [other]
        for inv in calls:
            invocations.setdefault(inv.key, inv)
    return list(invocations.values())


# ---- one call ----------------------------------------------------------------------------------


def _encode_call(inv: Invocation) -> dict[str, Any]:
    """A call as it was made, before it is bound, so that its key can be computed again."""
    kernel, route, made = inv.kernel, inv.route, inv.bound.made
    call = {
        "kernel": {
            "class": class_name(type(kernel)),
            "name": kernel.name,
            "version": kernel.version,
        },
        "key": made.key,
        "info": {
            **({} if route.platform is None else {"requested_platform": route.platform.value}),
            **({} if route.backend is None else {"requested_backend": route.backend}),
        },
        "mesh": None if route.mesh is None else _encode_mesh(route.mesh),
        "specs": [_encode(route.in_specs), _encode(route.out_specs)],
        "args": [_encode(x) for x in made.abstract_args],
        "kwargs": {k: _encode(x) for k, x in made.abstract_kwargs.items()},
    }
    try:
        payload = _decode_call(call).payload
    except UnknownClass:  # the process that reads may know it
        return call
    if {**payload, "device": None} != {**made.payload, "device": None}:
        raise TypeError("its key depends on what a file cannot hold")
    return call


def _decode_call(call: Any) -> Invocation:
    _expect(isinstance(call, dict), "a call", call)
    lists = ("args", "specs")
    parts = {name: call[name] for name in ("kernel", "info", "kwargs", *lists)}
    for name, value in parts.items():
        kind = list if name in lists else dict
        _expect(isinstance(value, kind), f"{name!r} of a call", value)
    kernel = _kernel(parts["kernel"])
    mesh = None if call["mesh"] is None else _decode_mesh(call["mesh"])
    specs = [specs_key(_decode(x)) for x in parts["specs"]]
    _expect(len(specs) == 2, "the specs of a call", specs)
    platform, backend = (parts["info"].get(f"requested_{name}") for name in ("platform", "backend"))
    route = Route(
        None if platform is None else Platform(_text(platform)),
        None if backend is None else Backend(_text(backend)).value,
        mesh,
        *specs,
    )
    args = tuple(_decode(x) for x in parts["args"])
    kwargs = {k: _decode(x) for k, x in parts["kwargs"].items()}
    return Invocation(kernel, args, kwargs, route=route)


def _kernel(described: Mapping[str, Any]) -> Any:
    cls = allowed_class(described["class"], Kernel)
    shared: Callable[[], Any] | None = getattr(cls, "shared", None)
    kernel = cls() if shared is None else shared()
    if (kernel.name, kernel.version) != (described["name"], described["version"]):
        raise ValueError(
            f"kernel {described['name']!r} version {described['version']!r} is now "
            f"{kernel.name} version {kernel.version}"
        )
    return kernel


def _reason(error: Exception) -> str:
    text = f"lacks {error}" if type(error) is KeyError else str(error)
    return text or type(error).__name__


def _expect(holds: bool, field: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"{field} cannot be {value!r:.80}")


def _text(x: Any) -> str:
    _expect(isinstance(x, str), "a name", x)
    return x


# ---- one value ---------------------------------------------------------------------------------


def _encode(x: Any) -> Any:
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
        return {type(x).__name__: [_encode(v) for v in x]}
    if isinstance(x, Mapping):
        return {"map": [[_encode(k), _encode(v)] for k, v in x.items()]}
    if isinstance(x, (type, np.dtype)):
        return {"dtype": np.dtype(x).name}
    node = jax.tree_util.default_registry.flatten_one_level(x)
    if node is not None:
        children, static = node
        inner = [_encode(child) for child in children]
        return {"node": [class_name(type(x)), _encode(static), inner]}
    if dataclasses.is_dataclass(x):
        fields = {f.name: _encode(getattr(x, f.name)) for f in dataclasses.fields(x)}
        return {"data": [class_name(type(x)), fields]}
    raise TypeError(f"{type(x).__qualname__} {x!r} has no JSON form")


def _encode_mesh(mesh: Any) -> list[list[Any]]:
    """``[name, size, type]`` of every axis; which devices there are no key depends on."""
    types = [axis_type.name for axis_type in mesh.axis_types]
    return [list(axis) for axis in zip(mesh.axis_names, mesh.axis_sizes, types, strict=True)]


def _encode_sharding(sharding: Any) -> list[Any]:
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"an array has a sharding without JSON form: {sharding!r:.80}")
    return [_encode_mesh(sharding.mesh), _encode_spec(sharding.spec)]


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


def _decode(x: Any) -> Any:
    if not isinstance(x, dict):
        _expect(x is None or isinstance(x, (bool, int, float, str)), "a value", x)
        return x
    _expect(len(x) == 1 and next(iter(x)) in _DECODERS, "a value", x)
    ((kind, value),) = x.items()
    return _DECODERS[kind](value)


def _pair(value: Any) -> tuple[Any, Any]:
    _expect(isinstance(value, list) and len(value) == 2, "a pair", value)
    return value[0], value[1]


def _entries(value: Any) -> list[Any]:
    _expect(isinstance(value, list), "a list", value)
    return value


def _shape(value: Any) -> tuple[int, ...]:
    for size in _entries(value):
        _expect(type(size) is int and size >= 0, "a size", size)
    return tuple(value)


def _dtype(value: Any) -> np.dtype:
    dtype = np.dtype(jax.numpy.dtype(_text(value)))
    number = jax.numpy.issubdtype(dtype, np.number) or dtype == np.bool_
    _expect(number and dtype.name == value, "a dtype", value)  # no fields, strings or objects
    return dtype


def _decode_array(value: Any) -> jax.ShapeDtypeStruct:
    _expect(isinstance(value, list) and len(value) in (2, 3), "an array", value)
    dtype, shape, *placed = value
    sharding = _decode_sharding(placed[0]) if placed else None
    return jax.ShapeDtypeStruct(_shape(shape), _dtype(dtype), sharding=sharding)


def _decode_sharding(value: Any) -> NamedSharding:
    mesh, spec = _pair(value)
    return NamedSharding(_decode_mesh(mesh), _decode_spec(spec))


def _decode_mesh(value: Any) -> AbstractMesh:
    axes = [_entries(axis) for axis in _entries(value)]
    _expect(all(len(axis) == 3 for axis in axes), "a mesh", value)
    sizes = _shape([size for _, size, _ in axes])
    types = tuple(AxisType[_text(kind)] for _, _, kind in axes)
    return AbstractMesh(sizes, tuple(_text(name) for name, _, _ in axes), types)


def _decode_spec(value: Any) -> PartitionSpec:
    for name in _names(_entries(value)):
        _text(name)
    return PartitionSpec(*(tuple(x) if isinstance(x, list) else x for x in value))


def _decode_key(shape: Any) -> jax.ShapeDtypeStruct:
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.ShapeDtypeStruct(_shape(shape), key.dtype)


def _decode_enum(value: Any) -> enum.Enum:
    name, member = _pair(value)
    members = allowed_class(name, enum.Enum).__members__
    _expect(isinstance(member, str) and member in members, f"a member of {name}", member)
    return members[member]


def _decode_node(value: Any) -> Any:
    _expect(isinstance(value, list) and len(value) == 3, "a pytree node", value)
    name, static, children = value
    cls = allowed_class(name, object)
    inner = [_decode(child) for child in _entries(children)]
    leaves: list[Any] = []
    structures = []
    for child in inner:
        flat, structure = jax.tree_util.tree_flatten(child)
        leaves += flat
        structures.append(structure)
    structure = jax.tree_util.PyTreeDef.from_node_data_and_children(
        jax.tree_util.default_registry, (cls, _decode(static)), structures
    )
    return jax.tree_util.tree_unflatten(structure, leaves)


def _decode_data(value: Any) -> Any:
    name, fields = _pair(value)
    cls = allowed_class(name, object)
    _expect(dataclasses.is_dataclass(cls) and isinstance(fields, dict), "a record", value)
    return cls(**{k: _decode(v) for k, v in fields.items()})


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "array": _decode_array,
    "key": _decode_key,
    "enum": _decode_enum,
    "float": lambda v: float(_text(v)),
    "list": lambda v: [_decode(x) for x in _entries(v)],
    "tuple": lambda v: tuple(_decode(x) for x in _entries(v)),
    "map": lambda v: {_decode(k): _decode(x) for k, x in map(_pair, _entries(v))},
    "dtype": _dtype,
    "spec": _decode_spec,
    "node": _decode_node,
    "data": _decode_data,
}

for _type in (jax.lax.Precision, jax.lax.DotAlgorithmPreset, Platform, Backend):
    allow_in_files(_type)

"""Recorded calls in a file, and the calls behind the stamps of a lowered program.

Both give invocations that ``autotune_recorded`` tunes without running the program again. The file
is JSON: shapes, dtypes and static arguments of every call, no values of arrays. Classes in it are
looked up among those declared to ``utils.known``; a call that names another is left out.
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

from ejkernel.ops import registry
from ejkernel.ops.core.abstract import bind_abstract
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.keys import is_array, payload_key
from ejkernel.ops.errors import warn_once
from ejkernel.ops.platforms import Backend, Platform
from ejkernel.ops.utils.device import device_fingerprint
from ejkernel.ops.utils.files import parse_json, read_text, write_output
from ejkernel.ops.utils.known import allow_in_files, class_name, known_class
from ejkernel.ops.utils.labels import find_labels_in_lowered, key_digits, stamped_calls

SCHEMA = 1
KIND = "ejkernel invocations"

_INFO = ("requested_platform", "requested_backend")


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
        except TypeError as error:
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
    else, whose kernel has another version now, or that is no call, is left out with a warning.

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
    found = []
    for call in calls:
        try:
            found.append(_decode_call(call))
        except Exception as error:  # whatever the classes raise for values that are none of theirs
            name = call.get("key") if isinstance(call, dict) else None
            told = f"{path}: a call is left out: {name!r}: {_reason(error)}"
            warn_once(("load", told), told)
    return found


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
    found: dict[str, Invocation] = {}
    for label in find_labels_in_lowered(lowered):
        calls = stamped_calls(label)
        if not calls and "#" in label:
            other = by_digits.get(label.rpartition("#")[2])
            calls = [] if other is None else [other]
        for inv in calls:
            found.setdefault(inv.key, inv)
    return list(found.values())


# ---- one call ----------------------------------------------------------------------------------


def _encode_call(inv: Invocation) -> dict[str, Any]:
    bound = bind_abstract(inv)
    kernel = bound.kernel
    return {
        "kernel": {
            "class": class_name(type(kernel)),
            "name": kernel.name,
            "version": kernel.version,
        },
        "key": bound.key,
        "payload": dict(bound.payload),
        "info": {k: bound.info[k] for k in _INFO if bound.info.get(k) is not None},
        "args": [_encode(x) for x in bound.abstract_args],
        "kwargs": {k: _encode(x) for k, x in bound.abstract_kwargs.items()},
    }


def _decode_call(call: Any) -> Invocation:
    _expect(isinstance(call, dict), "a call", call)
    parts = {name: call[name] for name in ("kernel", "payload", "info", "args", "kwargs")}
    for name, value in parts.items():
        kind = list if name == "args" else dict
        _expect(isinstance(value, kind), f"{name!r} of a call", value)
    kernel = _kernel(parts["kernel"])
    payload = {**parts["payload"], "device": device_fingerprint()}
    info = {k: _text(v) for k, v in parts["info"].items() if k in _INFO}
    return Invocation(
        kernel,
        tuple(_decode(x) for x in parts["args"]),
        {k: _decode(x) for k, x in parts["kwargs"].items()},
        info={
            **info,
            "bound": True,
            "prepared": True,
            "payload": payload,
            "key": payload_key(payload),
        },
    )


def _kernel(described: Mapping[str, Any]) -> Any:
    cls = known_class(described["class"], Kernel)
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


def _expect(holds: bool, what: str, given: Any) -> None:
    if not holds:
        raise ValueError(f"{what} cannot be {given!r:.80}")


def _text(x: Any) -> str:
    _expect(isinstance(x, str), "a name", x)
    return x


# ---- one value ---------------------------------------------------------------------------------


def _encode(x: Any) -> Any:
    """A value as JSON; what is no plain JSON value is an object with one telling key."""
    if is_array(x):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return {"key": list(x.shape)}
        return {"array": [str(np.dtype(x.dtype)), list(x.shape)]}
    if isinstance(x, enum.Enum):
        return {"enum": [class_name(type(x)), x.name]}
    if x is None or isinstance(x, (bool, int, str)):
        return x
    if isinstance(x, float):
        return x if math.isfinite(x) else {"float": str(x)}
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
    _expect(dtype.name == value, "a dtype", value)  # none with fields, strings or objects
    return dtype


def _decode_array(value: Any) -> jax.ShapeDtypeStruct:
    dtype, shape = _pair(value)
    return jax.ShapeDtypeStruct(_shape(shape), _dtype(dtype))


def _decode_key(shape: Any) -> jax.ShapeDtypeStruct:
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.ShapeDtypeStruct(_shape(shape), key.dtype)


def _decode_enum(value: Any) -> enum.Enum:
    name, member = _pair(value)
    members = known_class(name, enum.Enum).__members__
    _expect(isinstance(member, str) and member in members, f"a member of {name}", member)
    return members[member]


def _decode_node(value: Any) -> Any:
    _expect(isinstance(value, list) and len(value) == 3, "a pytree node", value)
    name, static, children = value
    cls = known_class(name, object)
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
    cls = known_class(name, object)
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
    "node": _decode_node,
    "data": _decode_data,
}

for _type in (jax.lax.Precision, jax.lax.DotAlgorithmPreset, Platform, Backend):
    allow_in_files(_type)

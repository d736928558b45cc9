"""Recorded calls in a file, and the calls behind the stamps of a lowered program.

Both give invocations that ``autotune_recorded`` tunes without running the program again. The file
is JSON: shapes, dtypes and static arguments of every call, no values of arrays.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ejkernel.ops import registry
from ejkernel.ops.core.abstract import bind_abstract
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.keys import is_array, payload_key
from ejkernel.ops.errors import warn_once
from ejkernel.ops.utils.device import device_fingerprint
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
    temporary = Path(path).with_name(f".{Path(path).name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    return len(calls)


def load_invocations(path: str | os.PathLike[str]) -> list[Invocation]:
    """The calls of a file that ``save_invocations`` wrote, as calls on the device at hand.

    Kernels of ``ejkernel`` are imported; other kernels must be imported already. A call whose
    kernel is not known, or has another version now, is left out with a warning.

    Raises:
        OSError: unreadable.
        ValueError: not such a file, or one that a newer version wrote.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        kind, schema, calls = content["kind"], content["schema"], content["calls"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no recorded calls: {error!r}") from None
    if kind != KIND or schema != SCHEMA:
        raise ValueError(f"{path} holds {kind!r} of schema {schema!r}, expected {KIND!r}, {SCHEMA}")
    found = []
    for call in calls:
        try:
            found.append(_decode_call(call))
        except (LookupError, TypeError, ValueError) as error:
            name = call.get("key", "") if isinstance(call, dict) else ""
            told = f"{path}: a call is left out: {name}: {error}"
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
        "kernel": {"class": _name(type(kernel)), "name": kernel.name, "version": kernel.version},
        "key": bound.key,
        "payload": dict(bound.payload),
        "info": {k: bound.info[k] for k in _INFO if bound.info.get(k) is not None},
        "args": [_encode(x) for x in bound.abstract_args],
        "kwargs": {k: _encode(x) for k, x in bound.abstract_kwargs.items()},
    }


def _decode_call(call: Mapping[str, Any]) -> Invocation:
    kernel = _kernel(call["kernel"])
    payload = {**call["payload"], "device": device_fingerprint()}
    info = {**call["info"], "bound": True, "prepared": True}
    return Invocation(
        kernel,
        tuple(_decode(x) for x in call["args"]),
        {k: _decode(x) for k, x in call["kwargs"].items()},
        info={**info, "payload": payload, "key": payload_key(payload)},
    )


def _kernel(described: Mapping[str, Any]) -> Any:
    cls = _class(described["class"])
    shared: Callable[[], Any] | None = getattr(cls, "shared", None)
    kernel = cls() if shared is None else shared()
    if (kernel.name, kernel.version) != (described["name"], described["version"]):
        raise ValueError(
            f"kernel {described['name']} version {described['version']} is now "
            f"{kernel.name} version {kernel.version}"
        )
    return kernel


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _class(name: str) -> type:
    """A class by name: of ejkernel, or of a module that is imported. A file imports no other."""
    module, _, qualified = name.partition(":")
    if module.partition(".")[0] == "ejkernel":
        importlib.import_module(module)
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise LookupError(f"class {name} is not known to this process")
    return found


# ---- one value ---------------------------------------------------------------------------------


def _encode(x: Any) -> Any:
    """A value as JSON; what is no plain JSON value is an object with one telling key."""
    if is_array(x):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return {"key": list(x.shape)}
        return {"array": [str(np.dtype(x.dtype)), list(x.shape)]}
    if isinstance(x, enum.Enum):
        return {"enum": [_name(type(x)), x.name]}
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
        return {"node": [_name(type(x)), _encode(static), inner]}
    if dataclasses.is_dataclass(x):
        fields = {f.name: _encode(getattr(x, f.name)) for f in dataclasses.fields(x)}
        return {"data": [_name(type(x)), fields]}
    raise TypeError(f"{type(x).__qualname__} {x!r} has no JSON form")


def _decode(x: Any) -> Any:
    if not isinstance(x, dict):
        return x
    ((kind, value),) = x.items()
    return _DECODERS[kind](value)


def _decode_key(shape: list[int]) -> Any:
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.ShapeDtypeStruct(tuple(shape), key.dtype)


def _decode_node(value: list[Any]) -> Any:
    name, static, children = value
    cls = _class(name)
    inner = [_decode(child) for child in children]
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


def _decode_data(value: list[Any]) -> Any:
    name, fields = value
    return _class(name)(**{k: _decode(v) for k, v in fields.items()})


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "array": lambda v: jax.ShapeDtypeStruct(tuple(v[1]), np.dtype(jax.numpy.dtype(v[0]))),
    "key": _decode_key,
    "enum": lambda v: getattr(_class(v[0]), v[1]),
    "float": float,
    "list": lambda v: [_decode(x) for x in v],
    "tuple": lambda v: tuple(_decode(x) for x in v),
    "map": lambda v: {_decode(k): _decode(x) for k, x in v},
    "dtype": jax.numpy.dtype,
    "node": _decode_node,
    "data": _decode_data,
}

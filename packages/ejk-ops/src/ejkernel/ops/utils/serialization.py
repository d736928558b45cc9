"""JSON of configs and keys: the same text for equal values, in every process.

``to_json`` keeps the order of fields for people, ``stable_json`` sorts keys for hashing.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def _is_dtype_class(obj: Any) -> bool:
    """np.float32, and jnp.float32, which is a class that stands for its dtype."""
    return isinstance(obj, type) and (
        issubclass(obj, np.generic) or isinstance(getattr(obj, "dtype", None), np.dtype)
    )


def to_plain(obj: Any) -> Any:
    """``obj`` as JSON values: dataclasses and mappings become objects, tuples arrays.

    Raises:
        TypeError: ``obj`` holds something without a JSON form.
    """
    if obj is None or (isinstance(obj, (bool, str)) and not isinstance(obj, enum.Enum)):
        return obj
    if isinstance(obj, enum.Enum):
        return to_plain(obj.value)
    if isinstance(obj, (int, float)):
        return obj
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {f.name: to_plain(getattr(obj, f.name)) for f in dataclasses.fields(obj) if f.init}
    if isinstance(obj, np.dtype):
        return obj.name
    if isinstance(obj, np.generic):
        return to_plain(obj.item())
    if _is_dtype_class(obj):
        return np.dtype(obj).name
    if isinstance(obj, Mapping):
        for key in obj:
            if not isinstance(key, str):
                raise TypeError(f"keys of a mapping must be strings to become JSON, got {key!r}")
        return {str(k): to_plain(v) for k, v in obj.items()}
    if isinstance(obj, (set, frozenset)):
        return sorted((to_plain(v) for v in obj), key=_dump_stable)
    if isinstance(obj, Sequence) and not isinstance(obj, (bytes, bytearray)):
        return [to_plain(v) for v in obj]
    raise TypeError(f"cannot turn {obj!r} of class {type(obj).__qualname__} into JSON")


def _dump_stable(plain: Any) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def to_json(obj: Any) -> str:
    """JSON text of ``obj``, fields in their declared order. Inverse: ``from_json``.

    Understands dataclasses (nested), enums (by value), mappings with string keys, sequences,
    sets, dtypes (by name), numpy scalars, int, float, strings and None; else TypeError.
    """
    return json.dumps(to_plain(obj))


def stable_json(obj: Any) -> str:
    """JSON text with sorted keys and no spaces: equal objects give equal text in every process."""
    return _dump_stable(to_plain(obj))


def short_hash(obj: Any, n: int = 16) -> str:
    """First ``n`` hex digits (at most 64) of the SHA-256 of ``stable_json(obj)``."""
    return hashlib.sha256(stable_json(obj).encode()).hexdigest()[:n]


def from_json(s: str, cls: type[T]) -> T:
    """The object of class ``cls`` that ``to_json`` wrote as ``s``.

    Type hints of dataclass fields say what to build: nested dataclasses, enums, tuples, dtypes,
    optional values. A field that is missing in ``s`` takes its default.

    Raises:
        ValueError: not JSON, an unknown field, a missing field without default, or a value that
            does not fit its hint.
    """
    try:
        plain = json.loads(s)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    return from_plain(plain, cls)


def from_plain(plain: Any, cls: type[T]) -> T:
    """Returns the object of JSON values; ``from_json`` without the text."""
    return _build(plain, cls, getattr(cls, "__name__", str(cls)))


def _build(plain: Any, hint: Any, path: str) -> Any:
    if hint is Any or hint is dataclasses.MISSING:
        return plain
    if hint is None or hint is type(None):
        return _expect(plain is None, plain, "null", path)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _build(plain, args[0], path)
    if origin is typing.Literal:
        return _expect(plain in args, plain, f"one of {args}", path)
    if origin in (typing.Union, types.UnionType):
        return _build_union(plain, args, path)
    base = origin or hint
    if not isinstance(base, type):
        return plain
    if dataclasses.is_dataclass(base):
        return _build_dataclass(plain, base, path)
    if issubclass(base, enum.Enum):
        try:
            return base(plain)
        except ValueError:
            for member in base:
                if to_plain(member) == plain:  # a value that is a tuple, or a dtype
                    return member
            legal = ", ".join(str(m.value) for m in base)
            raise ValueError(f"{path}={plain!r}: expected one of {legal}") from None
    if issubclass(base, np.dtype):
        return _dtype(plain, path)
    if issubclass(base, tuple):
        return _build_tuple(plain, base, args, path)
    if issubclass(base, (list, set, frozenset)):
        _expect(isinstance(plain, list), plain, "an array", path)
        item = args[0] if args else Any
        return base(_build(v, item, f"{path}[{i}]") for i, v in enumerate(plain))
    if isinstance(plain, list) and base is not object and issubclass(tuple, base):
        # ``Sequence[int]`` and its like
        return _build_tuple(plain, tuple, (args[0], Ellipsis) if args else (), path)
    if issubclass(base, Mapping):
        _expect(isinstance(plain, dict), plain, "an object", path)
        item = args[1] if len(args) == 2 else Any
        return {k: _build(v, item, f"{path}[{k!r}]") for k, v in plain.items()}
    if base is bool:
        return _expect(isinstance(plain, bool), plain, "a boolean", path)
    if base is int:
        return _expect(type(plain) is int, plain, "an integer", path)
    if base is float:
        return float(_expect(type(plain) in (int, float), plain, "a number", path))
    if base is str:
        return _expect(isinstance(plain, str), plain, "a string", path)
    return plain


def _expect(ok: bool, plain: Any, expected: str, path: str) -> Any:
    if not ok:
        raise ValueError(f"{path}={plain!r}: expected {expected}")
    return plain


def _dtype(plain: Any, path: str) -> np.dtype:
    _expect(isinstance(plain, str), plain, "the name of a dtype", path)
    import jax.numpy as jnp  # knows bfloat16 and float8 names, numpy alone does not

    try:
        return jnp.dtype(plain)
    except TypeError:
        raise ValueError(f"{path}={plain!r}: expected the name of a dtype") from None


def _build_union(plain: Any, members: tuple[Any, ...], path: str) -> Any:
    if plain is None and type(None) in members:
        return None
    reasons = []
    # a dtype is written by its name, which a member ``str`` would keep as text
    for member in sorted(members, key=lambda m: not (isinstance(m, type) and m is np.dtype)):
        if member is type(None):
            continue
        try:
            return _build(plain, member, path)
        except (ValueError, TypeError) as error:
            reasons.append(error)
    if len(reasons) == 1:
        raise reasons[0]
    raise ValueError(f"{path}={plain!r} fits none of {members}: {'; '.join(map(str, reasons))}")


def _build_tuple(plain: Any, base: Any, args: tuple[Any, ...], path: str) -> tuple:
    _expect(isinstance(plain, list), plain, "an array", path)
    if hasattr(base, "_fields"):  # a NamedTuple
        names = _hints(base)
        fields = zip(base._fields, plain, strict=True)
        return base(*(_build(v, names.get(n, Any), f"{path}.{n}") for n, v in fields))
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_build(v, args[0], f"{path}[{i}]") for i, v in enumerate(plain))
    if args:
        _expect(len(args) == len(plain), plain, f"{len(args)} entries", path)
        pairs = zip(plain, args, strict=True)
        return tuple(_build(v, hint, f"{path}[{i}]") for i, (v, hint) in enumerate(pairs))
    return _deep_tuple(plain)


def _deep_tuple(plain: Any) -> Any:
    return tuple(_deep_tuple(v) for v in plain) if isinstance(plain, list) else plain


def _build_dataclass(plain: Any, cls: Any, path: str) -> Any:
    _expect(isinstance(plain, dict), plain, f"an object with the fields of {path}", path)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    unknown = sorted(set(plain) - set(fields))
    if unknown:
        raise ValueError(f"{path} has no field {', '.join(unknown)}: expected {', '.join(fields)}")
    required = [
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in required if name not in plain]
    if missing:
        raise ValueError(f"{path} needs the field {', '.join(missing)}")
    hints = _hints(cls)
    values = {}
    for name, value in plain.items():
        hint = hints.get(name, dataclasses.MISSING)
        if value is None and fields[name].default is None:  # ``tile: int = None`` means optional
            hint = Any
        if hint in (dataclasses.MISSING, Any, object, type):
            hint = _hint_of_default(fields[name])
        values[name] = _build(value, hint, f"{path}.{name}")
    return cls(**values)


def _hint_of_default(field: dataclasses.Field) -> Any:
    """Returns the type of a field without a usable hint, judged by its default."""
    default = field.default
    if isinstance(default, (enum.Enum, tuple, np.dtype)) or dataclasses.is_dataclass(default):
        return type(default)
    if _is_dtype_class(default):
        return np.dtype | str
    return Any


def _hints(cls: Any) -> dict[str, Any]:
    """Type hints field by field: one that cannot be resolved does not spoil the others."""
    try:
        return typing.get_type_hints(cls, include_extras=False)
    except (NameError, TypeError, AttributeError, SyntaxError):
        pass
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        names = vars(sys.modules.get(base.__module__, types.ModuleType("none")))
        for name, hint in inspect.get_annotations(base).items():
            try:
                hints[name] = eval(hint, dict(names)) if isinstance(hint, str) else hint
            except Exception:
                hints[name] = dataclasses.MISSING
    return hints


def abstractify(tree: Any) -> Any:
    """``tree`` with arrays and tracers replaced by ``jax.ShapeDtypeStruct``; the rest verbatim.

    Shape, dtype, weak type, and the sharding of arrays that have one over a mesh, are kept.
    """
    import jax  # here, so that caches and configs work without loading JAX

    def abstract(leaf: Any) -> Any:  # arrays of other libraries stay what they are
        if isinstance(leaf, jax.ShapeDtypeStruct) or not (
            isinstance(leaf, (jax.Array, np.ndarray, np.generic))
            or (hasattr(leaf, "shape") and _has_numpy_dtype(leaf))
        ):
            return leaf
        aval = leaf.aval if isinstance(leaf, jax.Array) else None
        sharding = getattr(leaf, "sharding", None) or getattr(aval, "sharding", None)
        if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh.empty:
            sharding = None
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False)
        )

    return jax.tree.map(abstract, tree)


def _has_numpy_dtype(x: Any) -> bool:
    try:
        np.dtype(x.dtype)
    except (AttributeError, TypeError):
        return False
    return True

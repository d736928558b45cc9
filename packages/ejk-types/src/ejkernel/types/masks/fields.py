"""The stored form of a mask: named fields, validation, and the pytree protocol."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

import jax.tree_util as jtu
from jax import export

from ejkernel.types.arrays import concrete_values, int_array, is_array, mask_array, static_int
from ejkernel.types.errors import describe, invalid
from ejkernel.types.masks.rules import MAX_DISTANCE, Rule, window_tuple

ARRAYS = ("attention_mask", "q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")
RULE = ("causal", "causal_offset", "sliding_window", "chunk_size")
AXES = ("batch_axis_name", "qheads_axis_name", "kvheads_axis_name", "sequence_axis_name")

AxisName = str | tuple[str, ...] | None
M = TypeVar("M", bound="MaskFields")
P = ParamSpec("P")


class Lengths(NamedTuple):
    """Axis sizes that the arrays of a mask imply; None = no array knows."""

    batch: int | None
    heads: int | None
    q: int | None
    kv: int | None


def _axis_name(value: Any, name: str) -> AxisName:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(v, str) for v in value):
        return tuple(value)
    raise invalid(name, "an axis name, a tuple of axis names or None", value)


def _flag(value: Any, name: str) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid(name, "a Python bool", value)


def _dense(value: Any, name: str) -> Any:
    axes = "[#batch, #heads, q_len, kv_len]"
    return None if value is None else mask_array(value, name, axes, (4,))


def _tokens(value: Any, name: str) -> Any:
    axes = f"[#batch, {'q_len' if name.startswith('q_') else 'kv_len'}]"
    return None if value is None else int_array(value, name, axes, (2,))


def _offset(value: Any, name: str) -> int:
    value = 0 if value is None else value
    return static_int(value, name, low=-MAX_DISTANCE, high=MAX_DISTANCE)


def _chunk(value: Any, name: str) -> int | None:
    return None if value is None else static_int(value, name, low=1)


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "attention_mask": _dense,
    "q_segment_ids": _tokens,
    "kv_segment_ids": _tokens,
    "q_positions": _tokens,
    "kv_positions": _tokens,
    "causal": _flag,
    "causal_offset": _offset,
    "sliding_window": window_tuple,
    "chunk_size": _chunk,
    **dict.fromkeys(AXES, _axis_name),
}


def _check_names(owner: str, names: Iterable[str]) -> None:
    for name in names:
        if name not in _CHECKS:
            containing = [field for field in _CHECKS if name in field]
            similar = difflib.get_close_matches(name, _CHECKS, 1) or containing
            closest = f", closest: {similar[0]}" if similar else ""
            legal = ", ".join(_CHECKS)
            raise TypeError(f"{owner}: unknown field {name!r}{closest}; fields: {legal}")


def _by_name(init: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """Lets errors about the arguments of ``__init__`` name the class of the mask and its fields."""

    @functools.wraps(init)
    def checked(self: Any, *values: P.args, **fields: P.kwargs) -> None:
        class_name = type(self).__name__
        if len(values) > 0:
            raise TypeError(f"{class_name}: fields are given by name; fields: {', '.join(_CHECKS)}")
        _check_names(class_name, fields)
        init(self, *values, **fields)

    return checked


def checked_rule(causal: Any, causal_offset: Any, sliding_window: Any, chunk_size: Any) -> Rule:
    """The rule of these arguments, each checked; one that hides nothing is ``Rule()``."""
    rule = Rule(
        _flag(causal, "causal"),
        _offset(causal_offset, "causal_offset"),
        window_tuple(sliding_window),
        _chunk(chunk_size, "chunk_size"),
    )
    return Rule() if rule.trivial else rule


def _checked(fields: dict[str, Any]) -> dict[str, Any]:
    """Each field checked and converted; one array given for q and kv stays one object."""
    new = {name: _CHECKS[name](value, name) for name, value in fields.items()}
    for q, kv in (("q_segment_ids", "kv_segment_ids"), ("q_positions", "kv_positions")):
        if fields.get(q) is not None and fields.get(q) is fields.get(kv):
            new[kv] = new[q]
    return new


def _check_fields(mask: Any) -> None:
    if (mask.q_segment_ids is None) != (mask.kv_segment_ids is None):
        present, absent = "q_segment_ids", "kv_segment_ids"
        if mask.q_segment_ids is None:
            present, absent = absent, present
        raise ValueError(f"{absent}: must be given together with {present}, got None")
    check_sizes(mask, None, None, None)


def _same(a: Any, b: Any) -> bool:
    if a is b or not (is_array(a) and is_array(b)):
        return a is b or (isinstance(a, tuple) and a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = concrete_values(a), concrete_values(b)
    return a is not None and b is not None and bool((a == b).all())


class MaskFields:
    """Fields of one mask and of the masks it is joined with; immutable."""

    # _broadcast: a dense axis of size 1 stands for the whole axis. _and: masks joined by AND,
    # each without joined masks of its own.
    __slots__ = (*ARRAYS, *RULE, *AXES, "_and", "_broadcast")

    @_by_name
    def __init__(
        self,
        *,
        attention_mask: Any = None,
        q_segment_ids: Any = None,
        kv_segment_ids: Any = None,
        q_positions: Any = None,
        kv_positions: Any = None,
        causal: bool = False,
        causal_offset: int = 0,
        sliding_window: int | tuple[int, int] | None = None,
        chunk_size: int | None = None,
        batch_axis_name: AxisName = ("dp", "fsdp"),
        qheads_axis_name: AxisName = "tp",
        kvheads_axis_name: AxisName = "tp",
        sequence_axis_name: AxisName = "sp",
    ) -> None:
        fields = {name: value for name, value in locals().items() if name in _CHECKS}
        self._store(_checked(fields) | {"_and": (), "_broadcast": False})
        _check_fields(self)

    def _store(self, fields: dict[str, Any]) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: use replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: use replace({name}=None)")

    def __repr__(self) -> str:
        fields = []
        for name in (*ARRAYS, *RULE):
            value = getattr(self, name)
            if value is None or (name in RULE and not value):
                continue
            fields.append(f"{name}={describe(value) if name in ARRAYS else value}")
        joined = "".join(f" & {term!r}" for term in self._and)
        return f"{type(self).__name__}({', '.join(fields)}){joined}"

    def __reduce__(self):
        children, static = flatten(self)
        return unflatten, (type(self), static, tuple(children))

    def __eq__(self, other: object) -> bool:
        """Equal fields; arrays by their values where they are known, else by identity."""
        if self is other:
            return True
        if not isinstance(other, MaskFields) or type(self) is not type(other):
            return NotImplemented
        (mine, static), (theirs, other_static) = flatten(self), flatten(other)
        return static == other_static and all(map(_same, mine, theirs))

    def __hash__(self) -> int:
        children, static = flatten(self)
        shapes = tuple(getattr(x, "shape", None) for x in children[:-1])
        return hash((static, shapes, children[-1]))

    def replace(self, **fields: Any) -> Self:
        """A copy with other field values; None clears a field. Validated like the constructor.

        Masks joined with ``&`` that could not be merged into the fields are kept.
        """
        _check_names(f"{type(self).__name__}.replace", fields)
        checked = _checked(fields)
        if "attention_mask" in fields:
            checked["_broadcast"] = False
        new = with_private(self, **checked)
        _check_fields(new)
        return new

    @property
    def terms(self) -> tuple[Self, ...]:
        """The masks whose AND this mask is; each consists of its fields alone."""
        if not self._and:
            return (self,)
        return (with_private(self, _and=()), *self._and)

    @property
    def rule(self) -> Rule:
        """The static rule of this mask alone, without joined masks."""
        return Rule(self.causal, self.causal_offset, self.sliding_window, self.chunk_size)


def with_private(mask: M, **fields: Any) -> M:
    """A copy with fields set as they are, private ones included; nothing is checked."""
    new = object.__new__(type(mask))
    new._store({name: getattr(mask, name) for name in MaskFields.__slots__} | fields)
    return new


def join_terms(terms: Sequence[M]) -> M:
    """Returns the mask whose ``terms`` are these, at least one."""
    return with_private(terms[0], _and=tuple(terms[1:]))


_children = attrgetter(*ARRAYS, "_and")
_static = attrgetter(*RULE, *AXES, "_broadcast")


def flatten(mask: Any) -> tuple[tuple, tuple]:
    return _children(mask), _static(mask)


def flatten_with_keys(mask: Any) -> tuple[tuple, tuple]:
    children, static = flatten(mask)
    keys = map(jtu.GetAttrKey, (*ARRAYS, "_and"))
    return tuple(zip(keys, children, strict=True)), static


def unflatten(cls: type[M], static: tuple, children: tuple) -> M:
    """Rebuild without checks: JAX puts arbitrary objects in the place of arrays."""
    new = object.__new__(cls)
    new._store(
        dict(zip((*ARRAYS, "_and"), children, strict=True))
        | dict(zip((*RULE, *AXES, "_broadcast"), static, strict=True))
    )
    return new


def rule_fields(rule: Rule) -> dict[str, Any]:
    """The field values that say ``rule``."""
    return dict(zip(RULE, (rule.causal, rule.offset, rule.window, rule.chunk), strict=True))


NO_RULE = rule_fields(Rule())


def register(cls: type[M]) -> type[M]:
    """Register a subclass of MaskFields as a pytree."""

    def rebuild(static: tuple, children: Any) -> Any:
        return unflatten(cls, static, tuple(children))

    jtu.register_pytree_with_keys(cls, flatten_with_keys, rebuild, flatten)
    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"ejkernel.types.{cls.__name__}",
        serialize_auxdata=lambda static: json.dumps(static).encode(),
        deserialize_auxdata=lambda data: _tuples(json.loads(data)),
    )
    return cls


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def _array_sizes(term: Any) -> list[tuple[str, Any, list[tuple[str, int]]]]:
    """Returns ``(name, array, sizes by axis name)`` of every array of one term."""
    arrays = []
    for name in ARRAYS:
        value = getattr(term, name)
        if not is_array(value):
            continue
        axes: tuple[str, ...] = ("batch", "heads", "q", "kv")
        if name != "attention_mask":
            length = "q" if name.startswith("q_") else "kv"
            axes = ("batch", *("heads",) * (value.ndim - 2), length)
        arrays.append((name, value, list(zip(axes, value.shape, strict=True))))
    return arrays


def _may_be_1(term: Any, name: str, axis: str) -> bool:
    """Returns whether a size of 1 of this axis stands for any size."""
    return axis in ("batch", "heads") or (name == "attention_mask" and term._broadcast)


def per_head(tokens: Any) -> Any:
    """Ids or positions ``[#b, len]`` or ``[#b, h, len]`` as ``[#b, #h, len]``; None stays None."""
    return tokens if tokens is None or tokens.ndim == 3 else tokens[:, None]


def has_positions(term: Any) -> bool:
    """Returns whether positions are given, for queries or for keys."""
    return term.q_positions is not None or term.kv_positions is not None


def positions_of_rules(mask: Any) -> dict[str, Any]:
    """Returns the positions by which further rules of a call count: the first term's with any."""
    term = next(filter(has_positions, mask.terms), mask)
    return {"q_positions": term.q_positions, "kv_positions": term.kv_positions}


def lengths_of(mask: Any) -> Lengths:
    """Axis sizes from any array of the mask and of its joined masks."""
    sizes: dict[str, int] = {}
    for term in (mask, *mask._and):
        for name, _, array_sizes in _array_sizes(term):
            for axis, size in array_sizes:
                if size == 1 and axis in ("q", "kv") and _may_be_1(term, name, axis):
                    continue
                if sizes.get(axis, 1) == 1:
                    sizes[axis] = size
    return Lengths(*(sizes.get(axis) for axis in Lengths._fields))


def check_sizes(
    mask: Any,
    batch: int | None,
    q_len: int | None,
    kv_len: int | None,
    heads: int | None = None,
    argument: str | None = None,
) -> None:
    """Raise InvalidArgument unless all arrays agree with each other and with the given sizes.

    ``argument`` names the mask in the message; default: the field at fault.
    """
    expected: dict[str, int | None] = {"batch": batch, "heads": heads, "q": q_len, "kv": kv_len}
    for term in (mask, *mask._and):
        for name, value, array_sizes in _array_sizes(term):
            for axis, size in array_sizes:
                if size == 1 and _may_be_1(term, name, axis):
                    continue
                if expected[axis] is None:
                    expected[axis] = size
                elif expected[axis] != size:
                    label = {"q": "q_len", "kv": "kv_len"}.get(axis, axis)
                    path = name if argument is None else f"{argument}.{name}"
                    or_one = " (or 1)" if _may_be_1(term, name, axis) else ""
                    raise invalid(path, f"an array with {label} {expected[axis]}{or_one}", value)

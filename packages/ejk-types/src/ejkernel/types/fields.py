"""The stored form of a mask: named fields, validation, and the pytree protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import jax.tree_util as jtu

from ejkernel.types.arrays import int_array, is_array, mask_array, static_int
from ejkernel.types.errors import invalid
from ejkernel.types.rules import MAX_DISTANCE, Rule, window_tuple

ARRAYS = ("attention_mask", "q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")
RULE = ("causal", "causal_offset", "sliding_window", "chunk_size")
AXES = ("batch_axis_name", "qheads_axis_name", "kvheads_axis_name", "sequence_axis_name")

AxisName = str | tuple[str, ...] | None


class Lengths(NamedTuple):
    """Axis sizes that the arrays of a mask imply; None = no array knows."""

    batch: int | None
    heads: int | None
    q: int | None
    kv: int | None


def _axis_name(name: str, value: Any) -> AxisName:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(v, str) for v in value):
        return tuple(value)
    raise invalid(name, "an axis name, a tuple of axis names or None", value)


def _flag(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid(name, "a Python bool", value)


def _ids(name: str, value: Any, axes: str) -> Any:
    return None if value is None else int_array(value, name, axes, (2,))


class MaskFields:
    """Fields of one mask and of the masks it is joined with; immutable."""

    # _broadcast: a dense axis of size 1 stands for the whole axis. _and: masks joined by AND,
    # each without joined masks of its own.
    __slots__ = (*ARRAYS, *RULE, *AXES, "_and", "_broadcast")

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
        if attention_mask is not None:
            axes = "[#batch, #heads, q_len, kv_len]"
            attention_mask = mask_array(attention_mask, "attention_mask", axes, (4,))
        axes_q, axes_kv = "[#batch, q_len]", "[#batch, kv_len]"
        fields = {
            "attention_mask": attention_mask,
            "q_segment_ids": _ids("q_segment_ids", q_segment_ids, axes_q),
            "kv_segment_ids": _ids("kv_segment_ids", kv_segment_ids, axes_kv),
            "q_positions": _ids("q_positions", q_positions, axes_q),
            "kv_positions": _ids("kv_positions", kv_positions, axes_kv),
            "causal": _flag("causal", causal),
            "causal_offset": static_int(
                causal_offset or 0, "causal_offset", low=-MAX_DISTANCE, high=MAX_DISTANCE
            ),
            "sliding_window": window_tuple(sliding_window),
            "chunk_size": None
            if chunk_size is None
            else static_int(chunk_size, "chunk_size", low=1),
            "batch_axis_name": _axis_name("batch_axis_name", batch_axis_name),
            "qheads_axis_name": _axis_name("qheads_axis_name", qheads_axis_name),
            "kvheads_axis_name": _axis_name("kvheads_axis_name", kvheads_axis_name),
            "sequence_axis_name": _axis_name("sequence_axis_name", sequence_axis_name),
            "_and": (),
            "_broadcast": False,
        }
        if (q_segment_ids is None) != (kv_segment_ids is None):
            given, absent = "q_segment_ids", "kv_segment_ids"
            if q_segment_ids is None:
                given, absent = absent, given
            raise ValueError(f"{absent}: must be given together with {given}, got None")
        self._store(fields)
        check_sizes(self, None, None, None)

    def _store(self, fields: dict[str, Any]) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: use replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: use replace({name}=None)")

    def __reduce__(self):
        children, static = flatten(self)
        return unflatten, (type(self), static, tuple(children))

    def replace(self, **fields: Any) -> Self:
        """A copy with other field values; None clears a field. Validated like the constructor.

        Masks joined with ``&`` that could not be merged into the fields are kept.
        """
        known = {name: getattr(self, name) for name in (*ARRAYS, *RULE, *AXES)}
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise TypeError(f"replace: unknown field {unknown[0]!r}; fields: {', '.join(known)}")
        if "attention_mask" in fields or self.attention_mask is None:
            new = type(self)(**(known | fields))
            return with_private(new, _and=self._and)
        # a stored mask may have any dtype or broadcast axes, which the constructor would reject
        mask = known.pop("attention_mask")
        new = type(self)(**(known | fields))
        new = with_private(new, attention_mask=mask, _and=self._and, _broadcast=self._broadcast)
        check_sizes(new, None, None, None)
        return new

    @property
    def rule(self) -> Rule:
        """The static rule of this mask alone, without joined masks."""
        return Rule(self.causal, self.causal_offset, self.sliding_window, self.chunk_size)


def with_private(mask: Any, **fields: Any) -> Any:
    """A copy with fields set as they are, private ones included; nothing is checked."""
    new = object.__new__(type(mask))
    new._store({name: getattr(mask, name) for name in MaskFields.__slots__} | fields)
    return new


def flatten(mask: Any) -> tuple[tuple, tuple]:
    children = (*(getattr(mask, name) for name in ARRAYS), mask._and)
    static = tuple(getattr(mask, name) for name in (*RULE, *AXES, "_broadcast"))
    return children, static


def flatten_with_keys(mask: Any) -> tuple[tuple, tuple]:
    children, static = flatten(mask)
    keys = map(jtu.GetAttrKey, (*ARRAYS, "_and"))
    return tuple(zip(keys, children, strict=True)), static


def unflatten(cls: type, static: tuple, children: tuple) -> Any:
    """Rebuild without checks: JAX puts arbitrary objects in the place of arrays."""
    new = object.__new__(cls)
    new._store(
        dict(zip((*ARRAYS, "_and"), children, strict=True))
        | dict(zip((*RULE, *AXES, "_broadcast"), static, strict=True))
    )
    return new


def register(cls: type) -> type:
    """Register a subclass of MaskFields as a pytree."""

    def rebuild(static: tuple, children: Any) -> Any:
        return unflatten(cls, static, tuple(children))

    jtu.register_pytree_with_keys(cls, flatten_with_keys, rebuild, flatten)
    return cls


def members(mask: Any) -> Iterator[tuple[str, Any, tuple[str | None, ...]]]:
    """``(name, array, axis names)`` of every array of ``mask`` and of its joined masks."""
    for part in (mask, *mask._and):
        if is_array(part.attention_mask):
            yield "attention_mask", part.attention_mask, ("batch", "heads", "q", "kv")
        for name in ARRAYS[1:]:
            value = getattr(part, name)
            if is_array(value):
                yield name, value, ("batch", "q" if name.startswith("q_") else "kv")


def lengths_of(mask: Any) -> Lengths:
    """Axis sizes from any array of the mask. Size 1 may stand for a whole broadcast axis."""
    found: dict[str, int] = {}
    for _, value, axes in members(mask):
        for axis, size in zip(axes, value.shape, strict=True):
            if found.get(axis, 1) == 1:
                found[axis] = size
    return Lengths(*(found.get(axis) for axis in Lengths._fields))


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
    want: dict[str, int | None] = {"batch": batch, "heads": heads, "q": q_len, "kv": kv_len}
    for part in (mask, *mask._and):
        loose = ("batch", "heads", "q", "kv") if part._broadcast else ("batch", "heads")
        for name, value, axes in members(with_private(part, _and=())):
            for axis, size in zip(axes, value.shape, strict=True):
                is_loose = axis in loose and (name == "attention_mask" or axis == "batch")
                if is_loose and size == 1:
                    continue
                if want[axis] is None:
                    want[axis] = size
                elif want[axis] != size:
                    label = {"q": "q_len", "kv": "kv_len"}.get(axis, axis)
                    place = name if argument is None else f"{argument}.{name}"
                    one = " (or 1)" if is_loose else ""
                    raise invalid(place, f"an array with {label} {want[axis]}{one}", value)

"""Python values as exact hashable keys: equal only when a trace would treat them alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from ejkernel.ops.compat import Tracer

_BY_VALUE = frozenset({str, bytes, bool, int, type(None), type, np.dtype})
_SMALL_ARRAY = 1 << 12


class Unhashable(TypeError):
    """A mutable value, so that nothing can be remembered for it."""


class ByIdentity:
    """Equal only for the very same object, which it keeps alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is ByIdentity and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def freeze(x: Any) -> Hashable:
    """A key for ``x``: tells 1 from 1.0 and True, 0.0 from -0.0, and looks into containers.

    Raises:
        Unhashable: ``x`` holds something mutable that is not understood.
    """
    cls = type(x)
    if cls in _BY_VALUE:
        return cls, x
    if cls is float:
        return cls, x.hex()
    if cls is tuple or cls is list:
        return cls, tuple([freeze(v) for v in x])
    if cls is dict:
        return cls, tuple([(freeze(k), freeze(v)) for k, v in x.items()])
    if cls is set or cls is frozenset:
        return cls, frozenset([freeze(v) for v in x])
    if isinstance(x, Tracer):
        raise Unhashable("a tracer outside the arguments")
    if isinstance(x, jax.Array):
        return ByIdentity(x)
    if isinstance(x, np.ndarray):
        if x.nbytes > _SMALL_ARRAY or x.dtype.hasobject:
            raise Unhashable(f"a numpy array of {x.nbytes} bytes")
        return cls, x.dtype.str, x.shape, x.tobytes()
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return cls, tuple([freeze(getattr(x, f.name)) for f in dataclasses.fields(x)])
    try:
        hash(x)
    except TypeError:
        raise Unhashable(f"{cls.__qualname__} {x!r}") from None
    return cls, x


def kernel_identity(kernel: Any) -> Hashable:
    """Equal for kernels of one class with equal attributes."""
    return type(kernel), tuple([(name, freeze(v)) for name, v in vars(kernel).items()])

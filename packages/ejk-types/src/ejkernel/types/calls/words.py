"""The words signatures are written in: dtype families with named axes, checked by jaxtyping.

An axis called ``heads`` means the same size wherever it appears in one call. ``#batch`` also
allows size 1. What a name means besides (``axes``) decides how an argument may be spread over a
mesh, and which calls share a tuned config.
"""

from __future__ import annotations

import re
import types
import typing
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import AbstractDtype

from ejkernel.types.arrays import EIGHT_BIT
from ejkernel.types.errors import InvalidArgument

Array = jax.Array | np.ndarray

if TYPE_CHECKING:
    # a checker reads ``F[Array, "axes"]`` as Array; the dtype is checked when the call is made
    from typing import Annotated as B
    from typing import Annotated as Cache
    from typing import Annotated as F
    from typing import Annotated as Flags
    from typing import Annotated as I
    from typing import Annotated as Key
    from typing import Annotated as Quantized
    from typing import Annotated as Weights
else:

    class F(AbstractDtype):
        """Floating point of at least 16 bits."""

        dtypes = ("float16", "bfloat16", "float32", "float64")

    class Integers(AbstractDtype):
        """Any integer dtype; values are used as int32."""

        dtypes = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

    I = Integers  # noqa: E741  (the letter signatures use)

    class B(AbstractDtype):
        """Booleans."""

        dtypes = ("bool",)

    class Flags(AbstractDtype):
        """Booleans, or integers where nonzero means true."""

        dtypes = (*B.dtypes, *Integers.dtypes)

    class Key(AbstractDtype):
        """Typed PRNG keys, of whatever generator: what ``jax.random.key`` makes."""

        dtypes = ("prng_key",)

    class Cache(AbstractDtype):
        """Dtypes of a key/value cache: floating point, int8, or an 8-bit float."""

        dtypes = (*F.dtypes, *EIGHT_BIT)

    class Quantized(AbstractDtype):
        """Floating point of at least 16 bits, or the 8-bit float that matmuls take."""

        dtypes = (*F.dtypes, "float8_e4m3fn")

    class Weights(AbstractDtype):
        """Dtypes of stored weights: floating point, int8, or an 8-bit float."""

        dtypes = (*F.dtypes, *EIGHT_BIT)


AttentionMask = (
    Flags[Array, "#batch #heads #q_len #kv_len"]
    | Flags[Array, "#batch q_len kv_len"]
    | Flags[Array, "#batch kv_len"]
)
"""A mask given as an array, of whatever rank."""

# unions of many arms that have a name of their own
NAMED = {"PrecisionLike": jax.lax.PrecisionLike, "DTypeLike": DTypeLike}
_QUALIFIER = re.compile(r"\b(?:\w+\.)+")

FAMILY = {
    "F": "float",
    "Integers": "int",
    "B": "bool",
    "Flags": "bool|int",
    "Key": "key",
    "Cache": "float|int8|float8",
    "Quantized": "float|float8_e4m3fn",
    "Weights": "float|int8|float8",
}


@lru_cache(maxsize=4096)
def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The arms of a union annotation, or the annotation itself."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return tuple(arm for a in typing.get_args(annotation) for arm in alternatives(a))
    return (annotation,)


@lru_cache(maxsize=4096)
def forms(annotation: Any) -> tuple[tuple[str, str], ...]:
    """``(family, axes)`` of every array arm, in order: ``(("float", "batch seq"), ...)``."""
    array_forms: dict[tuple[str, str], None] = {}
    for arm in alternatives(annotation):
        if hasattr(arm, "dim_str") and hasattr(arm, "dtype"):
            array_forms[(FAMILY[arm.dtype.__name__], arm.dim_str.strip())] = None
    return tuple(array_forms)


def is_array(annotation: Any) -> bool:
    return bool(forms(annotation))


@lru_cache(maxsize=4096)
def _words(annotation: Any) -> tuple[str, ...]:
    """Every arm of an annotation in a word or two, None last."""
    arms = alternatives(annotation)
    words: dict[str, None] = {}
    for name, union in NAMED.items():
        if set(alternatives(union)) <= set(arms):
            words[name] = None
            arms = tuple(arm for arm in arms if arm not in alternatives(union))
    for arm in arms:
        if hasattr(arm, "dim_str") and hasattr(arm, "dtype"):
            axes = ", ".join(arm.dim_str.split())
            words[f"{FAMILY[arm.dtype.__name__]}[{axes}]"] = None
        elif typing.get_origin(arm) is not None:
            words[_QUALIFIER.sub("", str(arm))] = None
        elif arm is not type(None):
            words[_QUALIFIER.sub("", getattr(arm, "__name__", str(arm)))] = None
    return (*words, "None") if type(None) in alternatives(annotation) else tuple(words)


def expected(annotation: Any) -> str:
    """The annotation as an error message shows it: ``float[batch, seq] or None``."""
    return " or ".join(_words(annotation))


class Shown(str):
    """Text that stands for an annotation in a signature: it prints without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def shown(annotation: Any) -> Shown:
    """The annotation as ``help`` shows it: ``float[batch, seq] | None``."""
    return Shown(" | ".join(_words(annotation)))


def describe_value(value: Any) -> str:
    """Describes a value, as ``dtype[shape]`` for arrays and ``type: value`` otherwise."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        kind = type(value)
        ours = isinstance(value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))
        prefix = "" if ours else f"{kind.__module__.partition('.')[0]}.{kind.__name__} "
        dtype = "float0" if value.dtype == jax.dtypes.float0 else value.dtype
        return f"{prefix}{dtype}[{', '.join(map(str, value.shape))}]"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def invalid(name: str, legal: str, value: Any) -> InvalidArgument:
    """Wrong class, dtype, rank, size or inconsistent axes."""
    return InvalidArgument(f"{name}: expected {legal}, given {describe_value(value)}")


def out_of_range(name: str, legal: str, value: Any) -> ValueError:
    """A bad value."""
    return ValueError(f"{name}: given {value!r}, expected {legal}")

"""Checks of array arguments, and the choice between numpy and jax.numpy.

numpy arrays are values known while tracing; every other array (tracers and concrete jax arrays)
is computed on without being read.
"""

from __future__ import annotations

import operator
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import Tracer

from ejkernel.types.errors import invalid

Array = TypeVar("Array", jax.Array, np.ndarray)
"""numpy in, numpy out; else an array of JAX."""
AnyArray = jax.Array | np.ndarray

EIGHT_BIT = ("int8", "float8_e4m3fn", "float8_e5m2")
"""Dtypes that weights and caches are stored in, and nothing is computed in."""

LEVELS = ("default", "high", "highest")
"""Of precision, the least exact first."""
NO_LEVEL = "precision: an algorithm; only default, high and highest are supported"

MAX_LENGTH = 2**30
"""No axis is longer; sums of two lengths of at most this still fit int32 positions."""

_SYMBOLIC = type(export.symbolic_shape("n")[0])


def is_numpy(x: Any) -> bool:
    return isinstance(x, (np.ndarray, np.generic, int))


def namespace(*arrays: Any) -> ModuleType:
    """numpy when every argument that is not None is known to the host, else jax.numpy."""
    for x in arrays:
        if x is not None and not is_numpy(x):
            return jnp
    return np


def is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def is_integer_array(x: Any) -> bool:
    return _numpy_dtype(x) is not None and jnp.issubdtype(x.dtype, jnp.integer)


def _numpy_dtype(x: Any) -> np.dtype | None:
    """The dtype of an array; None for other objects, arrays of other libraries among them."""
    if not is_array(x):
        return None
    try:
        return np.dtype(x.dtype)
    except TypeError:
        return None


def is_bool_array(x: Any) -> bool:
    return _numpy_dtype(x) == np.dtype(bool)


def concrete_values(x: Any) -> np.ndarray | None:
    """``x`` on the host where that needs no trace: numpy and concrete local arrays, else None."""
    if is_numpy(x):
        return np.asarray(x)
    if isinstance(x, Tracer) or not isinstance(x, jax.Array):
        return None
    # an explicit transfer, which jax.transfer_guard("disallow") permits
    return jax.device_get(x) if x.is_fully_addressable else None


def cast(x: Any, dtype: Any) -> Any:
    """``x`` in ``dtype``; the same object when it already has it (abstract values included)."""
    if x.dtype == np.dtype(dtype):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype)
    return x.astype(dtype)


def size_of(n: Any) -> int:
    """``n``, or a large number for a symbolic size: to choose tiles by, never for a shape."""
    return int(n) if isinstance(n, (int, np.integer)) else 8192


def is_eight_bit(x: Any) -> bool:
    """Returns whether an array or a dtype has an 8-bit dtype."""
    return str(getattr(x, "dtype", x)) in EIGHT_BIT


def result_dtype(*arrays: Any) -> np.dtype:
    """Returns the dtype that holds all arrays or dtypes, independent of JAX's promotion settings.

    Operations promote by their own documented rules, also where the caller has told JAX to
    refuse promotion. 8-bit dtypes promote to the other dtype.
    """
    arrays = tuple(x for x in arrays if not is_eight_bit(x)) or arrays
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.result_type(*arrays))


def precision_level(precision: Any, dtype: str) -> str | None:
    """Returns default, high or highest: the meaning of JAX's precision for matmuls of ``dtype``.

    None: an algorithm, which is no level. 16-bit inputs have no levels.
    """
    if isinstance(precision, jax.lax.DotAlgorithm):  # a tuple too, but no pair of levels
        return None
    if isinstance(precision, (tuple, list)):
        levels = [precision_level(p, dtype) for p in precision]
        return None if None in levels else max((x for x in levels if x), key=LEVELS.index)
    if precision is None:
        return LEVELS[0]
    if dtype not in ("float32", "float64"):
        return LEVELS[0]
    try:
        return jax.lax.Precision(precision).name.lower()
    except ValueError:
        return None


def as_bool(x: Any) -> Any:
    """Nonzero entries of ``x`` as a bool array."""
    if is_bool_array(x):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, np.dtype(bool))
    return x != 0


def int_array(x: Any, argument: str, axes: str, ranks: tuple[int, ...]) -> Any:
    """``x`` as int32 after checking class, dtype and rank; ``axes`` words the error.

    Raises:
        InvalidArgument: no integer array of one of the ``ranks``.
        ValueError: values that int32 does not hold, where ``check_int32`` sees them.
    """
    if not is_integer_array(x) or x.ndim not in ranks:
        raise invalid(argument, f"integer{axes}", x)
    check_int32(x, argument)
    return cast(x, np.int32)


def check_int32(x: Any, argument: str) -> None:
    """ValueError if an array of a wider integer dtype is known to hold what int32 does not.

    A jax array is read for this if it is concrete and of 64-bit integers, which few programs have
    (JAX makes none unless ``jax_enable_x64`` is set). Traced ones lose their high 32 bits.
    """
    dtype = getattr(x, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iu" or np.can_cast(dtype, np.int32):
        return
    if not isinstance(x, np.ndarray):
        x = concrete_values(x) if dtype.itemsize == 8 else None
    if x is None:
        return
    wrong = x[(x < -(2**31)) | (x > 2**31 - 1)]
    if wrong.size:
        value = int(wrong.flat[0])
        raise ValueError(f"{argument}: given {value}, expected values that fit int32")


def mask_array(x: Any, argument: str, axes: str, ranks: tuple[int, ...]) -> Any:
    """``x`` as bool (nonzero = True) after checking class, dtype and rank."""
    if not (is_bool_array(x) or is_integer_array(x)) or x.ndim not in ranks:
        raise invalid(argument, f"bool or integer{axes}", x)
    return as_bool(x)


def is_symbolic(n: Any) -> bool:
    """Returns whether ``n`` is a symbolic size of ``jax.export`` instead of an integer."""
    return isinstance(n, _SYMBOLIC)


def arange(n: Any) -> Any:
    """int32 0 to n - 1: numpy, for a symbolic ``n`` an array of the program."""
    return namespace(n).arange(n, dtype=np.int32)


def at_most(limit: Any, n: Any) -> Any:
    """``min(limit, n)``; ``limit`` for a symbolic ``n``, whatever that will be."""
    return limit if is_symbolic(n) else min(limit, n)


def length(x: Any, argument: str, *, low: int = 0) -> Any:
    """``x`` as the length of an axis: a Python int, or a symbolic size as it is."""
    return x if is_symbolic(x) else static_length(x, argument, low=low)


def static_length(x: Any, argument: str, *, low: int = 0) -> int:
    """``x`` as the length of an axis, a Python int from ``low`` to ``MAX_LENGTH``."""
    return static_int(x, argument, low=low, high=MAX_LENGTH)


def static_int(x: Any, argument: str, *, low: int | None = None, high: int | None = None) -> int:
    """``x`` as a Python int; wrong class -> InvalidArgument, out of range -> ValueError."""
    try:
        if isinstance(x, (bool, np.bool_)) or isinstance(x, jax.Array):
            raise TypeError
        value = operator.index(x)
    except TypeError:
        raise invalid(argument, "a Python int", x) from None
    if low is not None and value < low:
        raise ValueError(f"{argument}: must be at least {low}, got {value}")
    if high is not None and value > high:
        raise ValueError(f"{argument}: must be at most {high}, got {value}")
    return value


def quantise(x: jax.Array, scale: Any, dtype: Any) -> jax.Array:
    """``cast(round(clip(x / scale)))``: clipped to what ``dtype`` holds, to nearest even.

    ``scale`` broadcasts against the heads axis of ``x [T, heads, d]``; None = 1.
    """
    return _cast(_divide_and_clip(x, scale, dtype), dtype)


def quantised_values(x: jax.Array, scale: Any, dtype: Any) -> jax.Array:
    """``quantise``, in the dtype of ``x``, which holds the values exactly.

    The gradient is that of ``clip(x / scale)``, as if nothing were rounded: a rounded integer has
    none, and a cotangent of an 8-bit float would have its bits.
    """
    return _round(_divide_and_clip(x, scale, dtype), jnp.dtype(dtype)).astype(x.dtype)


def _divide_and_clip(x: jax.Array, scale: Any, dtype: Any) -> jax.Array:
    wide = result_dtype(x, jnp.float32)
    y = x.astype(wide)
    if scale is not None:
        y = y / jnp.asarray(scale, wide).reshape(1, -1, 1)
    info = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    return jnp.clip(y, float(info.min), float(info.max))


def _cast(y: jax.Array, dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.round(y).astype(dtype)
    # XLA on GPUs drops a conversion whose result is converted back, and with it the rounding
    return jax.lax.optimization_barrier(y.astype(dtype))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _round(y: jax.Array, dtype: np.dtype) -> jax.Array:
    return _cast(y, dtype).astype(y.dtype)


@_round.defjvp
def _round_jvp(dtype: np.dtype, primals: Any, tangents: Any) -> tuple[jax.Array, Any]:
    return _round(*primals, dtype), tangents[0]

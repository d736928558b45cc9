"""Checks before the trace of values that the host knows: Python scalars and numpy arrays.

A jax array is not read, so a wrong index inside one gets the documented safe behaviour of the
operation (nothing is read out of bounds, rows without keys give 0) instead of an error. The
exception are 64-bit integers, checked for values that int32 cannot hold (``arrays.check_int32``).
``BY_NAME`` has the function for each argument name; all take the arguments by name in a dict and
change it in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ejkernel.types.calls.canonicalize import Arguments
from ejkernel.types.calls.words import invalid, out_of_range
from ejkernel.types.masks.mask_info import ModMaskInfo
from ejkernel.types.masks.segments import check_starts

_LARGEST = tuple(float(np.finfo(dtype).max) for dtype in (np.float32, np.float64))


def concrete_value(value: Any) -> Any:
    """The value as a numpy array if it can be seen without reading a device, else None."""
    if isinstance(value, np.ndarray):
        return value if value.dtype != object else None
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return np.asarray(value)
    return None


def concrete_indices(value: Any) -> np.ndarray | None:
    """Returns ``concrete_value`` of a vector of integers."""
    array = concrete_value(value)
    return array if array is not None and array.ndim == 1 and array.dtype.kind in "iu" else None


def seeds_to_arrays(a: Arguments, *names: str) -> None:
    """Python and numpy seeds become int32 arrays, so that new seeds compile nothing."""
    for name in names:
        value = concrete_value(a[name])
        is_integer = value is not None and value.dtype.kind in "iuO" and value.ndim == 0
        if is_integer:  # a Python int that no integer dtype holds is an object to numpy
            a[name] = np.asarray(int(value) & 0xFFFFFFFF, np.uint32).view(np.int32)


def integer_to_array(a: Arguments, name: str) -> None:
    """A Python integer that may change from call to call becomes an int32 array."""
    value = a[name]
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(2**31) <= value < 2**31:
            raise out_of_range(name, "an integer that fits int32", value)
        a[name] = np.asarray(value, np.int32)


def scale_to_array(a: Arguments, name: str, *, divide: bool = False) -> None:
    """Turns a Python number that is a scale into a 0-d float array.

    Known ones are finite, and not 0 where something is divided by them.
    """
    value = scale = a[name]
    if value is None:
        return
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        wide = jax.config.jax_enable_x64  # ty: ignore[missing-attribute]
        dtype, largest = (np.float64, _LARGEST[1]) if wide else (np.float32, _LARGEST[0])
        if -largest <= value <= largest:  # the common case skips the slow check below
            scale = a[name] = np.asarray(value, dtype)
            if scale or not divide:
                return
        else:
            with np.errstate(over="ignore"):
                scale = a[name] = np.asarray(value, dtype)
    if not isinstance(scale, np.ndarray) or scale.dtype.kind != "f":
        return
    if not np.isfinite(scale).all() or (divide and not scale.all()):
        legal = "finite numbers other than 0" if divide else "finite numbers"
        raise out_of_range(name, legal, value if scale.ndim == 0 else scale.tolist())


def check_entries(
    name: str, entries: np.ndarray, is_wrong: np.ndarray, legal: str | Callable[..., str]
) -> None:
    """ValueError about the first entry of an array that ``is_wrong``.

    ``legal``: what it has to be, or a function of its index that says so.
    """
    wrong = np.argwhere(is_wrong)
    if wrong.size:
        index = tuple(map(int, wrong[0]))
        expected = legal if isinstance(legal, str) else legal(*index)
        raise out_of_range(f"{name}[{', '.join(map(str, index))}]", expected, int(entries[index]))


def check_packed(a: Arguments, name: str, data: str, *, axis: int = 1) -> None:
    """Cumulative lengths start at 0, do not decrease, and stay inside the packed axis."""
    cu = concrete_indices(a[name])
    if cu is None or cu.size == 0:
        return
    shape = getattr(a[data], "shape", ())
    check_starts(cu, name)
    if len(shape) > axis and cu[-1] > shape[axis]:
        raise out_of_range(f"{name}[-1]", f"at most the {shape[axis]} rows of {data}", int(cu[-1]))


def _packed_pair(a: Arguments) -> None:
    # the same array given for queries and keys is given once: then indices serve as positions
    if a["cum_seqlens_k"] is a["cum_seqlens_q"]:
        a["cum_seqlens_k"] = None
    check_packed(a, "cum_seqlens_q", "query")
    check_packed(a, "cum_seqlens_k", "key")


def _packed(a: Arguments) -> None:
    # rows of one sequence after the other, with a batch axis of 1 before them if they are queries
    data, axis = ("query", 1) if "query" in a else ("x", 0)
    check_packed(a, "cu_seqlens", data, axis=axis)


def _build_bias(a: Arguments) -> None:
    """``init_bias()`` is called only when there is no bias."""
    builder = a["init_bias"]
    if builder is None:
        return
    if not callable(builder):
        raise invalid("init_bias", "a callable without arguments, or None", builder)
    if a["bias"] is None:
        a["bias"] = builder()
    a["init_bias"] = None


def _function_of_mask(a: Arguments) -> None:
    """Takes the function out of a mask that was made of one; elsewhere it becomes an array."""
    mask = a["mask_info"]
    if not isinstance(mask, ModMaskInfo):
        return
    if "mask_mod" not in a:
        a["mask_info"] = mask.dense
        return
    a["mask_info"] = mask.plain
    if a["mask_mod"] is not None:
        legal = "None together with a mask_info from MaskInfo.from_mask_mod"
        raise invalid("mask_mod", legal, a["mask_mod"])
    q, k = a["query"].shape, a["key"].shape
    expected = {"batch": q[0], "heads": q[2], "q": q[1], "kv": k[1]}
    reads = {"batch": "b", "heads": "h"}
    for axis, size in expected.items():
        matters = axis not in reads or reads[axis] in mask.mask_mod.program.reads
        if matters and getattr(mask.sizes, axis) != size:
            value = f"from_mask_mod of {axis} {getattr(mask.sizes, axis)}"
            raise invalid("mask_info", f"a mask of {axis} {size}", value)
    a["mask_mod"] = mask.mask_mod


BY_NAME = {
    "mask_info": _function_of_mask,
    "init_bias": _build_bias,
    "cum_seqlens_q": _packed_pair,
    "cu_seqlens": _packed,
}
"""What is done with an argument of this name, in this order."""

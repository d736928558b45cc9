"""Before the trace: checks of numbers that are known, Python scalars and numpy arrays.

A jax array is never read here, so a wrong index inside one gets the documented safe behaviour of
the operation (nothing is read out of bounds, rows without keys give 0) instead of an error.
``BY_NAME`` says what is done with an argument of a name; all take the arguments by name in a dict
and change it in place.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ejkernel.types.calls.words import invalid, out_of_range

Arguments = dict[str, Any]
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
    found = concrete_value(value)
    return found if found is not None and found.ndim == 1 and found.dtype.kind in "iu" else None


def seeds_to_arrays(a: Arguments, *names: str) -> None:
    """Python and numpy seeds become int32 arrays, so that new seeds compile nothing."""
    for name in names:
        value = concrete_value(a[name])
        whole = value is not None and value.dtype.kind in "iuO" and value.ndim == 0
        if whole:  # a Python int that no integer dtype holds is an object to numpy
            a[name] = np.asarray(int(value) & 0xFFFFFFFF, np.uint32).view(np.int32)


def integer_to_array(a: Arguments, name: str) -> None:
    """A Python integer that may change from call to call becomes an int32 array."""
    value = a[name]
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(2**31) <= value < 2**31:
            raise out_of_range(name, "an integer that fits int32", value)
        a[name] = np.asarray(value, np.int32)


def scale_to_array(a: Arguments, name: str, *, divide: bool = False) -> None:
    """A Python number that scales something becomes a 0-d float array.

    Known ones are finite, and not 0 where something is divided by them.
    """
    value = scale = a[name]
    if value is None:
        return
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        wide = jax.config.jax_enable_x64  # ty: ignore[missing-attribute]
        dtype, largest = (np.float64, _LARGEST[1]) if wide else (np.float32, _LARGEST[0])
        if -largest <= value <= largest:  # most are: no need of the slow look that follows
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


def check_packed(a: Arguments, name: str, data: str, *, axis: int = 1) -> None:
    """Cumulative lengths start at 0, do not decrease, and stay inside the packed axis."""
    cu = concrete_indices(a[name])
    if cu is None or cu.size == 0:
        return
    shape = getattr(a[data], "shape", ())
    _starts_at_zero(name, cu)
    if len(shape) > axis and cu[-1] > shape[axis]:
        raise out_of_range(f"{name}[-1]", f"at most the {shape[axis]} rows of {data}", int(cu[-1]))


def _starts_at_zero(name: str, cu: np.ndarray) -> None:
    if cu[0] != 0:
        raise out_of_range(f"{name}[0]", "cumulative lengths that start at 0", int(cu[0]))
    falls = np.flatnonzero(np.diff(cu.astype(np.int64)) < 0)
    if falls.size:
        at = int(falls[0])
        pair = (int(cu[at]), int(cu[at + 1]))
        raise out_of_range(f"{name}[{at}:{at + 2}]", "cumulative lengths that never decrease", pair)


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


def check_sequences(a: Arguments, lengths: str, rows: np.ndarray) -> None:
    """Row starts and cached lengths of the first ``rows`` packed sequences of a paged call."""
    total = (*getattr(a[lengths], "shape", ()), 0)[0]
    valid = total if rows.size != 1 else int(rows.reshape(()))
    starts = concrete_value(a["query_start_loc"])
    if starts is None or starts.ndim != 1 or starts.size == 0:
        return
    used = starts[: valid + 1]
    _starts_at_zero("query_start_loc", used)
    tokens = getattr(a["queries"], "shape", (None,))[0]
    if tokens is not None and used[-1] > tokens:
        last = f"query_start_loc[{len(used) - 1}]"
        raise out_of_range(last, f"at most the {tokens} rows of queries", int(used[-1]))
    lens = concrete_value(a[lengths])
    if lens is None or lens.ndim != 1:
        return
    counts = np.diff(used.astype(np.int64))[:valid]
    short = np.flatnonzero(lens[: len(counts)] < counts)
    if short.size:
        r = int(short[0])
        legal = f"at least its {int(counts[r])} query rows"
        raise out_of_range(f"{lengths}[{r}]", legal, int(lens[r]))


def check_tables(a: Arguments, lengths: str, cache: str, *, rows: Any = None) -> None:
    """Cached lengths are not negative, and the entries of ``block_tables`` they use exist.

    A length past the table is clipped to it later, as a traced one is.
    """
    lens = concrete_indices(a[lengths])
    if lens is None:
        return
    pages, page_size = getattr(a[cache], "shape", (0, 0))[:2]
    if rows is not None and rows.size == 1:
        lens = lens[: int(rows.reshape(()))]
    if (lens < 0).any():
        r = int(np.flatnonzero(lens < 0)[0])
        raise out_of_range(f"{lengths}[{r}]", "a length >= 0", int(lens[r]))
    shape = getattr(a["block_tables"], "shape", ())
    if not shape or page_size == 0:
        return
    n = a[lengths].shape[0]
    columns = shape[1] if len(shape) == 2 else shape[0] // max(n, 1)
    table = concrete_value(a["block_tables"])
    if table is None or table.dtype.kind not in "iu" or table.size < n * columns:
        return
    table = table.reshape(-1)[: n * columns].reshape(n, columns)[: len(lens)]
    used = np.arange(columns)[None, :] * page_size < lens[:, None]
    bad = np.argwhere(used & ((table < 0) | (table >= pages)))
    if bad.size:
        r, c = map(int, bad[0])
        legal = f"a page from 0 to {pages - 1}"
        raise out_of_range(f"block_tables[{r}, {c}]", legal, int(table[r, c]))


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


BY_NAME = {"init_bias": _build_bias, "cum_seqlens_q": _packed_pair, "cu_seqlens": _packed}
"""What is done with an argument of this name, in this order."""

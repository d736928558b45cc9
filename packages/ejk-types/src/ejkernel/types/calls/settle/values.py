"""Checks of numbers that are known before tracing: Python scalars and numpy arrays.

A jax array is never read here, so a wrong index inside one gets the documented safe behaviour of
the operation (nothing is read out of bounds, rows without keys give 0) instead of an error.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ejkernel.types import arrays
from ejkernel.types.calls.settle.errors import invalid, out_of_range

Arguments = dict[str, Any]


def known(value: Any) -> Any:
    """The value as a numpy array if it can be seen without reading a device, else None."""
    if isinstance(value, np.ndarray):
        return value if value.dtype != object else None
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return np.asarray(value)
    return None


def seeds_to_arrays(a: Arguments, *names: str) -> None:
    """Python and numpy seeds become int32 arrays, so that new seeds compile nothing."""
    for name in names:
        value = known(a[name])
        whole = value is not None and value.dtype.kind in "iuO" and value.ndim == 0
        if whole:  # a Python int that no integer dtype holds is an object to numpy
            a[name] = np.asarray(int(value) & 0xFFFFFFFF, np.uint32).view(np.int32)


def check_int32(a: Arguments, *names: str) -> None:
    """Indices of a wider dtype keep their values as int32."""
    for name in names:
        arrays.check_int32(a[name], name)


def integers_to_arrays(a: Arguments, *names: str) -> None:
    """Python integers that may change from call to call become int32 arrays."""
    for name in names:
        value = a[name]
        if isinstance(value, int) and not isinstance(value, bool):
            if not -(2**31) <= value < 2**31:
                raise out_of_range(name, "an integer that fits int32", value)
            a[name] = np.asarray(value, np.int32)


def scalars_to_arrays(a: Arguments, *names: str, divide: bool = False) -> None:
    """Python numbers that scale something become 0-d float arrays.

    Known ones are finite, and not 0 where something is divided by them.
    """
    for name in names:
        value = a[name]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            wide = jax.config.jax_enable_x64  # ty: ignore[missing-attribute]
            with np.errstate(over="ignore"):
                a[name] = np.asarray(value, np.float64 if wide else np.float32)
        scale = a[name]
        if not isinstance(scale, np.ndarray) or scale.dtype.kind != "f":
            continue
        if not np.isfinite(scale).all() or (divide and not scale.all()):
            legal = "finite numbers other than 0" if divide else "finite numbers"
            raise out_of_range(name, legal, value if scale.ndim == 0 else scale.tolist())


def check_packed(a: Arguments, name: str, data: str, *, axis: int) -> None:
    """Cumulative lengths start at 0, do not decrease, and stay inside the packed axis."""
    cu = known(a[name])
    if cu is None or cu.ndim != 1 or cu.size == 0 or cu.dtype.kind not in "iu":
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


def check_sequences(
    a: Arguments, *, lengths: str, counts: str | None = None, rows: Any = None
) -> None:
    """Packed rows of a paged call: number of sequences, row starts, and their cached lengths."""
    total = getattr(a[lengths], "shape", (0,))[0] if getattr(a[lengths], "shape", ()) else 0
    if counts is not None:
        rows = known(a[counts])
        if rows is not None and rows.size == 1 and not 0 <= int(rows.reshape(())) <= total:
            raise out_of_range(
                counts, f"0 to {total}, the rows of {lengths}", int(rows.reshape(()))
            )
    valid = total if rows is None or rows.size != 1 else int(rows.reshape(()))
    unknown_count = rows is None and counts is not None and a[counts] is not None
    starts = known(a["query_start_loc"])
    if starts is None or starts.ndim != 1 or starts.size == 0 or unknown_count:
        return
    used = starts[: valid + 1]
    _starts_at_zero("query_start_loc", used)
    tokens = getattr(a["queries"], "shape", (None,))[0]
    if tokens is not None and used[-1] > tokens:
        raise out_of_range(
            f"query_start_loc[{len(used) - 1}]",
            f"at most the {tokens} rows of queries",
            int(used[-1]),
        )
    lens = known(a[lengths])
    if lens is None or lens.ndim != 1:
        return
    counted = np.diff(used.astype(np.int64))[:valid]
    short = np.flatnonzero(lens[: len(counted)] < counted)
    if short.size:
        r = int(short[0])
        raise out_of_range(
            f"{lengths}[{r}]", f"at least its {int(counted[r])} query rows", int(lens[r])
        )


def check_tables(a: Arguments, lengths: str, tables: str, cache: str, *, rows: Any = None) -> None:
    """Cached lengths are not negative, and the table entries they use exist.

    A length past the table is clipped to it later, as a traced one is.
    """
    lens = known(a[lengths])
    if lens is None or lens.ndim != 1 or lens.dtype.kind not in "iu":
        return
    pages, page_size = getattr(a[cache], "shape", (0, 0))[:2]
    if rows is not None and rows.size == 1:
        lens = lens[: int(rows.reshape(()))]
    if (lens < 0).any():
        r = int(np.flatnonzero(lens < 0)[0])
        raise out_of_range(f"{lengths}[{r}]", "a length >= 0", int(lens[r]))
    shape = getattr(a[tables], "shape", ())
    if not shape or page_size == 0:
        return
    n = a[lengths].shape[0]
    columns = shape[1] if len(shape) == 2 else shape[0] // max(n, 1)
    table = known(a[tables])
    if table is None or table.dtype.kind not in "iu" or table.size < n * columns:
        return
    table = table.reshape(-1)[: n * columns].reshape(n, columns)[: len(lens)]
    used = np.arange(columns)[None, :] * page_size < lens[:, None]
    bad = np.argwhere(used & ((table < 0) | (table >= pages)))
    if bad.size:
        r, c = map(int, bad[0])
        raise out_of_range(f"{tables}[{r}, {c}]", f"a page from 0 to {pages - 1}", int(table[r, c]))


def check_distribution(a: Arguments) -> Any:
    """``(decode, prefill, all)`` sequence numbers in order; the count as an array when known."""
    ends = known(a["distribution"])
    if ends is None or ends.shape != (3,):
        return None
    total = getattr(a["kv_lens"], "shape", (0,))
    limit = total[0] if total else 0
    i, j, m = (int(x) for x in ends)
    if not 0 <= i <= j <= m <= limit:
        raise out_of_range("distribution", f"0 <= i <= j <= m <= {limit} sequences", (i, j, m))
    return np.asarray(m)


def check_block_counts(a: Arguments) -> None:
    """Every token reads at least one block."""
    counts = known(a["block_counts"])
    if counts is not None and counts.ndim and counts.dtype.kind in "iu" and (counts < 1).any():
        at = tuple(map(int, np.argwhere(counts < 1)[0]))
        where = ", ".join(map(str, at))
        raise out_of_range(f"block_counts[{where}]", "a count >= 1", int(counts[at]))


def check_group_sizes(a: Arguments) -> None:
    """Sizes and the first group are not negative; a sum above the rows is clipped later."""
    sizes = known(a["group_sizes"])
    if sizes is not None and sizes.ndim == 1 and sizes.dtype.kind == "i" and (sizes < 0).any():
        r = int(np.flatnonzero(sizes < 0)[0])
        raise out_of_range(f"group_sizes[{r}]", "a size >= 0", int(sizes[r]))
    first = known(a["group_offset"])
    if first is not None and first.size == 1 and first.dtype.kind in "iu":
        value = int(first.reshape(()))
        spare: list[tuple[int, ...]] = [getattr(a[n], "shape", ()) for n in ("group_sizes", "rhs")]
        legal = spare[0][0] - spare[1][0] if all(spare) else None
        if value < 0 or (legal is not None and legal >= 0 and value > legal):
            raise out_of_range(
                "group_offset", f"0 to {legal}, so that rhs lies inside group_sizes", value
            )


def build_bias(a: Arguments) -> None:
    """``init_bias()`` is called only when there is no bias."""
    builder = a["init_bias"]
    if builder is None:
        return
    if not callable(builder):
        raise invalid("init_bias", "a callable without arguments, or None", builder)
    if a["bias"] is None:
        a["bias"] = builder()
    a["init_bias"] = None


def build_block_mask(a: Arguments) -> None:
    """``mask_builder(q_len, kv_len, heads)`` makes the block mask: in a trace, a numpy array where
    it depends on nothing that is traced.
    """
    builder = a["mask_builder"]
    if builder is None:
        return
    if a["block_mask"] is not None:
        raise ValueError("mask_builder: given together with block_mask, expected only one of them")
    if not callable(builder):
        raise invalid("mask_builder", "a callable (q_len, kv_len, heads), or None", builder)
    shapes: list[tuple[int, ...]] = [getattr(a[n], "shape", ()) for n in ("query", "key")]
    if any(len(shape) != 4 for shape in shapes):
        return  # the type check has more to say
    with jax.ensure_compile_time_eval():
        mask = builder(shapes[0][1], shapes[1][1], shapes[0][2])
    traced = isinstance(a["query"], Tracer)
    if traced and isinstance(mask, jax.Array) and not isinstance(mask, Tracer):
        mask = np.asarray(mask)
    a["block_mask"] = mask
    a["mask_builder"] = None

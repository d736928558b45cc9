"""Operations of Triton's interpreter with the float types and the checks that it lacks.

* bfloat16 and float8 compute as floats; the interpreter treats their bits as integers.
* Loads and stores outside the arrays of a launch raise IndexError instead of crashing the process.
* Equal rows of a matmul have equal results.

Needs Triton: ``interpret`` imports this module at its first launch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

import triton.language as tl
from ejkernel.kernels.triton.interpret_types import quicken
from triton.runtime import interpreter as rt

EXTENDED = {
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
}
_Builder = rt.InterpreterBuilder
_storage_dtype = rt._get_np_dtype  # integers in place of the extended types
_cast_as_stored = _Builder.cast_impl
_masked_load, _masked_store = _Builder.create_masked_load, _Builder.create_masked_store

_allowed: list[tuple[int, int]] = []  # first address, end of every array of the running launch


@functools.cache
def install() -> None:
    """Replaces the operations of the interpreter; once per process."""
    rt._get_np_dtype = _numpy_dtype
    _Builder.create_splat = _splat
    _Builder.cast_impl = _Builder.create_fp_ext = _cast
    _Builder.create_fp_trunc = _Builder.create_fp_to_fp = _cast
    _Builder.create_dot = _dot
    _Builder.create_masked_load, _Builder.create_masked_store = _load, _store
    quicken(rt.interpreter_semantic)


@contextlib.contextmanager
def memory_of(arrays: Sequence[np.ndarray]) -> Generator[None]:
    """Allows loads and stores of these arrays alone."""
    _allowed[:] = [(a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays]
    try:
        yield
    finally:
        _allowed.clear()


def _check_bounds(pointers: Any, mask: Any, access: str) -> None:
    addresses = pointers.data[mask.data]
    if not addresses.size:
        return
    width = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
    lowest, highest = int(addresses.min()), int(addresses.max()) + int(width)
    if any(first <= lowest and highest <= end for first, end in _allowed):
        return
    inside = np.zeros(addresses.shape, bool)
    for first, end in _allowed:
        inside |= (addresses >= first) & (addresses + width <= end)
    if not inside.all():
        program = rt.interpreter_builder.grid_idx
        raise IndexError(
            f"out-of-bounds {access} of {(~inside).sum()} elements in program {program}"
        )


_numpy_dtypes: dict[str, np.dtype] = {}


def _numpy_dtype(kind: Any) -> np.dtype:
    scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
    if scalar.name not in _numpy_dtypes:
        is_extended = not isinstance(scalar, tl.pointer_type) and scalar in EXTENDED
        _numpy_dtypes[scalar.name] = EXTENDED[scalar] if is_extended else _storage_dtype(kind)
    return _numpy_dtypes[scalar.name]


def _to_computed(x: Any) -> np.ndarray:
    """Returns the values of a handle, of extended types in float32."""
    return x.data.astype(np.float32) if x.dtype.scalar in EXTENDED else x.data


def _cast(self: Any, source: Any, kind: Any, *_: Any) -> Any:
    if source.dtype.scalar in EXTENDED or kind.scalar in EXTENDED:
        return rt.TensorHandle(_to_computed(source).astype(_numpy_dtype(kind)), kind.scalar)
    return _cast_as_stored(self, source, kind)


def _dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    kind = d.data.dtype
    # equal rows must give equal results, as on a GPU: the order in which the host's BLAS adds may
    # depend on the position of a row, which accumulating in twice the width hides
    wide = np.dtype(np.float64) if kind == np.float32 else kind
    with np.errstate(over="ignore"):
        product = np.matmul(_to_computed(a).astype(wide), _to_computed(b).astype(wide)).astype(kind)
    return rt.TensorHandle(product + d.data, d.dtype.scalar)


def _load(self: Any, pointers: Any, mask: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
    _check_bounds(pointers, mask, "load")
    kind = pointers.get_element_ty()
    if isinstance(kind, tl.pointer_type) or kind not in EXTENDED:
        return _masked_load(self, pointers, mask, other, *args, **kwargs)
    stored = _storage_dtype(kind)
    if other is None:
        fill = np.zeros(pointers.data.shape, stored)
    else:
        fill = np.ascontiguousarray(other.data).view(stored)
    bits = rt._interpreter.load(pointers.data, mask.data, fill, stored)
    return rt.TensorHandle(bits.view(EXTENDED[kind]), kind)


def _store(self: Any, pointers: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
    _check_bounds(pointers, mask, "store")
    kind = value.dtype.scalar
    if not isinstance(kind, tl.pointer_type) and kind in EXTENDED:
        bits = np.ascontiguousarray(value.data).view(_storage_dtype(kind))
        value = rt.TensorHandle(bits, value.dtype)
    return _masked_store(self, pointers, value, mask, *args, **kwargs)


def _splat(self: Any, kind: Any, x: Any) -> Any:
    # the handle of a comparison names the dtype of its operands, but its data are bool, as masks
    # must be
    return rt.TensorHandle(np.full(kind.shape, x.data, x.data.dtype), x.dtype.scalar)

"""The interpreter's quicker rules for types give what Triton's own give, and refuse the same."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter

from ejkernel.kernels.triton import interpret, interpret_builder

OPERATIONS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "less_than", "minimum")
KINDS = (tl.int1, tl.int8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.float32, tl.float64)
NUMBERS = (True, 0, 3, -2, 300, 2**31, 2**40, -0.0, 0.5, 1e300, float("inf"))


def tensor(kind, shape=()):
    data = np.ones(shape or 1, interpreter._get_np_dtype(kind)) * 2
    handle = interpreter.TensorHandle(data.astype(interpreter._get_np_dtype(kind)), kind)
    return tl.tensor(handle, tl.block_type(kind, list(shape)) if shape else kind)


def outcome(semantic, operation, *operands):
    """Type, shape and bits of a result, or the type of the error."""
    extra = {"add": (True,), "sub": (True,), "mul": (True,), "minimum": (None,)}.get(operation, ())
    with np.errstate(all="ignore"):
        try:
            result = getattr(semantic, operation)(*operands, *extra)
        except Exception as error:
            return type(error)
    data = result.handle.data
    shape = [n.value for n in result.shape]
    return str(result.type), str(result.dtype), shape, result.numel.value, data.tobytes()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_pair_of_operands(operation) -> None:
    interpret_builder.install()
    semantic = interpreter.TritonSemantic(interpreter.interpreter_builder)
    tensors = [(kind, shape) for kind in KINDS for shape in ((), (4,), (2, 4))]
    pairs = [(x, y) for x in tensors for y in tensors]
    pairs += [pair for x in tensors for n in NUMBERS for pair in ((x, n), (n, x))]

    def results(semantic):
        for pair in pairs:
            made = [tensor(*x) if isinstance(x, tuple) else x for x in pair]
            yield pair, outcome(semantic, operation, *made)

    with mock.patch.object(interpret, "constructors", list), interpret._interpreted_library():
        want = list(results(semantic))
    with interpret._interpreted_library():
        got = list(results(interpreter.interpreter_semantic))
    assert {len(x) for _, x in want if isinstance(x, tuple)} == {5}
    for (pair, a), (_, b) in zip(want, got, strict=True):
        assert a == b, pair


def test_the_compiler_keeps_its_constructors() -> None:
    before = tl.block_type.__init__, tl.tensor.__init__
    with interpret._interpreted_library():
        assert tl.block_type.__init__ is not before[0] and tl.tensor.__init__ is not before[1]
    assert (tl.block_type.__init__, tl.tensor.__init__) == before

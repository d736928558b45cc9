"""Runs the kernels on the CPU through Triton's interpreter, on numpy arrays.

The interpreter executes a kernel program by program with numpy in place of the compiler; it needs
no GPU and no torch: arrays are wrapped so that it finds the attributes it reads from torch tensors.
``interpret_builder`` adds float types and checks of the memory that a kernel touches.

Kernels are ordinary compiled ones: each is rebuilt as an interpreted twin, together with the
device functions it calls.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from ejkernel.kernels.triton.bound_launch import (
    BoundLaunch,
    In,
    Out,
    TensorMap,
    input_order,
    map_leaves,
)
from ejkernel.kernels.triton.compiled import TRITON_LOCK
from ejkernel.kernels.triton.interpret_types import constructors
from ejkernel.kernels.triton.launch import Launch
from ejkernel.kernels.triton.targets import current_target


class _Type:
    """A dtype as the interpreter wants it: its str() names the type."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.itemsize = self.dtype.itemsize
        self.is_floating_point = self.dtype.kind in "fV"

    def __str__(self) -> str:
        return self.dtype.name

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


class _Storage:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def cpu(self) -> _Storage:
        return self

    def copy_(self, other: _Storage) -> None:
        # one array may come as a pointer and as a descriptor, through two views of it
        assert other.data_ptr() == self.data_ptr()


class _Tensor:
    """A numpy array behind the few methods of a tensor that the interpreter calls; no copies."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = _Type(array.dtype)
        self.shape = array.shape
        self.device = "cpu"

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def element_size(self) -> int:
        return self.array.itemsize

    def numel(self) -> int:
        return self.array.size

    def dim(self) -> int:
        return self.array.ndim

    def size(self, axis: int | None = None) -> Any:
        return self.array.shape if axis is None else self.array.shape[axis]

    def stride(self, axis: int | None = None) -> Any:
        steps = tuple(s // self.array.itemsize for s in self.array.strides)
        return steps if axis is None else steps[axis]

    def storage_offset(self) -> int:
        return 0

    def untyped_storage(self) -> _Storage:
        return _Storage(self.array)

    def new_empty(self, _size: Any, device: str | None = None) -> _Tensor:
        return _Tensor(self.array)

    def set_(self, storage: _Storage, *_: Any) -> _Tensor:
        self.array = storage.array
        return self


class _Group:
    """A group of arguments, which the interpreter hands on as it is.

    Of a tuple it would make every number a tensor, and constants are none.
    """

    def __init__(self, values: tuple[Any, ...]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._values, name)

    def __getitem__(self, index: Any) -> Any:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)


@functools.cache
def _twin_class() -> type:
    from triton.runtime.interpreter import InterpretedFunction, InterpreterError

    class Twin(InterpretedFunction):
        """Called from a kernel: the language is patched already."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return self.rewrite()(*args, **kwargs)
            except Exception as error:
                raise InterpreterError(repr(error)) from error

    return Twin


@functools.cache
def interpreted(kernel: Any) -> Any:
    """The interpreted twin of a ``triton.jit`` function and of the functions it calls."""
    from triton.runtime.jit import JITFunction

    fn = kernel.fn
    names, used = dict(fn.__globals__), fn.__code__.co_names
    for name, value in fn.__globals__.items():
        if isinstance(value, JITFunction) and value is not kernel and name in used:
            names[name] = interpreted(value)
    twin = types.FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__)
    twin.__annotations__ = fn.__annotations__
    twin.__kwdefaults__ = fn.__kwdefaults__
    twin.__module__, twin.__qualname__ = fn.__module__, fn.__qualname__
    return _twin_class()(twin)


@contextlib.contextmanager
def _interpreted_library():
    """Triton's own device functions (tl.max, tl.cdiv, ...) as interpreted twins, for a while.

    The language is patched here once and put back at the end. A device function would patch it
    again at every call and leave it so, and nothing could be compiled afterwards.
    """
    import triton.language as tl
    from triton.runtime import interpreter as rt
    from triton.runtime.jit import JITFunction

    replaced = [
        (module, name, value)
        for module in (tl, tl.standard)
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
    ]
    for module, name, value in replaced:
        setattr(module, name, interpreted(value))
    scope = rt._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    for made, constructor in constructors():
        scope.set_attr(made, "__init__", constructor)
    try:
        yield
    finally:
        scope.restore()
        for module, name, value in replaced:
            setattr(module, name, value)


def run_launch(
    launch: BoundLaunch, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]
) -> None:
    """Runs a launch on numpy arrays, writing into ``outputs``.

    Raises:
        IndexError: the kernel reads or writes outside the arrays.
    """
    import triton.experimental.gluon  # noqa: F401  (must not be imported under the twins)
    from ejkernel.kernels.triton.interpret_builder import install, memory_of
    from triton.runtime.errors import InterpreterError
    from triton.runtime.interpreter import _implicit_cvt
    from triton.runtime.jit import JITFunction
    from triton.tools.tensor_descriptor import TensorDescriptor

    launch = launch.stand_in or launch
    input_order(launch, len(outputs))  # what a GPU would refuse is refused here

    for operand, result in launch.aliases.items():  # one memory
        inputs = [outputs[result] if i == operand else x for i, x in enumerate(inputs)]

    def leaf(value: Any, path: tuple[int, ...], constant: bool) -> Any:
        if isinstance(value, (In, Out)):
            array = (inputs if isinstance(value, In) else outputs)[value.index]
            value = _Tensor(array.view(value.view) if value.view else array)
        elif isinstance(value, TensorMap):
            array = (outputs if value.result else inputs)[value.index]
            array = array.view(value.view) if value.view else array
            view = array if value.steps else array.reshape(value.shape)
            shape, strides, block = map(list, (value.shape, value.strides, value.block))
            value = TensorDescriptor(_Tensor(view), shape, strides, block)
        if isinstance(value, JITFunction):
            return interpreted(value)
        return _implicit_cvt(value) if path and not constant else value

    def argument(value: Any) -> Any:
        made = map_leaves(value, leaf)
        return _Group(made) if isinstance(made, tuple) else made

    with TRITON_LOCK, _interpreted_library(), memory_of([*inputs, *outputs]):
        install()
        values = {**launch.arguments, **launch.constants, **launch.interpreted}
        arguments = {name: argument(values[name]) for name in launch.arguments}
        constants = {name: values[name] for name in launch.constants}
        grid = (*launch.grid, 1, 1)[:3]
        try:
            interpreted(launch.kernel)[grid](**arguments, **constants)
        except InterpreterError as error:
            root: BaseException = error
            while root.__cause__ is not None:
                root = root.__cause__
            if isinstance(root, IndexError):
                raise root from error
            raise


def run_interpreted(launch: Launch, *arrays: Any) -> list[np.ndarray]:
    """Returns the results of ``launch`` on arrays, computed by the interpreter.

    Outputs start as NaN (integers as -1), so that an element no program writes is seen; those in
    the memory of an operand start as it is.
    """
    inputs = [np.require(np.asarray(a), requirements=["C", "A"]) for a in arrays]
    bound = launch.bind(current_target())
    sources = {result: inputs[operand] for operand, result in bound.aliases.items()}
    results = []
    for i, kind in enumerate(launch.result_types()):
        dtype = np.dtype(kind.dtype)
        fill = -1 if dtype.kind in "iu" else np.nan
        results.append(sources[i].copy() if i in sources else np.full(kind.shape, fill, dtype))
    run_launch(bound, inputs, results)
    return results

"""Kernels in Gluon for Hopper, run by NumPy: their arithmetic, and what is asynchronous in order.

Triton's interpreter does not run Gluon. Here a partition of a program is one thread whose tensors
are whole; layouts are ignored. What is asynchronous happens as late as it may, and what must not be
touched meanwhile is seen: a copy fills its tile when its barrier is waited for, and until then the
tile is NaN; a matmul reads shared memory when it is waited for, and its accumulator has no values
before that. One partition runs at a time, the first one after an arrival or the others, as a test
says. Shared memory starts as NaN. Bytes that a barrier expects, and the phase that is waited for,
are checked. Barriers of threads are not: the compiler puts those that shared memory needs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Generator, Sequence
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from ejkernel.kernels.triton import interpret
from ejkernel.kernels.triton.bound_launch import BoundLaunch, In, Out, TensorMap, map_leaves

MASK = 2**64 - 1


class Tensor(np.ndarray):
    """A tensor or a number."""

    def __array_wrap__(self, array, context=None, return_scalar=False):
        return np.asarray(array).view(Tensor)

    def __iadd__(self, other):  # another name may have the same tensor
        return self + other

    def to(self, dtype, bitcast=False):
        dtype = _dtype(dtype)
        return _tensor(np.asarray(self).view(dtype) if bitcast else np.asarray(self).astype(dtype))


def _tensor(x: Any) -> Tensor:
    return np.asarray(x).view(Tensor)


def _dtype(kind: Any) -> np.dtype:
    if isinstance(kind, np.dtype):
        return kind
    special = {"bf16": ml_dtypes.bfloat16, "fp32": np.float32, "int1": np.bool_}
    return np.dtype(special.get(kind.name, kind.name))


class Pointer:
    """Addresses of elements of an array."""

    def __init__(self, array: np.ndarray, offset: Any = 0) -> None:
        self.array, self.offset = array, offset

    def __add__(self, offset):
        return Pointer(self.array, np.asarray(self.offset) + np.asarray(offset))

    def elements(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        at, mask = np.broadcast_arrays(np.asarray(self.offset), True if mask is None else mask)
        inside = (at >= 0) & (at < self.array.size)
        if np.any(mask & ~inside):
            raise IndexError(f"elements {at[mask & ~inside][:4]} of {self.array.size}")
        return np.where(mask, at, 0), mask


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, data: np.ndarray, layout: Any) -> None:
        self.data, self.layout = data, layout

    @property
    def shape(self):
        return self.data.shape

    @property
    def dtype(self):
        return self.data.dtype

    @property
    def nbytes_per_cta(self):
        return self.data.nbytes

    def index(self, i):
        return Shared(self.data[int(i)], self.layout)

    def permute(self, order):
        return Shared(self.data.transpose(order), self.layout)

    def reinterpret(self, dtype, shape, layout):
        data = self.data.view(_dtype(dtype)).reshape(tuple(int(n) for n in shape))
        return Shared(data, layout)

    def load(self, layout):
        return _tensor(self.data.copy())

    def store(self, x):
        if x.dtype != self.data.dtype or x.shape != self.data.shape:
            raise TypeError(f"{x.dtype}{x.shape} stored to {self.data.dtype}{self.data.shape}")
        self.data[...] = x


class Map:
    """A descriptor of the copy engine."""

    layout = None

    def __init__(self, array: np.ndarray, value: TensorMap) -> None:
        self.array, self.value = array.reshape(-1), value
        self.dtype, self.block_shape = array.dtype, value.block
        self.nbytes_per_cta = array.dtype.itemsize * int(np.prod(value.block))

    def read(self, coordinates: Sequence[Any]) -> np.ndarray:
        inside, address = np.bool_(True), np.uint64(0)
        size = self.array.dtype.itemsize
        rank = len(self.block_shape)
        with np.errstate(over="ignore"):
            for axis, at in enumerate(coordinates):
                index = np.arange(self.block_shape[axis], dtype=np.int64) + int(at)
                index = index.reshape([-1 if axis == k else 1 for k in range(rank)])
                inside = inside & (index >= 0) & (index < self.value.shape[axis])
                step = np.uint64(self.value.strides[axis] * size & MASK)
                address = address + index.astype(np.uint64) * step
        element = np.where(inside, address.astype(np.int64) // size, 0)
        if np.any((element < 0) | (element >= self.array.size)):
            raise IndexError("a copy reads outside of its operand")
        return np.where(inside, self.array[element], np.zeros((), self.array.dtype))


class Pending:
    """An accumulator of matmuls that nobody has waited for."""

    def __init__(self, steps: list, start: Any) -> None:
        self.steps, self.start = steps, start

    def values(self) -> Tensor:
        total = self.start
        for a, b, use in self.steps:
            left, right = (x.data if isinstance(x, Shared) else x for x in (a, b))
            product = np.asarray(left, np.float32) @ np.asarray(right, np.float32)
            total = total + product if use else product
        return _tensor(np.asarray(total, np.float32))


class Program:
    """State of the program that runs: its number, barriers, and matmuls in order.

    ``workers``: the partitions but the first one; they run when the first one waits for a barrier
    that is not complete, and if ``eager`` also when it arrives at one. ``issued``: matmuls by
    partition.
    """

    number = 0
    barriers: dict[int, dict]
    issued: dict[int, list[Pending]]
    workers: Sequence[Worker] = ()
    eager = True
    steps = 0  # counts what may let a partition go on


class Worker:
    """A partition in a thread of its own, which runs only while ``go_on`` waits for it."""

    def __init__(self, function: Any, arguments: tuple) -> None:
        self.turn, self.back = threading.Semaphore(0), threading.Semaphore(0)
        self.error: BaseException | None = None
        self.ended = False
        self.thread = threading.Thread(target=self._run, args=(function, arguments), daemon=True)
        self.thread.start()

    def _run(self, function: Any, arguments: tuple) -> None:
        self.turn.acquire()
        try:
            function(*arguments)
        except BaseException as error:
            self.error = error
        self.ended = True
        self.back.release()

    def go_on(self) -> None:
        """Runs the partition until it waits or ends."""
        if not self.ended:
            self.turn.release()
            self.back.acquire()
        if self.error is not None:
            raise self.error

    def is_here(self) -> bool:
        return threading.current_thread() is self.thread

    def yield_turn(self) -> None:
        """Gives the turn back, from inside."""
        self.back.release()
        self.turn.acquire()


def _run_workers() -> None:
    """Runs every other partition until all wait or have ended."""
    before = None
    while before != Program.steps:
        before = Program.steps
        for worker in Program.workers:
            worker.go_on()


def _specialize(functions, warps, registers=None):
    (first, arguments), *others = functions
    Program.workers = [Worker(*other) for other in others]
    _run_workers()
    first(*arguments)
    _run_workers()
    if not all(worker.ended for worker in Program.workers):
        raise RuntimeError("a partition waits for ever")
    Program.workers = ()


def _arrive(barrier, *, count=1, pred=True):
    if not pred:
        return
    state = _barrier(barrier)
    state["arrived"] += count
    if state["arrived"] > state["count"]:
        raise RuntimeError("more arrivals at a barrier than it counts")
    if state["arrived"] == state["count"]:
        state.update(arrived=0, phases=state["phases"] + 1)
        Program.steps += 1
    if Program.eager and not any(worker.is_here() for worker in Program.workers):
        _run_workers()


def _wait(barrier, phase):
    """Returns when the barrier has completed this phase; meanwhile others run."""
    waiting = next((worker for worker in Program.workers if worker.is_here()), None)
    while not _has_passed(barrier, phase):
        if waiting is not None:
            waiting.yield_turn()
            continue
        before = Program.steps
        _run_workers()
        if before == Program.steps and not _has_passed(barrier, phase):
            raise RuntimeError("a barrier is waited for that nothing arrives at")


def _has_passed(barrier, phase):
    state = _barrier(barrier)
    if state["phases"] & 1 == int(phase):
        _complete_copies(state)
    return state["phases"] & 1 != int(phase)


def _barrier(x: Shared) -> dict:
    address = x.data.__array_interface__["data"][0]
    fresh = {"count": 1, "arrived": 0, "expected": 0, "copies": [], "phases": 0}
    return Program.barriers.setdefault(address, fresh)


def _issued() -> list[Pending]:
    """Returns the matmuls of the partition that runs, those that nobody has waited for."""
    return Program.issued.setdefault(threading.get_ident(), [])


def _multiply(a, b, acc, *, use_acc=True, precision=None, is_async=False):
    assert is_async
    issued = _issued()
    if isinstance(acc, Pending):
        pending = Pending([*acc.steps, (a, b, use_acc)], acc.start)
        issued[:] = [x for x in issued if x is not acc]
    else:
        pending = Pending([(a, b, use_acc)], acc)
    issued.append(pending)
    return pending


def _wait_for_matmuls(count, deps):
    """All but the last ``count`` are done; a matmul that others wait behind is done too."""
    issued = _issued()
    late = issued[len(issued) - count :] if count else []
    if any(x is y for x in deps for y in late):
        raise RuntimeError("a matmul is used that may still run")
    values = tuple(x.values() for x in deps)
    issued[:] = late
    return values[0] if len(values) == 1 else values


def _expect(barrier, size, pred=True):
    if pred:
        _barrier(barrier)["expected"] += size


def _start_copy(source, coordinates, barrier, buffer, pred=True):
    if not pred:
        return
    if buffer.shape != tuple(source.block_shape):
        raise TypeError(f"{source.block_shape} copied to {buffer.shape}")
    buffer.data[...] = np.nan
    _barrier(barrier)["copies"].append((source, [int(x) for x in coordinates], buffer))


def _complete_copies(state):
    """Fills the tiles that a barrier expects."""
    if state["expected"]:
        size = sum(source.nbytes_per_cta for source, _, _ in state["copies"])
        if size != state["expected"]:
            raise RuntimeError(f"a barrier expects {state['expected']} bytes and gets {size}")
        for source, coordinates, buffer in state["copies"]:
            buffer.data[...] = source.read(coordinates)
        state.update(expected=0, copies=[], phases=state["phases"] + 1)
        Program.steps += 1


def _load(pointer, mask=None, other=None, **_):
    at, mask = pointer.elements(mask)
    values = pointer.array[at]
    return _tensor(np.where(mask, values, np.asarray(0 if other is None else other, values.dtype)))


def _store(pointer, value, mask=None):
    value, mask, at = np.broadcast_arrays(np.asarray(value), True if mask is None else mask,
                                          np.asarray(pointer.offset))  # fmt: skip
    at, _ = Pointer(pointer.array, at).elements(mask)
    pointer.array[at[mask]] = value[mask].astype(pointer.array.dtype)


def _cumulate(x, axis, reverse=False):
    x = np.flip(x, axis) if reverse else x
    total = np.cumsum(np.asarray(x), axis, dtype=x.dtype)
    return _tensor(np.flip(total, axis) if reverse else total)


def _fused(a, b, c):
    wide = [np.asarray(x, np.float64) for x in (a, b, c)]
    return _tensor((wide[0] * wide[1] + wide[2]).astype(np.float32))


def _full(shape, value, dtype, layout=None):
    return _tensor(np.full([int(n) for n in shape], value, _dtype(dtype)))


def _float32(function):
    return lambda x: _tensor(function(np.asarray(x, np.float32)))


def _where(condition, x, y):
    """Scalars take the type of the other side; two of them are int32 or float32."""
    kinds = [np.asarray(v).dtype for v in (x, y) if isinstance(v, np.ndarray)]
    scalar = np.int32 if isinstance(x, int) and isinstance(y, int) else np.float32
    kind = functools.reduce(np.promote_types, kinds) if kinds else scalar
    return _tensor(np.where(condition, np.asarray(x, kind), np.asarray(y, kind)))


LANGUAGE = types.SimpleNamespace(
    program_id=lambda axis: _tensor(np.int32(Program.number)),
    arange=lambda start, end, layout=None: _tensor(np.arange(start, end, dtype=np.int32)),
    zeros=lambda shape, dtype, layout=None: _full(shape, 0, dtype),
    full=_full,
    load=_load,
    store=_store,
    where=_where,
    minimum=lambda x, y: _tensor(np.minimum(x, y)),
    maximum=lambda x, y: _tensor(np.maximum(x, y)),
    abs=lambda x: _tensor(np.abs(x)),
    floor=lambda x: _tensor(np.floor(x)),
    exp2=_float32(np.exp2),
    rsqrt=_float32(lambda x: 1 / np.sqrt(x)),
    fma=_fused,
    sum=lambda x, axis: _tensor(np.sum(np.asarray(x), axis, dtype=x.dtype)),
    cumsum=_cumulate,
    range=lambda *x, **_: range(*(int(n) for n in x)),
    static_range=range,
    barrier=lambda: None,
    convert_layout=lambda x, layout, **_: x,
    num_warps=lambda: 4,
    to_tensor=_tensor,
    warp_specialize=_specialize,
    allocate_shared_memory=lambda dtype, shape, layout: Shared(
        np.full([int(n) for n in shape], 0 if _dtype(dtype).kind == "i" else np.nan, _dtype(dtype)),
        layout,
    ),
)
BARRIERS = types.SimpleNamespace(
    MBarrierLayout=lambda: None,
    init=lambda barrier, count: _barrier(barrier).update(count=count),
    expect=_expect,
    wait=_wait,
    arrive=_arrive,
)


def _plain(value: Any, functions: dict) -> Any:
    """Returns a global of a kernel as NumPy's programs see it."""
    from triton.language import constexpr
    from triton.runtime.jit import JITFunction

    if isinstance(value, JITFunction):
        return lifted(value, functions)
    return value.value if isinstance(value, constexpr) else value


def lifted(kernel: Any, functions: dict | None = None) -> Any:
    """Returns a kernel as a function of Python, and so the functions it calls."""
    from triton.experimental.gluon import language as gl

    functions = {} if functions is None else functions
    if kernel in functions:
        return functions[kernel]
    fn = kernel.fn
    names = dict(fn.__globals__)
    made = types.FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__)
    functions[kernel] = made
    for name in fn.__code__.co_names:
        if name in names:
            names[name] = _plain(names[name], functions)
    language = types.SimpleNamespace(**vars(LANGUAGE))
    for name in ("SliceLayout", "NVMMADistributedLayout", "BlockedLayout", "DotOperandLayout",
                 "SwizzledSharedLayout"):  # fmt: skip
        setattr(language, name, getattr(gl, name))
    for name in ("float32", "bfloat16", "int32", "int64"):
        setattr(language, name, getattr(gl, name))
    language.constexpr = gl.constexpr
    names |= {
        "gl": language, "tl": language, "mbarrier": BARRIERS, "warpgroup_mma": _multiply,
        "tma": types.SimpleNamespace(async_load=_start_copy),
        "warpgroup_mma_wait": _wait_for_matmuls, "fence_async_shared": lambda: None,
        "range": LANGUAGE.range,
    }  # fmt: skip
    return made


def run_gluon(
    launch: BoundLaunch, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]
) -> None:
    """Runs a launch on arrays, writing into ``outputs``."""

    def leaf(value, path, constant):
        if isinstance(value, (In, Out)):
            array = (inputs if isinstance(value, In) else outputs)[value.index]
            return Pointer(array.reshape(-1))
        return Map(inputs[value.index], value) if isinstance(value, TensorMap) else value

    values = {**launch.arguments, **launch.constants}
    values = {name: map_leaves(x, leaf) for name, x in values.items()}
    kernel = lifted(launch.kernel)
    with np.errstate(invalid="ignore", over="ignore"):
        for number in range(launch.grid[0]):
            Program.number, Program.barriers, Program.issued = number, {}, {}
            kernel(**values)
            if any(Program.issued.values()):
                raise RuntimeError("a program ends before its matmuls")


@contextlib.contextmanager
def interpreted_gluon(*kernels: Any, eager: bool = True) -> Generator[list[str]]:
    """The interpreter runs these kernels here, not their stand-ins; gives the names of calls.

    ``eager``: whether partitions run as soon as they may, see ``Program``.
    """
    run, ran = interpret.run_launch, []

    def choose(
        launch: BoundLaunch, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]
    ) -> None:
        if launch.kernel in kernels:
            ran.append(launch.kernel.__name__)
            run_gluon(launch, inputs, outputs)
        else:
            run(launch, inputs, outputs)

    with (
        mock.patch.object(interpret, "run_launch", choose),
        mock.patch.object(Program, "eager", eager),
    ):
        yield ran

"""What stays in memory of calls seen before: a bounded number of compiled programs."""

from __future__ import annotations

import gc
import weakref

import jax
import numpy as np
import pytest

from ejkernel.ops import Executor, Kernel, differentiate
from ejkernel.ops.execution import program_cache
from ejkernel.ops.execution.program_cache import bounded_jit


class Scale(Kernel):
    def __init__(self):
        super().__init__(name="scale")

    def run(self, x, *, power=1, cfg):
        return x * 2.0**power


def ones(n):
    return jax.device_put(np.ones(n, np.float32))


def sizes(executor):
    """How many calls and programs an executor remembers."""
    return len(executor._programs._plans), len(executor._programs._programs)


def executables():
    gc.collect()
    return len(jax.local_devices()[0].client.live_executables())


@pytest.fixture
def limit(monkeypatch):
    monkeypatch.setattr(program_cache, "PROGRAMS_LIMIT", 2)
    return 2


def test_the_memory_of_calls_is_bounded(limit, monkeypatch):
    monkeypatch.setattr(program_cache, "PLANS_LIMIT", 3)
    executor = Executor()
    for power in range(6):
        executor(Scale(), ones(4), power=power)
    assert sizes(executor)[1] == limit
    for length in (4, 5):  # each state of the selector leads to a program by another key
        for _ in range(3):
            executor.selector.cache.put("another", None)
            executor(Scale(), ones(length))
    assert sizes(executor) == (3, limit)


def test_a_dropped_program_frees_its_executable_and_comes_back_right(limit):
    executor, kernel = Executor(), Scale()
    executor(kernel, ones(11))
    (entry,) = executor._programs._programs.values()
    dropped = weakref.ref(entry.function)
    del entry
    before = executables()
    for length in range(12, 20):
        np.testing.assert_array_equal(executor(kernel, ones(length)), 2 * np.ones(length))
    assert executables() <= before + limit - 1
    assert dropped() is None
    np.testing.assert_array_equal(executor(kernel, ones(11)), 2 * np.ones(11))


def test_gradients_of_dropped_programs_are_freed_too(limit):
    executor, kernel = Executor(), Scale()

    def gradient(length):
        _, pull = jax.vjp(lambda x: executor(kernel, x), ones(length))
        return pull(ones(length))[0]

    np.testing.assert_array_equal(gradient(21), 2 * np.ones(21))
    before = executables()
    for length in range(22, 30):
        gradient(length)
    assert executables() <= before + 3 * (limit - 1)


def test_the_least_recently_used_program_is_dropped(limit):
    traced = []

    class Traced(Scale):
        def run(self, x, *, cfg):
            traced.append(x.shape[0])
            return x

    executor, kernel = Executor(), Traced()
    for length in (1, 2, 1, 3, 1, 2):  # 3 takes the place of 2, 2 that of 3
        executor(kernel, ones(length))
    assert traced == [1, 2, 3, 2]


def test_numpy_and_jax_arrays_of_one_type_share_a_program():
    executor = Executor()
    for x in (ones(4), np.ones(4, np.float32), ones(5)):
        executor(Scale(), x)
    assert sizes(executor) == (3, 2)


def test_a_bounded_jit_traces_a_combination_once_and_forgets_the_oldest(limit):
    traced = []

    @bounded_jit
    def add(pair, *, by):
        traced.append((pair["x"].shape, by))
        return jax.tree.map(lambda x: x + by, pair)

    for length, by in ((1, 2), (1, 2), (3, 2), (1, 2), (1, 4), (3, 2)):
        np.testing.assert_array_equal(add({"x": ones(length)}, by=by)["x"], np.ones(length) + by)
    assert traced == [((1,), 2), ((3,), 2), ((1,), 4), ((3,), 2)]
    assert jax.jit(lambda x: add({"x": x}, by=2))(ones(3))["x"].shape == (3,)
    assert len(traced) == 4  # inside a trace too
    before = executables()
    for by in range(8):
        add({"x": ones(1)}, by=by)
    assert executables() <= before


def test_compiled_kernels_called_directly_are_bounded(limit, monkeypatch):
    """A backend's function is called without the executor, and may be called eagerly."""
    bounded = bounded_jit(differentiate._compiled.__wrapped__)
    monkeypatch.setattr(differentiate, "_compiled", bounded)

    class Double:
        has_backward = False

        def forward(self, work, arrays):
            return (2 * arrays["x"],), ()

    kernel = Double()

    def call(length):
        work = differentiate.Work(kernel, None, (), None, None)
        return differentiate.compiled(work, {"x": ones(length)})[0]

    for length in (31, 32):
        call(length)
    before = executables()
    for length in range(33, 40):
        np.testing.assert_array_equal(call(length), 2 * np.ones(length))
    assert executables() <= before

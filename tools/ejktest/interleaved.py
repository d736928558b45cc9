"""Programs of an interpreted Triton launch that run at the same time.

The interpreter runs one program after the other. Here each has a thread, and before every load,
store and atomic operation another one may go on, drawn by a seed: programs that count or wait for
each other meet in orders that a GPU may have too. Memory is sequentially consistent, so that a
missing fence is not seen.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import numpy as np

OPERATIONS = ("create_masked_load", "create_masked_store", "create_atomic_rmw")


class Turns:
    """Lets one thread of a launch go on at a time, drawn at random."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.changed = threading.Condition()
        self.alive: list[int] = []
        self.turn = -1
        self.errors: list[Exception] = []
        self.local = threading.local()

    def draw(self) -> None:
        """Gives the turn to any thread that has not ended."""
        if self.alive:
            self.turn = self.alive[int(self.rng.integers(len(self.alive)))]
        self.changed.notify_all()

    def switch(self, builder: Any) -> None:
        """Lets another program go on, and returns when it is this one's turn again."""
        number = getattr(self.local, "number", None)
        if number is None:
            return
        with self.changed:
            self.draw()
            self.changed.wait_for(lambda: self.turn == number)
            builder.grid_idx = self.local.index

    def run(self, builder: Any, programs: list[tuple[Any, Callable[[], Any]]]) -> None:
        """Runs programs, each with its index in the grid."""

        def work(number: int) -> None:
            self.local.number, (self.local.index, program) = number, programs[number]
            with self.changed:
                self.changed.wait_for(lambda: self.turn == number)
                builder.grid_idx = self.local.index
            try:
                program()
            except Exception as error:
                self.errors.append(error)
            with self.changed:
                self.alive.remove(number)
                self.draw()

        self.alive = list(range(len(programs)))
        threads = [threading.Thread(target=work, args=(n,)) for n in self.alive]
        for thread in threads:
            thread.start()
        with self.changed:
            self.draw()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


class Gathered:
    """A kernel that the interpreter calls once a program: the last call runs all of them."""

    def __init__(self, fn: Any, builder: Any, turns: Turns) -> None:
        self.fn, self.builder, self.turns = fn, builder, turns
        self.__name__, self.__globals__ = fn.__name__, fn.__globals__
        self.__annotations__ = fn.__annotations__
        self.__signature__ = inspect.signature(fn)
        self.programs: list[tuple[Any, Callable[[], Any]]] = []

    def __call__(self, **arguments: Any) -> None:
        self.programs.append((self.builder.grid_idx, lambda: self.fn(**arguments)))
        if len(self.programs) == math.prod(self.builder.grid_dim):
            self.turns.run(self.builder, self.programs)


@contextlib.contextmanager
def interleaved(seed: int) -> Generator[None]:
    """Runs the programs of every interpreted launch at the same time."""
    from triton.runtime import interpreter as rt

    from ejkernel.kernels.triton import interpret_builder

    interpret_builder.install()
    builder, turns = rt.interpreter_builder, Turns(np.random.default_rng(seed))

    class Executor(rt.GridExecutor):
        def __init__(self, fn: Any, *others: Any, **options: Any) -> None:
            super().__init__(Gathered(fn, builder, turns), *others, **options)

    def switching(operation: Callable[..., Any]) -> Callable[..., Any]:
        def switch_first(self: Any, *arguments: Any, **options: Any) -> Any:
            turns.switch(builder)
            return operation(self, *arguments, **options)

        return switch_first

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(rt, "GridExecutor", Executor))
        for name in OPERATIONS:
            old = getattr(rt.InterpreterBuilder, name)
            stack.enter_context(mock.patch.object(rt.InterpreterBuilder, name, switching(old)))
        yield

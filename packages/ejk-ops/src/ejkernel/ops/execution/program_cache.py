"""Compiled programs of recent calls, with a limit; the least recently used is dropped first."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import jax

PROGRAMS_LIMIT = 256
"""Compiled programs that each cache keeps; the least recently used is dropped first.

A program for the CPU takes 2 to 4 MB and some 60 of the 65,530 memory maps that Linux gives a
process; JAX, which keeps 4,096 programs, ends the process when there are no more.
"""

PLANS_LIMIT = 1024
"""Calls for which the way to their program is remembered; the oldest are forgotten first."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A program, what it is known by, and when it was last used."""

    program: Hashable
    function: Callable[..., Any]
    last_use: int = 0


class ProgramCache:
    """Jitted functions, and the calls that lead to each. Thread safe.

    Each function serves one set of array types. Nothing else holds it, so JAX frees its traces and
    executables when it is dropped. Several calls lead to one function: the key of a call holds
    everything that the choice of a config depends on, which changes more often than the choice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses = itertools.count()
        self._programs: dict[Hashable, _Entry] = {}
        self._plans: dict[Hashable, _Entry] = {}

    def find(self, call: Hashable) -> Callable[..., Any] | None:
        """The function of a call, None for a new one."""
        entry = self._plans.get(call)
        if entry is None:
            return None
        # Cheaper than an ordered dict, which would hash the key of the call once more.
        entry.last_use = next(self._uses)
        return entry.function

    def get(self, program: Hashable, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The function under ``program``, made if need be."""
        entry = self._programs.get(program) or _Entry(program, make())
        with self._lock:
            entry = self._programs.setdefault(program, entry)
            entry.last_use = next(self._uses)
            while len(self._programs) > PROGRAMS_LIMIT:
                self._drop_oldest()
        return entry.function

    def remember(self, call: Hashable, program: Hashable) -> None:
        """Let ``find(call)`` give the function under ``program``."""
        with self._lock:
            entry = self._programs.get(program)
            if entry is not None:
                self._plans[call] = entry
            while len(self._plans) > PLANS_LIMIT:
                del self._plans[next(iter(self._plans))]

    def _drop_oldest(self) -> None:
        oldest = min(self._programs.values(), key=attrgetter("last_use"))
        del self._programs[oldest.program]
        for call in [call for call, entry in self._plans.items() if entry is oldest]:
            del self._plans[call]


def bounded_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.jit``, with a limit on the calls whose traces and executables stay in memory.

    JAX keeps every trace of a jitted function as long as the function lives. Here each combination
    of array types and static arguments has a jitted function of its own, and the least recently
    used one is dropped. Positional arguments are arrays or pytrees of arrays, keyword arguments
    are static.
    """

    @functools.lru_cache(maxsize=PROGRAMS_LIMIT)
    def program(treedef: Any, types: Hashable, static: tuple[tuple[str, Any], ...]) -> Any:
        # JAX knows traces by the function, so a partial is new for each program.
        return jax.jit(functools.partial(function, **dict(static)))

    @functools.wraps(function)
    def call(*args: Any, **static: Any) -> Any:
        leaves, treedef = jax.tree_util.tree_flatten(args)
        types = tuple(map(jax.typeof, leaves))
        return program(treedef, types, tuple(static.items()))(*args)

    return call

"""Configs in memory, and the context managers that override selection for a while."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Generator, Hashable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from ejkernel.ops.batch_invariance import batch_invariance
from ejkernel.ops.execution.freeze import ByIdentity
from ejkernel.ops.interpret import interpret_override
from ejkernel.ops.utils.copying import Copyable

_serials = itertools.count()


class _Latch:
    """Lock of one key and how many threads hold or await it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0


class ConfigCache(Copyable, process_local={"_latches": dict, "_serial": _serials.__next__}):
    """Configs by key, in memory. Any hashable key, any config object. Thread safe.

    ``get`` never waits. A caller that may tune a key does so under ``tuning(key)``, so that other
    threads that need it wait and then find the result.
    """

    def __init__(self) -> None:
        self._configs: dict[Hashable, Any] = {}
        self._lock = threading.Lock()
        self._latches: dict[Hashable, _Latch] = {}
        self._version = 0
        self._serial = next(_serials)

    @classmethod
    def from_results(cls, results: Iterable[Any]) -> ConfigCache:
        """A cache of the winners of the results that have one (``AutotuneResult``)."""
        cache = cls()
        for result in results:
            if result.best is not None:
                cache.put(result.key, result.best)
        return cache

    @property
    def version(self) -> int:
        """Counter of changes; equal versions of one cache have equal content."""
        return self._version

    @property
    def state(self) -> tuple[int, int]:
        """Hashable, equal only for the same cache with the same content."""
        return self._serial, self._version

    def put(self, key: Hashable, cfg: Any) -> None:
        """Store ``cfg`` under ``key``, replacing what was there."""
        with self._lock:
            self._configs[key] = cfg
            self._version += 1

    def get(self, key: Hashable, default: Any = None) -> Any:
        """The config under ``key``, else ``default``."""
        return self._configs.get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self._configs

    def __len__(self) -> int:
        return len(self._configs)

    def keys(self) -> list[Hashable]:
        """All keys, oldest first."""
        with self._lock:
            return list(self._configs)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._configs.clear()
            self._version += 1

    @contextlib.contextmanager
    def tuning(self, key: Hashable) -> Generator[None]:
        """Hold ``key``: other threads that enter ``tuning(key)`` wait until this block ends.

        The pattern is ``with cache.tuning(key): cfg = cache.get(key)``, and when that is None,
        find a config and ``put`` it. A thread may enter again for the same key.
        """
        with self._lock:
            latch = self._latches.setdefault(key, _Latch())
            latch.users += 1
        try:
            with latch.lock:
                yield
        finally:
            with self._lock:
                latch.users -= 1
                if not latch.users:
                    del self._latches[key]

    def __repr__(self) -> str:
        return f"ConfigCache({len(self)} configs)"


Overlay = ConfigCache | Mapping[Any, Any]

_overlays: ContextVar[tuple[Overlay, ...]] = ContextVar("ejkernel_overlays", default=())
_autotune: ContextVar[bool | None] = ContextVar("ejkernel_autotune", default=None)


@contextlib.contextmanager
def overlay_cache(cache: Overlay) -> Generator[None]:
    """Within the block, configs of ``cache`` come before all cached, tuned and heuristic ones.

    Looked up by exact key, then by kernel name; inner blocks before outer ones. An explicit
    ``cfg=`` still wins. Holds for the current thread and async task.

    Args:
        cache: a ConfigCache or a mapping, from keys or kernel names to configs.

    Raises:
        TypeError: ``cache`` is neither.
    """
    if not isinstance(cache, Mapping) and not (hasattr(cache, "get") and hasattr(cache, "keys")):
        raise TypeError(f"cache must be a ConfigCache or a mapping, got {cache!r}")
    token = _overlays.set((cache, *_overlays.get()))
    try:
        yield
    finally:
        _overlays.reset(token)


@contextlib.contextmanager
def policy_override(autotune: bool) -> Generator[None]:
    """Within the block, autotuning is on or off, whatever the selector and the variable say.

    The innermost block decides. Holds for the current thread and async task.
    """
    if not isinstance(autotune, bool):
        raise TypeError(f"autotune must be a bool, got {autotune!r}")
    token = _autotune.set(autotune)
    try:
        yield
    finally:
        _autotune.reset(token)


def overlays() -> tuple[Overlay, ...]:
    """The overlays in force, innermost first."""
    return _overlays.get()


def find_overlay(key: Hashable, kernel_name: str) -> Any:
    """The config that the overlays in force give for a call, None when they have none."""
    for cache in _overlays.get():
        for name in (key, kernel_name):
            cfg = cache.get(name)
            if cfg is not None:
                return cfg
    return None


def autotune_override() -> bool | None:
    """Returns the setting of the innermost ``policy_override``, None outside any."""
    return _autotune.get()


def selection_state() -> Hashable:
    """Returns the state of the context managers in force, as a cheap hashable.

    Two calls with equal states, in equal environments, with equal caches, choose alike.
    """
    layers = _overlays.get()
    states = tuple([_overlay_state(c) for c in layers])
    return _autotune.get(), interpret_override(), batch_invariance.get(), states


def _overlay_state(cache: Overlay) -> Hashable:
    if isinstance(cache, ConfigCache):
        return cache.state
    # A mapping may be changed by its owner: its content is its state.
    return frozenset([(key, ByIdentity(cache.get(key))) for key in cache.keys()])

"""Recording of invocations: which calls a program makes, so that they can be tuned together."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from ejkernel.ops.core.invocation import AnyKernel, Invocation

_recorded: dict[str, Invocation] = {}
_lock = threading.Lock()
_generation = 0
_collected: ContextVar[dict[str, Invocation] | None] = ContextVar("collected", default=None)


def record_invocation(kernel: AnyKernel, inv: Invocation) -> None:
    """Remember a call by its key, shapes only. With ``EJKERNEL_OPS_RECORD=1`` executors do it.

    Args:
        kernel: the kernel; need not be the one in ``inv``.
        inv: the call.
    """
    if not isinstance(inv, Invocation):
        raise TypeError(f"inv must be an Invocation, got {inv!r}")
    if inv.kernel is not kernel:
        inv = dataclasses.replace(inv, kernel=kernel)
    with _lock:
        _recorded.setdefault(inv.key, inv.abstract())


def get_invocations() -> list[Invocation]:
    """The recorded calls, one per key, in order of their first appearance."""
    with _lock:
        return list(_recorded.values())


def clear_invocations() -> None:
    """Forget all recorded calls."""
    with _lock:
        _recorded.clear()
    _advance_generation()


def generation() -> int:
    """Changes whenever the record is cleared, and where a collection begins and ends."""
    return _generation


def _advance_generation() -> None:
    global _generation
    with _lock:
        _generation += 1


@contextmanager
def collect_invocations() -> Generator[dict[str, Invocation]]:
    """Collects the calls of this thread by key while it is active; executors tune none of them.

    Yields:
        The calls, by key in the order of their first appearance, filled as they are made.
    """
    calls: dict[str, Invocation] = {}
    _advance_generation()  # executors decide again about calls that they remember
    token = _collected.set(calls)
    try:
        yield calls
    finally:
        _collected.reset(token)
        _advance_generation()


def collected() -> dict[str, Invocation] | None:
    """Returns the calls of the collection that is active in this thread; None outside of one."""
    return _collected.get()

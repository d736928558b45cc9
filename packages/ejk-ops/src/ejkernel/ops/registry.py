"""Recording of invocations: which calls a program makes, so that they can be tuned together."""

from __future__ import annotations

import dataclasses
import threading

from ejkernel.ops.core.invocation import AnyKernel, Invocation

_recorded: dict[str, Invocation] = {}
_lock = threading.Lock()
_generation = 0


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
    global _generation
    with _lock:
        _recorded.clear()
        _generation += 1


def generation() -> int:
    """Changes whenever the record is cleared."""
    return _generation

"""Interpretation: running GPU and TPU kernels, slowly, on a machine without the hardware."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar

from ejkernel.ops import env

_override: ContextVar[bool | None] = ContextVar("ejkernel_interpret", default=None)


@contextlib.contextmanager
def interpret_mode(enabled: bool = True) -> Generator[None]:
    """Within the block, a forced platform whose hardware is absent runs in its interpreter.

    ``interpret_mode(False)`` switches ``EJKERNEL_INTERPRET=1`` off. Holds for the current thread
    and async task. Automatic dispatch never chooses an interpreted kernel.
    """
    token = _override.set(bool(enabled))
    try:
        yield
    finally:
        _override.reset(token)


def interpret_override() -> bool | None:
    """Returns the setting of the innermost ``interpret_mode``, None outside any."""
    return _override.get()


def interpreting() -> bool:
    """Returns whether interpretation is on: the innermost ``interpret_mode``, else the variable."""
    override = _override.get()
    return env.interpret() if override is None else override

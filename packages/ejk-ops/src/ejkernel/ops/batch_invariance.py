"""Batch invariance: bits of a sequence's results that no other sequence of the call can change."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar

from ejkernel.ops import env

batch_invariance: ContextVar[bool | None] = ContextVar("ejkernel_batch_invariant", default=None)
"""The setting of the innermost block, or of the program that is traced; None outside any."""


@contextlib.contextmanager
def batch_invariant(enabled: bool = True) -> Generator[None]:
    """Within the block, a sequence's output and gradients have the same bits in every batch.

    They depend on the sequence's inputs, on heads, dims, dtypes, options and page size, and on the
    device and the versions: not on the batch size, on other rows, on their order, on the pages it
    has, the width of tables or the size of a cache. Implementations that cannot promise this refuse
    the call, and ``explain`` says so; stored, shipped and tuned configs are not used. Read while a
    call is traced: a function that was traced outside keeps what it was traced with. Holds for the
    current thread and async task; ``batch_invariant(False)`` switches
    ``EJKERNEL_BATCH_INVARIANT=1`` off.
    """
    token = batch_invariance.set(bool(enabled))
    try:
        yield
    finally:
        batch_invariance.reset(token)


def is_batch_invariant() -> bool:
    """Returns whether calls are batch-invariant: the innermost block, else the variable."""
    override = batch_invariance.get()
    return env.batch_invariant() if override is None else override

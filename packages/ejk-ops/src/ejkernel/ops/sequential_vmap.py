"""Sequential vmap, for calls of which one program cannot run several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax


def sequential_vmap(run: Callable[..., Any], arrays: Sequence[Any], mapped: Sequence[bool]) -> Any:
    """Runs ``run(*arrays)`` in a loop over the leading axis of the ``mapped`` arrays."""
    moving = [x for x, m in zip(arrays, mapped, strict=True) if m]

    def run_slice(slices: list[jax.Array]) -> Any:
        remaining = iter(slices)
        return run(*(next(remaining) if m else x for x, m in zip(arrays, mapped, strict=True)))

    return jax.lax.map(run_slice, moving)

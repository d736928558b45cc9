"""Mapped calls one after the other, where one program has no room or no order for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax


def in_turn(run: Callable[..., Any], arrays: Sequence[Any], mapped: Sequence[bool]) -> Any:
    """``run(*arrays)`` in a loop over the leading axis of those that are ``mapped``."""
    moving = [x for x, m in zip(arrays, mapped, strict=True) if m]

    def one(slices: list[jax.Array]) -> Any:
        rest = iter(slices)
        return run(*(next(rest) if m else x for x, m in zip(arrays, mapped, strict=True)))

    return jax.lax.map(one, moving)

"""The error of a wrong argument."""

from __future__ import annotations

from typing import Any


class InvalidArgument(TypeError, ValueError):
    """An argument has the wrong class, dtype, rank or axis size.

    Derives from both TypeError and ValueError, so either may be caught. The message names the
    argument, what is expected and what was given.
    """


def describe(x: Any) -> str:
    """``int32[2, 16]`` for anything with a shape and a dtype, else the class and the value."""
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{dtype}[{', '.join(map(str, shape))}]"
    return f"{type(x).__name__} {x!r:.80}"


def invalid(argument: str, expected: str, actual: Any) -> InvalidArgument:
    """InvalidArgument with the message every function of this package uses."""
    got = actual if isinstance(actual, str) else describe(actual)
    return InvalidArgument(f"{argument}: expected {expected}, got {got}")

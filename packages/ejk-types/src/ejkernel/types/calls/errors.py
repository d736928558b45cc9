"""Messages: the argument, what is legal, what was given."""

from __future__ import annotations

from typing import Any

from ejkernel.types.calls.words import given
from ejkernel.types.errors import InvalidArgument

MAX_LENGTH = 2**30
"""No axis is longer; sums of two lengths of at most this still fit int32 positions."""


def invalid(name: str, legal: str, value: Any) -> InvalidArgument:
    """Wrong class, dtype, rank, size or inconsistent axes."""
    return InvalidArgument(f"{name}: expected {legal}, given {given(value)}")


def out_of_range(name: str, legal: str, value: Any) -> ValueError:
    """A bad value."""
    return ValueError(f"{name}: given {value!r}, expected {legal}")

"""Triton's names for the precision of float32 matmuls."""

from __future__ import annotations

from typing import Any

from ejkernel.types.arrays import NO_LEVEL, precision_level

NAMES = {"default": "tf32", "high": "tf32x3", "highest": "ieee"}


def precision_name(precision: Any, dtype: str) -> str:
    """Returns Triton's name of a precision; "" for an algorithm, which has no name."""
    return NAMES.get(precision_level(precision, dtype) or "", "")


def refused_precision(name: str) -> str | None:
    """Returns why a precision of this name is not supported, None if it is."""
    return None if name else NO_LEVEL

"""Precision of float32 products in Triton's words."""

from __future__ import annotations

from typing import Any

from ejkernel.types.arrays import NO_LEVEL, precision_level

NAMES = {"default": "tf32", "high": "tf32x3", "highest": "ieee"}


def precision_name(precision: Any, dtype: str) -> str:
    """Triton's name of a precision; "" for an algorithm, for which it has none."""
    return NAMES.get(precision_level(precision, dtype) or "", "")


def refused_precision(name: str) -> str | None:
    """Why a precision of this name is refused, None where it is not."""
    return None if name else NO_LEVEL

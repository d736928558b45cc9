"""Float32 precision in Triton's words."""

from __future__ import annotations

from typing import Any


def dot_precision(precision: Any) -> str:
    """jax.lax precision of a float32 product as Triton names it."""
    if isinstance(precision, (tuple, list)):
        order = ("tf32", "tf32x3", "ieee")
        return max((dot_precision(p) for p in precision), key=order.index)
    text = "default" if precision is None else str(getattr(precision, "name", precision)).lower()
    return {"highest": "ieee", "float32": "ieee", "high": "tf32x3"}.get(text, "tf32")

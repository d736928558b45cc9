"""What these kernels take, and why not the rest."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

DTYPES = ("bfloat16", "float32")
MAX_DIM = 256


def refusal(
    q_shape: tuple, v_shape: tuple, dtype: Any, logits_dtype: Any, biased: bool, dropout: float
) -> str | None:
    """Why sizes, dtypes or options are not supported, None when they are."""
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        return f"query: {name} is not supported, only {' and '.join(DTYPES)}"
    if jnp.dtype(logits_dtype) == jnp.dtype("float64"):
        return "logits_dtype: float64 is not supported"
    for argument, dim in (("query", q_shape[3]), ("value", v_shape[3])):
        if not 0 < dim <= MAX_DIM:
            return f"{argument}: head dim {dim} is not between 1 and {MAX_DIM}"
    if biased:
        return "bias: a [q, k] bias would be read once a head, which costs more than the products"
    if dropout:
        return "dropout_prob: dropout is not supported"
    return None


def dot_precision(precision: Any) -> str:
    """jax.lax precision of a float32 product: "default" (one bfloat16 pass) or "highest"."""
    if isinstance(precision, (tuple, list)):
        return max(map(dot_precision, precision), key=("default", "highest").index)
    text = "default" if precision is None else str(getattr(precision, "name", precision)).lower()
    return "highest" if text in ("highest", "float32", "high", "tensorfloat32") else "default"

"""What these kernels take, and float32 precision in Triton's words."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.structure import Unsupported

DTYPES = ("float16", "bfloat16", "float32")
MAX_DIM = 256


def refusal(q_shape: tuple, v_shape: tuple, dtype: Any, logits_dtype: Any) -> str | None:
    """Why sizes or dtypes are not supported, None when they are."""
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        return f"query: {name} is not supported, only {', '.join(DTYPES)}"
    if jnp.dtype(logits_dtype) == jnp.dtype("float64"):
        return "logits_dtype: float64 is not supported"
    for argument, dim in (("query", q_shape[3]), ("value", v_shape[3])):
        if not 0 < dim <= MAX_DIM or dim % 8:
            return f"{argument}: head dim {dim} is not a multiple of 8 from 8 to {MAX_DIM}"
    return None


def check_supported(q: jax.Array, v: jax.Array, dtype: Any, logits_dtype: Any) -> None:
    reason = refusal(q.shape, v.shape, dtype, logits_dtype)
    if reason is not None:
        raise Unsupported(reason)


def dot_precision(precision: Any) -> str:
    """jax.lax precision of a float32 product as Triton names it."""
    if isinstance(precision, (tuple, list)):
        order = ("tf32", "tf32x3", "ieee")
        return max((dot_precision(p) for p in precision), key=order.index)
    text = "default" if precision is None else str(getattr(precision, "name", precision)).lower()
    return {"highest": "ieee", "float32": "ieee", "high": "tf32x3"}.get(text, "tf32")

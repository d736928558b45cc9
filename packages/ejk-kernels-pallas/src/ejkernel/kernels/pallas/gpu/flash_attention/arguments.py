"""What these kernels take."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

DTYPES = ("float16", "bfloat16")
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


def refusal(
    q_shape: tuple, v_shape: tuple, dtype: Any, logits_dtype: Any, biased: bool, dropout: float
) -> str | None:
    """Why sizes, dtypes or options are not supported, None when they are."""
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        return f"query: {name} is not supported, only {' and '.join(DTYPES)}"
    if jnp.dtype(logits_dtype) == jnp.dtype("float64"):
        return "logits_dtype: float64 is not supported"
    if biased:
        return "bias: not supported"
    if dropout > 0.0:
        return "dropout_prob: dropout is not supported"
    dims = (q_shape[3], v_shape[3])
    if dims not in DIMS:
        allowed = ", ".join(f"{d} with {dv}" if d != dv else str(d) for d, dv in DIMS)
        return f"query: head dim {dims[0]} with value dim {dims[1]} is not among {allowed}"
    return None

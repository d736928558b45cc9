"""Calls of linear attention."""

from __future__ import annotations

import functools
from typing import Any

import jax

from ejkernel.modules.workloads.call import WIDTH
from ejkernel.modules.workloads.families import LinearShape

LAYER, LAYERS = 0, 24  # of lightning attention: the decay depends on them


def _arrays(shape: LinearShape, operation: str) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    b, s, h, d = shape.batch, shape.length, shape.heads, shape.head_dim
    hk = h if shape.kv_heads is None else shape.kv_heads
    arrays = {
        "query": jax.random.normal(keys[0], (b, s, h, d), shape.dtype),
        "key": jax.random.normal(keys[1], (b, s, hk, d), shape.dtype),
        "value": jax.random.normal(keys[2], (b, s, hk, shape.value_dim), shape.dtype),
    }
    if operation != "lightning_attention":
        decay = -jax.nn.softplus(jax.random.normal(keys[3], (b, s, h, d))) / 16
        arrays["g"] = decay.astype(shape.dtype)
    return arrays


def build(shape: LinearShape, operation: str) -> dict[str, Any]:
    """The fields of a Call: the state is updated and read once per token."""
    lightning = operation == "lightning_attention"
    rows = shape.batch * shape.length * shape.heads
    gate = 0 if lightning else shape.head_dim
    numbers = 2 * shape.head_dim + gate + 2 * shape.value_dim
    return {
        "make": functools.partial(_arrays, shape, operation),
        "options": {"layer_idx": LAYER, "num_layers": LAYERS} if lightning else {},
        "flops": 4.0 * rows * shape.head_dim * shape.value_dim,
        "moved": float(rows * numbers * WIDTH[shape.dtype]),
        "dtype": shape.dtype,
        "gradients": ("query", "key", "value") + (() if lightning else ("g",)),
    }

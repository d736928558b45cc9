"""Calls of linear attention."""

from __future__ import annotations

import functools
from typing import Any

import jax

from ejkernel.modules.workloads.call import WIDTH
from ejkernel.modules.workloads.families import LinearShape
from ejkernel.modules.workloads.paged import normals

LAYER, LAYERS = 0, 24  # of lightning attention: the decay depends on them


def _arrays(shape: LinearShape, operation: str) -> dict[str, Any]:
    b, s, h, d = shape.batch, shape.length, shape.heads, shape.head_dim
    hk = h if shape.kv_heads is None else shape.kv_heads
    arrays = normals(
        shape.dtype, query=(b, s, h, d), key=(b, s, hk, d), value=(b, s, hk, shape.value_dim)
    )
    if operation != "lightning_attention":
        size = (b, s, h) if shape.per_head else (b, s, h, d)
        decay = -jax.nn.softplus(jax.random.normal(jax.random.key(1), size)) / 16
        arrays["g"] = decay.astype(shape.dtype)
    if shape.state:
        arrays |= normals("float32", initial_state=(b, h, d, shape.value_dim))
    return arrays


def linear(shape: LinearShape, operation: str) -> dict[str, Any]:
    """The fields of a Call: the state is updated and read once per token, and where it is given
    read and written once."""
    lightning = operation == "lightning_attention"
    rows = shape.batch * shape.length * shape.heads
    gate = 0 if lightning else 1 if shape.per_head else shape.head_dim
    options = {"layer_idx": LAYER, "num_layers": LAYERS} if lightning else {}
    states = shape.batch * shape.heads * shape.head_dim * shape.value_dim
    numbers = 2 * shape.head_dim + gate + 2 * shape.value_dim
    gates = () if lightning else ("g",)
    return {
        "make": functools.partial(_arrays, shape, operation),
        "options": options | ({"return_state": True} if shape.state else {}),
        "flops": 4.0 * rows * shape.head_dim * shape.value_dim,
        "moved": float(rows * numbers * WIDTH[shape.dtype] + 8 * states * shape.state),
        "dtype": shape.dtype,
        "gradients": () if shape.state else ("query", "key", "value", *gates),
    }

"""Calls of the operations on dense queries, keys and values."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules.quantize import quantize_attention
from ejkernel.modules.workloads.call import WIDTH
from ejkernel.modules.workloads.families import AttentionShape
from ejkernel.modules.workloads.paged import normals
from ejkernel.types import MaskInfo

BLOCK = 128  # of block-sparse patterns
DENSITY = 0.1
SELECTED, SELECTED_BLOCK = 16, 64  # of native sparse attention: blocks per token, their length


def qkv(shape: AttentionShape) -> dict[str, Any]:
    b, h, hk = shape.batch, shape.heads, shape.kv_heads
    shapes = {
        "query": (b, shape.q_len, h, shape.head_dim),
        "key": (b, shape.keys, hk, shape.head_dim),
        "value": (b, shape.keys, hk, shape.value_dim),
    }
    return normals(shape.dtype, **shapes, **({"bias": shape.bias_shape} if shape.bias else {}))


def _quantized(shape: AttentionShape) -> dict[str, Any]:
    """Returns operands of 8 bits and their scales, one a head."""
    arrays = qkv(dataclasses.replace(shape, dtype="bfloat16"))
    scales = ("q_scale", "k_scale", "v_scale")
    return dict(zip((*arrays, *scales), quantize_attention(*arrays.values()), strict=True))


def _documents(length: int, shape: AttentionShape) -> jax.Array:
    ids = np.arange(length) * shape.documents // length
    return jnp.asarray(np.broadcast_to(ids, (shape.batch, length)), jnp.int32)


def _arrays(shape: AttentionShape, operation: str) -> dict[str, Any]:
    arrays = _quantized(shape) if WIDTH[shape.dtype] == 1 else qkv(shape)
    if operation == "native_sparse_attention":
        arrays.pop("bias", None)
        return arrays | _gates(shape)
    if shape.documents > 1:
        arrays["mask_info"] = MaskInfo.from_segments(
            _documents(shape.q_len, shape), _documents(shape.keys, shape)
        )
    if shape.sinks and operation != "scaled_dot_product_attention":
        arrays["softmax_aux"] = jnp.ones((shape.heads, shape.sinks), jnp.float32)
    if operation == "blocksparse_attention":
        arrays["block_mask"] = jnp.asarray(_pattern(shape))
    if operation == "attention" and shape.dropout:
        arrays["dropout_rng"] = jax.random.key(0)
    return arrays


def _branches(shape: AttentionShape) -> tuple[str, ...]:
    """Gates of native sparse attention: two, and the sliding branch's if there is a window."""
    return ("g_cmp", "g_slc", *(["g_swa"] if shape.window is not None else []))


def _gates(shape: AttentionShape) -> dict[str, jax.Array]:
    size = (shape.batch, shape.q_len, shape.heads)
    drawn = normals("float32", **dict.fromkeys(_branches(shape), size))
    return {name: jax.nn.sigmoid(x) for name, x in drawn.items()}


def _pattern(shape: AttentionShape) -> np.ndarray:
    heads = shape.heads if shape.per_head else 1
    blocks = (1, heads, -(-shape.q_len // BLOCK), -(-shape.keys // BLOCK))
    density = DENSITY if shape.density is None else shape.density
    return np.random.default_rng(0).random(blocks) < density


def _options(shape: AttentionShape, operation: str) -> dict[str, Any]:
    window = {} if shape.window is None else {"sliding_window": shape.window}
    if operation == "native_sparse_attention":
        return {"block_counts": SELECTED, "block_size": SELECTED_BLOCK, **window}
    options: dict[str, Any] = {"causal": shape.causal, **window}
    if operation == "scaled_dot_product_attention":
        return options
    if shape.soft_cap is not None:
        options["logits_soft_cap"] = shape.soft_cap
    if shape.dropout:
        options["dropout_prob"] = shape.dropout
        options |= {"deterministic": False} if operation == "attention" else {"dropout_seed": 0}
    if operation == "blocksparse_attention":
        options |= {"q_block_size": BLOCK, "kv_block_size": BLOCK}
    if operation == "ring_attention":
        options |= {"axis_name": "sp", "mesh": jax.sharding.Mesh(_ring(shape), ("sp",))}
    return options


def _ring(shape: AttentionShape) -> np.ndarray:
    """Returns the most devices whose number divides both lengths."""
    devices = jax.devices()
    length = math.gcd(shape.q_len, shape.keys)
    count = next(n for n in range(len(devices), 0, -1) if length % n == 0)
    return np.asarray(devices[:count])


def _flops(shape: AttentionShape, operation: str) -> float:
    if operation == "blocksparse_attention":
        return shape.flops() * float(_pattern(shape).mean())
    if operation != "native_sparse_attention":
        return shape.flops()
    # every token sees its selected blocks, and the means of the blocks before it
    seen = min(SELECTED * SELECTED_BLOCK, shape.keys / 2) + shape.keys / SELECTED_BLOCK / 2
    if shape.window is not None:
        seen += min(shape.window + 1, shape.keys / 2)
    rows = shape.batch * shape.heads * shape.q_len
    return 2.0 * rows * seen * (shape.head_dim + shape.value_dim)


def attention(shape: AttentionShape, operation: str) -> dict[str, Any]:
    """The fields of a Call."""
    dims = shape.head_dim + shape.value_dim
    moved = shape.q_len * shape.heads * dims + shape.keys * shape.kv_heads * dims
    if operation == "attention":  # its second output is the weights
        moved += shape.heads * shape.q_len * shape.keys
    moved *= shape.batch
    if shape.bias and operation != "native_sparse_attention":
        moved += math.prod(shape.bias_shape)
    gradients: tuple[str, ...] = ("query", "key", "value")
    if operation == "native_sparse_attention":
        gradients += _branches(shape)
    if WIDTH[shape.dtype] == 1:
        gradients = ()
    return {
        "make": functools.partial(_arrays, shape, operation),
        "options": _options(shape, operation),
        "flops": _flops(shape, operation),
        "moved": float(WIDTH[shape.dtype] * moved),
        "dtype": shape.dtype,
        "gradients": gradients,
    }

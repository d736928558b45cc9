"""Scales of query, key and value, and operands of 8 bits: ``value = stored * scale``.

Scales of wider operands are multiplied into them, so that kernels see none. Scales of 8-bit
operands are operands of their own in canonical form: float32 ``[batch, heads, blocks]`` of query
and key, where a block has ``ceil(length / blocks)`` tokens, and ``[batch, kv_heads]`` of value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.arrays import is_eight_bit, result_dtype
from ejkernel.types.calls.canonicalize import float_dtype
from ejkernel.types.calls.words import invalid

SCALES = {"q_scale": "query", "k_scale": "key", "v_scale": "value"}
FLOAT8 = np.dtype(jnp.float8_e4m3fn)
DEFAULT_OUTPUT = np.dtype(jnp.bfloat16)
FORWARD_ONLY = (
    "flash_attention: query, key and value of 8 bits are for inference, no gradient goes through "
    "the call, its scales included; to train, give them in 16 bits or more"
)


def canonicalize_scales(a: dict[str, Any]) -> None:
    """Checks dtypes and scales, multiplies wider operands by their scales, keeps others.

    Raises:
        InvalidArgument: one or two of three operands of 8 bits, a scale of another shape, or an
            output of 8 bits.
    """
    narrow = [name for name in SCALES.values() if a[name].dtype == FLOAT8]
    for name in SCALES.values():
        if narrow and name not in narrow:
            legal = f"{a[narrow[0]].dtype}, as {narrow[0]} is, or all three wider"
            raise invalid(name, legal, a[name])
    if a["out_dtype"] is not None:
        a["out_dtype"] = _output_dtype(a)
    for name, data in SCALES.items():
        if a[name] is None:
            continue
        scale, x = jnp.asarray(a[name]), a[data]
        _check_scale(name, scale, x, a[name])
        if not narrow:
            a[data], a[name] = _multiplied(x, scale), None
        elif name == "v_scale":
            a[name] = jnp.broadcast_to(scale.astype(jnp.float32), (x.shape[0], x.shape[2]))
        else:
            blocks = scale if scale.ndim == 3 else jnp.broadcast_to(scale, (x.shape[0], x.shape[2]))
            a[name] = blocks.astype(jnp.float32).reshape(x.shape[0], x.shape[2], -1)


def _output_dtype(a: Mapping[str, Any]) -> np.dtype | None:
    """Returns the dtype of the output; None where the call would have it anyway."""
    dtype = float_dtype("out_dtype", a["out_dtype"])
    if is_eight_bit(dtype):
        raise invalid("out_dtype", "a floating-point dtype of at least 16 bits", dtype.name)
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return None if dtype == output_dtype(a["query"].dtype) else dtype


def output_dtype(query: np.dtype, out_dtype: Any = None) -> np.dtype:
    """Returns the dtype of the output from that of the query and a canonical ``out_dtype``."""
    if out_dtype is not None:
        return np.dtype(out_dtype)
    return DEFAULT_OUTPUT if query == FLOAT8 else query


def _check_scale(name: str, scale: Any, x: Any, value: Any) -> None:
    """A scale fits its array; an axis of blocks has an entry."""
    batch, _, heads = x.shape[:3]
    ranks = (0, 2) if name == "v_scale" else (0, 2, 3)
    sizes = all(n in (1, m) for n, m in zip(scale.shape, (batch, heads), strict=False))
    blocks = scale.ndim < 3 or (scale.shape[:2] == (batch, heads) and 0 < scale.shape[2])
    if scale.ndim not in ranks or not sizes or not blocks:
        legal = f"a float, float[#{batch}, #{heads}]"
        if name != "v_scale":
            legal += f" or float[{batch}, {heads}, blocks] of at least one block"
        raise invalid(name, legal, value)


def _multiplied(x: Any, scale: Any) -> jax.Array:
    """``x [b, n, h, d]`` times its scale, in its own dtype."""
    wide = result_dtype(x.dtype, scale.dtype, jnp.float32)
    factor = tokens_of(scale, x.shape[1]).astype(wide)
    return (x.astype(wide) * factor).astype(x.dtype)


def tokens_of(scale: jax.Array, tokens: int) -> jax.Array:
    """Returns a scale so that it broadcasts against ``[batch, tokens, heads, columns]``."""
    if scale.ndim == 0:
        return scale
    if scale.ndim == 2:
        return scale[:, None, :, None]
    if scale.shape[2] != 1:
        block = block_size(tokens, scale.shape[2])
        scale = jnp.take(scale, jnp.arange(tokens) // block, axis=2)
    return scale.swapaxes(1, 2)[..., None]


def block_size(tokens: Any, blocks: int) -> Any:
    """Returns the tokens of a block; the last may have fewer, and blocks past the tokens none."""
    return max(1, -(-tokens // blocks)) if isinstance(tokens, int) else -(-tokens // blocks)


def dequantized(arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns query, key and value of canonical arguments as float32, times their scales."""
    values = {}
    for name, data in SCALES.items():
        x, scale = arrays[data].astype(jnp.float32), arrays.get(name)
        values[data] = x if scale is None else x * tokens_of(scale, x.shape[1])
    return values

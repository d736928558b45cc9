"""Query, key and value of attention as 8-bit floats with scales."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules._op import own_errors
from ejkernel.types.arrays import is_eight_bit, quantise
from ejkernel.types.calls.words import Array, F, invalid, out_of_range

FLOAT8 = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(FLOAT8).max)

Quantized = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def quantize_attention(
    query: F[Array, "batch q_len heads head_dim"],
    key: F[Array, "batch kv_len kv_heads head_dim"],
    value: F[Array, "batch kv_len kv_heads v_dim"],
    *,
    block: int | None = None,
    smooth: bool = False,
) -> Quantized:
    """Query, key and value as float8_e4m3fn, with the scales that ``flash_attention`` takes::

        q8, k8, v8, q_scale, k_scale, v_scale = quantize_attention(query, key, value)
        out = flash_attention(q8, k8, v8, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    The largest magnitude of a head, or of a block of its tokens, becomes 448, the largest
    float8_e4m3fn; others are rounded to 3 bits of mantissa.

    Args:
        query: ``[batch, q_len, heads, head_dim]``.
        key: ``[batch, kv_len, kv_heads, head_dim]``.
        value: ``[batch, kv_len, kv_heads, v_dim]``.
        block: None: one scale a head. Else query and key have one for every ``ceil(len / n)``
            tokens of a head, with the least n that makes these at most ``block``; the value has
            one a head.
        smooth: subtract from the keys of a head their mean over all tokens. Each logit of a row
            then changes by the same number, so that the output stays and the log-sum-exp does not:
            not together with ``return_lse``, sinks or a soft cap. The mean counts padding too.

    Returns:
        ``(q8, k8, v8, q_scale, k_scale, v_scale)``; scales are float32 ``[batch, heads]``, with
        ``block`` query and key have ``[batch, heads, n]``.

    Raises:
        InvalidArgument: wrong dtypes or ranks, keys and values of different lengths or heads.
        ValueError: a block below 1.

    Source: keys without their mean: Zhang et al. 2024, SageAttention (arXiv 2410.02367), section
    4.2.
    """
    with own_errors():
        _check(query, key, value, block, smooth)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    key = key.astype(jnp.promote_types(key.dtype, jnp.float32))
    if smooth and key.shape[1]:
        key = key - key.mean(1, keepdims=True)
    q8, q_scale = _quantized(query, block)
    k8, k_scale = _quantized(key, block)
    v8, v_scale = _quantized(value, None)
    return q8, k8, v8, q_scale, k_scale, v_scale


def _quantized(x: jax.Array, block: int | None) -> tuple[jax.Array, jax.Array]:
    """``x [b, n, h, d]`` in 8 bits, and scales ``[b, h]`` or ``[b, h, blocks]``."""
    batch, tokens, heads, _ = x.shape
    blocks = 1 if block is None else max(1, -(-tokens // block))
    size = max(1, -(-tokens // blocks))
    largest = jnp.abs(x.astype(jnp.float32)).max(-1, initial=0.0)
    largest = jnp.pad(largest, ((0, 0), (0, blocks * size - tokens), (0, 0)))
    largest = largest.reshape(batch, blocks, size, heads).max(2)
    # of zeros any scale is right; that of the smallest values must not become 0
    scale = jnp.where(largest > 0.0, jnp.maximum(largest / LARGEST, _SMALLEST), 1.0)
    of_tokens = jnp.repeat(scale, size, axis=1)[:, :tokens]
    x8 = quantise(x.astype(jnp.float32) / of_tokens[..., None], None, FLOAT8)
    scale = scale.swapaxes(1, 2)
    return x8, scale[..., 0] if block is None else scale


_SMALLEST = float(np.finfo(np.float32).tiny)


def _check(query: Any, key: Any, value: Any, block: Any, smooth: Any) -> None:
    """Checks the arguments of a call."""
    axes = {"query": "batch, q_len, heads, head_dim", "key": "batch, kv_len, kv_heads, head_dim"}
    axes["value"] = "batch, kv_len, kv_heads, v_dim"
    for name, x in (("query", query), ("key", key), ("value", value)):
        is_float = isinstance(x, Array) and jnp.issubdtype(x.dtype, jnp.floating)
        if not is_float or is_eight_bit(x) or x.ndim != 4:
            raise invalid(name, f"float[{axes[name]}]", x)
    if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        legal = f"batch {query.shape[0]} and head_dim {query.shape[3]}, as query has them"
        raise invalid("key", legal, key)
    if value.shape[:3] != key.shape[:3]:
        raise invalid("value", f"float[{', '.join(map(str, key.shape[:3]))}, v_dim]", value)
    if block is not None:
        if not isinstance(block, int) or isinstance(block, bool):
            raise invalid("block", "an int or None", block)
        if block < 1:
            raise out_of_range("block", "an integer >= 1, or None", block)
    if not isinstance(smooth, bool):
        raise invalid("smooth", "a bool", smooth)

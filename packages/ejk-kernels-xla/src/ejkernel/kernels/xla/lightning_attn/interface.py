"""The public function."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.xla._linear.attention import linear_attention
from ejkernel.kernels.xla._linear.inputs import Gates
from ejkernel.types.attention import invalid


def _static_int(x: Any, argument: str) -> int:
    try:
        if isinstance(x, (bool, jax.Array)):
            raise TypeError
        return operator.index(x)
    except TypeError:
        raise invalid(argument, "a Python int", x) from None


def slopes(heads: int, layer_idx: Any, num_layers: Any) -> np.ndarray:
    """Log decay per token of every head, float64 ``[h]``: steeper with the head, 0 at the top."""
    layer, layers = _static_int(layer_idx, "layer_idx"), _static_int(num_layers, "num_layers")
    if not 0 <= layer < layers:
        raise ValueError(f"layer_idx: must be in [0, num_layers), got {layer} of {layers} layers")
    return -8.0 / max(heads, 1) * (1.0 - layer / layers) * np.arange(heads)


def lightning_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    initial_state: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    *,
    layer_idx: int,
    num_layers: int,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Linear attention with one fixed decay per head, which depends on the layer.

        gamma[m] = -(8 / h) * (1 - layer_idx / num_layers) * m        for head m of h
        H = exp(gamma) * H + outer(k_t, v_t);  o_t = (softmax_scale * q_t) @ H

    Args:
        query, key, value: float ``[b, s, h, dk]``, ``[b, s, hk, dk]``, ``[b, s, hk, dv]``; h is a
            multiple of hk.
        layer_idx, num_layers: static, ``0 <= layer_idx < num_layers``.
        initial_state, cu_seqlens, softmax_scale, reverse, return_state, cfg: as in
            ``recurrent_attention``.

    Returns:
        o ``[b, s, h, dv]`` in the query's dtype, or (o, state).

    Differentiable in query, key, value and initial_state, as ``recurrent_attention``.

    Raises:
        ValueError: layer_idx out of range. The others as in ``recurrent_attention``.

    Source: Qin et al. 2024, Various lengths, constant speed (Lightning Attention), section 3.
    """
    heads = query.shape[2] if getattr(query, "ndim", 0) == 4 else 0
    gamma = jnp.asarray(slopes(heads, layer_idx, num_layers), jnp.result_type(float))
    return linear_attention(
        query,
        key,
        value,
        Gates(g_gamma=gamma),
        initial_state,
        cu_seqlens,
        softmax_scale=softmax_scale,
        reverse=reverse,
        return_state=return_state,
        cfg=cfg,
    )

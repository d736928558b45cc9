"""The public function."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.xla._linear.attention import linear_attention
from ejkernel.kernels.xla._linear.inputs import Gates


def gla_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Gated linear attention: ``recurrent_attention`` with the gates g and g_gamma.

        H = exp(g_t + g_gamma)[:, None] * H + outer(k_t, v_t);  o_t = (softmax_scale * q_t) @ H

    Args:
        query, key, value: float ``[b, s, h, dk]``, ``[b, s, hk, dk]``, ``[b, s, hk, dv]``; h is a
            multiple of hk.
        g: log decay ``[b, s, h, dk]`` per key channel or ``[b, s, h]`` per head.
        g_gamma: log decay ``[h]``, the same for every token.
        initial_state, cu_seqlens, softmax_scale, reverse, return_state, cfg: as in
            ``recurrent_attention``.

    Returns:
        o ``[b, s, h, dv]`` in the query's dtype, or (o, state).

    Differentiability and errors as in ``recurrent_attention``.

    Source: Yang et al. 2023, Gated linear attention transformers, sections 4.2 and 4.3.
    """
    return linear_attention(
        query,
        key,
        value,
        Gates(g, g_gamma),
        initial_state,
        cu_seqlens,
        softmax_scale=softmax_scale,
        reverse=reverse,
        return_state=return_state,
        cfg=cfg,
    )

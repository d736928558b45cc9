"""The public function."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.xla._linear.attention import linear_attention
from ejkernel.kernels.xla._linear.inputs import Gates


def recurrent_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    gk: jax.Array | None = None,
    gv: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Linear attention with gates: no softmax, one ``[dk, dv]`` state per query head.

        H = exp(g_t + gk_t + g_gamma)[:, None] * exp(gv_t)[None, :] * H + outer(k_t, v_t)
        o_t = (softmax_scale * q_t) @ H

    Args:
        query, key, value: float ``[b, s, h, dk]``, ``[b, s, hk, dk]``, ``[b, s, hk, dv]``; h is a
            multiple of hk. Dtypes may differ; everything accumulates in float32 (float64 when any
            of the three is float64).
        g: log decay ``[b, s, h, dk]`` per key channel or ``[b, s, h]`` per head. Log decays are
            normally <= 0; positive ones and -inf are allowed.
        g_gamma: log decay ``[h]``, the same for every token.
        gk, gv: log decays ``[b, s, h, dk]`` per key and ``[b, s, h, dv]`` per value channel.
        initial_state: float ``[b, h, dk, dv]``, or ``[n, h, dk, dv]`` with cu_seqlens; default 0.
        cu_seqlens: integer ``[n + 1]``, packed sequences of one batch row. The state restarts from
            ``initial_state[m]``; an empty sequence returns it; rows past the end give 0.
        softmax_scale: static; default ``dk ** -0.5``.
        reverse: run from the last token of every sequence to its first.
        return_state: also return the states after the last token visited, ``[b or n, h, dk, dv]``
            in the accumulation dtype.
        cfg: its ``time_tile`` is the chunk length, a power of two.

    Returns:
        o ``[b, s, h, dv]`` in the query's dtype, or (o, state).

    Differentiable in reverse mode in query, key, value, every gate and initial_state, through the
    output and the state, in memory ``s + (s / chunk) dk dv`` per head.

    Raises:
        InvalidArgument: an array of wrong dtype, rank or size. ValueError: cu_seqlens known to the
        host that do not start at 0, decrease or end after s; an illegal ``time_tile``.

    Source: Yang et al. 2023, Gated linear attention transformers, sections 4.2 and 4.3.
    """
    return linear_attention(
        query,
        key,
        value,
        Gates(g, g_gamma, gk, gv),
        initial_state,
        cu_seqlens,
        softmax_scale=softmax_scale,
        reverse=reverse,
        return_state=return_state,
        cfg=cfg,
    )

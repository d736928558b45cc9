"""Gated linear attention."""

from collections.abc import Mapping, Sequence
from typing import Any, Never

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import GLAttentionConfig
from ejkernel.modules._op import Operation, flatten
from ejkernel.ops import Platform
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.types import calls
from ejkernel.types.calls.words import Array, F, I


def gla_attention(
    query: F[Array, "batch seq heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq kv_heads v_dim"],
    g: F[Array, "batch seq heads key_dim"] | F[Array, "batch seq heads"] | None = None,
    g_gamma: F[Array, " heads"] | None = None,
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    platform: str | Platform | None = None,
    cfg: GLAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Gated linear attention: a state per head that decays by a gate per key channel.

    Per batch row and query head, with the state H starting at ``initial_state`` or 0::

        H = exp(g_t)[:, None] * exp(g_gamma) * H + outer(k_t, v_t)
        o_t = (softmax_scale * q_t) @ H

    It is :func:`recurrent_attention` with ``g`` and ``g_gamma`` only. Tokens are worked on in
    chunks, which changes rounding only.

    Args:
        query: ``[batch, seq, heads, key_dim]``.
        key: ``[batch, seq, kv_heads, key_dim]``; query head i reads head
            ``i // (heads // kv_heads)`` of keys and values.
        value: ``[batch, seq, kv_heads, v_dim]``.
        g: log decay ``[batch, seq, heads, key_dim]`` or per head ``[batch, seq, heads]``;
            normally <= 0; gates down to -20 per step are safe. None: no such decay.
        g_gamma: constant log decay per head, ``[heads]``. None: no such decay.
        initial_state, cu_seqlens, softmax_scale, reverse, return_state: as in
            :func:`recurrent_attention`.
        platform, cfg, mesh, in_specs, out_specs: as in :func:`flash_attention`.

    Returns:
        ``[batch, seq, heads, v_dim]`` in the query's dtype; with ``return_state`` also the final
        state, as in :func:`recurrent_attention`.

    Raises:
        InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.
        ValueError: a value out of range.
        KernelNotSupported: the forced platform cannot do this call.
        ConfigError: an illegal ``cfg``.

    Differentiable in query, key, value, g, g_gamma and initial_state, also through the state.

    Source: Yang et al. 2023, "Gated Linear Attention" (arXiv 2312.06635), section 4.
    """
    return get_default_executor()(GLAttention.shared(), **flatten(locals()))


class GLAttention(Operation[GLAttentionConfig]):
    spec = calls.GLAttention
    function = staticmethod(gla_attention)

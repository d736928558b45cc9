"""Multi-head latent attention for training and prefill."""

from collections.abc import Mapping, Sequence
from typing import Any, Never

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import FlashMLAConfig
from ejkernel.modules._op import Operation, flatten
from ejkernel.ops import Platform
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.types import MaskInfo, calls
from ejkernel.types.calls.words import Array, AttentionMask, F, I, Key


def mla_attention(
    query: F[Array, "batch q_len heads q_dim"],
    key_value: F[Array, "batch kv_len latent"],
    w_kc: F[Array, "latent kv_heads nope_dim"],
    w_vc: F[Array, "latent kv_heads v_dim"],
    b_q: F[Array, "batch q_len rope_dim"] | None = None,
    b_k: F[Array, "batch kv_len rope_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: AttentionMask | None = None,
    bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
    return_lse: bool = False,
    platform: str | Platform | None = None,
    cfg: FlashMLAConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """:func:`flash_attention` on keys and values projected from one latent vector per token.

    Per kv head m, ``k_nope = key_value @ w_kc[:, m]`` and ``v = key_value @ w_vc[:, m]``. The
    rotary part of the dot product has three forms::

        neither:      dot(q, k_nope)                          q_dim == nope_dim
        b_k:          dot(q[:nope], k_nope) + dot(q[nope:], b_k)     q_dim == nope_dim + rope_dim
        b_q and b_k:  dot(q, k_nope) + dot(b_q, b_k)          q_dim == nope_dim

    Args:
        query: ``[batch, q_len, heads, q_dim]``.
        key_value: ``[batch, kv_len, latent]``, shared by all heads.
        w_kc: ``[latent, kv_heads, nope_dim]``; ``heads % kv_heads == 0``.
        w_vc: ``[latent, kv_heads, v_dim]``.
        b_q: ``[batch, q_len, rope_dim]``, shared by all heads; needs ``b_k``.
        b_k: ``[batch, kv_len, rope_dim]``, shared by all heads.
        cu_seqlens: cumulative lengths of packed sequences, for q and k alike; needs batch 1.
        softmax_scale: default ``(nope_dim + rope_dim) ** -0.5`` with a rotary part, else
            ``nope_dim ** -0.5``.
        mask_info, attention_mask, bias, softmax_aux: as in :func:`flash_attention`.
        causal, causal_offset, sliding_window, logits_soft_cap: as in :func:`flash_attention`.
        dropout_prob, dropout_seed, return_lse: as in :func:`flash_attention`.
        platform, cfg, mesh, in_specs, out_specs: as in :func:`flash_attention`.

    Returns:
        ``[batch, q_len, heads, v_dim]`` in the query's dtype; with ``return_lse`` also
        ``[batch, q_len, heads]`` in float32 (float64 for float64 inputs).

    Raises:
        InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.
        ValueError: a value out of range, or ``b_q`` without ``b_k``.
        KernelNotSupported: the forced platform cannot do this call.
        ConfigError: an illegal ``cfg``.

    Differentiable in query, key_value, w_kc, w_vc, b_q, b_k, bias and softmax_aux.

    Source: DeepSeek-AI 2024, "DeepSeek-V2" (arXiv 2405.04434), section 2.1.
    """
    return get_default_executor()(FlashMLA.shared(), **flatten(locals()))


class FlashMLA(Operation[FlashMLAConfig]):
    spec = calls.FlashMLA
    function = staticmethod(mla_attention)
    aliases = ("flash_mla",)

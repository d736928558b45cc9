"""Attention with few options, which vendor libraries can serve."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import ScaledDotProductAttentionConfig
from ejkernel.modules._op import Operation, flatten
from ejkernel.ops import Platform
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.types import MaskInfo, calls
from ejkernel.types.calls.words import Array, AttentionMask, F, I


def scaled_dot_product_attention(
    query: F[Array, "batch q_len heads head_dim"],
    key: F[Array, "batch kv_len kv_heads head_dim"],
    value: F[Array, "batch kv_len kv_heads v_dim"],
    bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
    cum_seqlens_q: I[Array, " sequences_plus_1"] | None = None,
    cum_seqlens_k: I[Array, " sequences_plus_1"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: AttentionMask | None = None,
    init_bias: Callable[[], Array] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    platform: str | Platform | None = None,
    cfg: ScaledDotProductAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> jax.Array:
    """``softmax(softmax_scale * q k^T + bias) v`` over the visible keys.

    The result of :func:`flash_attention`, without its parameters for soft caps, sinks, dropout,
    8-bit inputs and log-sum-exps. A vendor's library (cuDNN) may compute it. A row that sees no
    key gives 0 on every platform.

    Args:
        query, key, value, bias, cum_seqlens_q, cum_seqlens_k: as in :func:`flash_attention`.
        mask_info, attention_mask: as in :func:`flash_attention`.
        causal, causal_offset, sliding_window: as in :func:`flash_attention`.
        softmax_scale, platform, cfg, mesh, in_specs, out_specs: as in :func:`flash_attention`.
        init_bias: called without arguments to make the bias when ``bias`` is None.

    Returns:
        ``[batch, q_len, heads, v_dim]`` in the query's dtype.

    Raises:
        InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.
        ValueError: a value out of range or contradictory arguments.
        KernelNotSupported: the forced platform cannot do this call.
        ConfigError: an illegal ``cfg``.

    Differentiable in query, key, value and bias, to any order and in forward mode on platform
    "xla".

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.1.
    """
    return get_default_executor()(ScaledDotProductAttention.shared(), **flatten(locals()))


class ScaledDotProductAttention(Operation[ScaledDotProductAttentionConfig]):
    spec = calls.ScaledDotProductAttention
    function = staticmethod(scaled_dot_product_attention)

"""Exact attention in linear memory: the public function and its Kernel class."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from ejkernel.modules._configs import FlashAttentionConfig
from ejkernel.modules._op import Operation, flatten
from ejkernel.ops import Platform
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.types import MaskInfo, calls
from ejkernel.types.calls.words import Array, AttentionMask, F, I, Key, Quantized


def flash_attention(
    query: Quantized[Array, "batch q_len heads head_dim"],
    key: Quantized[Array, "batch kv_len kv_heads head_dim"],
    value: Quantized[Array, "batch kv_len kv_heads v_dim"],
    bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
    cum_seqlens_q: I[Array, " sequences_plus_1"] | None = None,
    cum_seqlens_k: I[Array, " sequences_plus_1"] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: AttentionMask | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    precision: jax.lax.PrecisionLike = None,
    logits_dtype: DTypeLike = jnp.float32,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    q_scale: float
    | F[Array, ""]
    | F[Array, "#batch #heads"]
    | F[Array, "batch heads q_blocks"]
    | None = None,
    k_scale: float
    | F[Array, ""]
    | F[Array, "#batch #kv_heads"]
    | F[Array, "batch kv_heads kv_blocks"]
    | None = None,
    v_scale: float | F[Array, ""] | F[Array, "#batch #kv_heads"] | None = None,
    out_dtype: DTypeLike | None = None,
    platform: str | Platform | None = None,
    cfg: FlashAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention without a ``[q_len, kv_len]`` array, forward or backward.

    For batch row b, query row i and head h, which reads key head ``h // (heads // kv_heads)``::

        x[i,j] = softmax_scale * dot(q[i], k[j]) + bias[i,j]
        x[i,j] = score_mod(x[i,j], b, h, i, j)                   # with a score_mod
        x[i,j] = cap * tanh(x[i,j] / cap)                        # with logits_soft_cap = cap
        lse[i] = log(sum_{j visible} exp(x[i,j]) + sum_s exp(softmax_aux[h,s]))
        o[i]   = sum_{j visible} dropout(exp(x[i,j] - lse[i])) * v[j]

    A key is visible when every given constraint allows it: ``mask_info``, ``attention_mask``,
    ``causal``, ``sliding_window``, ``mask_mod(b, h, i, j)``, the sequence it belongs to. A row that
    sees no key gives 0 and ``lse = -inf``, and no gradient flows through it.

    Args:
        query: ``[batch, q_len, heads, head_dim]``; its dtype is the output's. Query, key and value
            may all be float8_e4m3fn, for inference: such a call has no gradient.
        key: ``[batch, kv_len, kv_heads, head_dim]``; ``heads % kv_heads == 0``.
        value: ``[batch, kv_len, kv_heads, v_dim]``.
        bias: ``[1 or batch, 1 or heads, 1 or q_len, kv_len]``, added to the scaled logits; ``-inf``
            hides a key (unless a soft cap turns it into ``-cap``).
        cum_seqlens_q: cumulative lengths ``[sequences + 1]`` of sequences packed along q_len,
            first entry 0; needs batch 1. Rows past the last entry give 0. Causal and window
            positions count inside each sequence.
        cum_seqlens_k: the same for keys; None means equal to ``cum_seqlens_q``.
        softmax_aux: attention sinks, ``[heads, sinks]`` or ``[sinks]`` shared by all heads; they
            take part in the softmax's denominator only.
        mask_info: a mask as structure; array members fit ``batch``, ``q_len`` and ``kv_len``.
        attention_mask: bool or integer, nonzero = visible; ``[1 or batch, 1 or heads, 1 or q_len, 1
            or kv_len]``, ``[batch, q_len, kv_len]``, or ``[batch, kv_len]`` to hide keys. Where the
            sizes allow ``[q_len, kv_len]`` or ``[heads, q_len, kv_len]`` too, give all four axes.
        softmax_scale: default ``head_dim ** -0.5``. A Python number.
        dropout_prob: in [0, 1). Kept probabilities are divided by ``1 - dropout_prob``; which
            ones depends only on the seed and the indices, not on tiles, platform or sharding.
        dropout_seed: integer or typed PRNG key, may be traced. A key stands for the seed
            ``jax.random.bits(key, (), "uint32")``. None = 0, in every call, with a warning.
        causal: ``j <= i + causal_offset``, top-left aligned.
        causal_offset: ``kv_len - q_len`` aligns the last query with the last key.
        sliding_window: ``w`` or ``(left, right)``, both inclusive, around ``i + causal_offset``.
        logits_soft_cap: a positive number, or None.
        return_lse: also return the natural-log sum of exponentials.
        precision: of the matrix products, as in ``jax.lax.dot``.
        logits_dtype: a lower bound for the logits' dtype; never below float32.
        score_mod: ``f(score, b, h, q, k) -> score``, on scalars: a logit after the bias and before
            the soft cap, and the int32 indices of its batch row, query head, query and key, in the
            arrays of the call (over a mesh: of the whole call). It may index arrays that it closes
            over, which get gradients where they are floats. ``-inf`` hides a key as a bias does.
        mask_mod: ``g(b, h, q, k) -> bool``, one more constraint. It may index arrays too.
            ``MaskInfo.from_mask_mod`` finds its blocks once for many calls.
        q_scale: the query's values are ``query * q_scale``: a number, ``[1 or batch, 1 or heads]``,
            or ``[batch, heads, blocks]`` of ``ceil(q_len / blocks)`` tokens a block. None = 1. See
            ``quantize_attention``.
        k_scale: the same of the key, with ``kv_heads`` and ``kv_len``.
        v_scale: the same of the value, without blocks.
        out_dtype: of the output, 16 bits or more; default bfloat16 for 8-bit inputs, else the
            query's.
        platform: "auto" (None), "triton", "pallas", "cuda" or "xla"; a forced one never falls
            through to another.
        cfg: a ``FlashAttentionConfig`` or a mapping of its fields; used as it is.
        mesh: shard over this mesh; needs ``in_specs``.
        in_specs: one PartitionSpec per array argument in signature order; missing ones are
            derived from the query's and the key's. Batch and heads may be sharded.
        out_specs: default: the query's spec.

    Returns:
        ``[batch, q_len, heads, v_dim]`` in ``out_dtype``; with ``return_lse`` also
        ``[batch, q_len, heads]`` in float32 (float64 for float64 inputs).

    Raises:
        InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.
        ValueError: a value out of range, contradictory arguments, keys sharded without queries.
        KernelNotSupported: the forced platform cannot do this call; a gradient of 8-bit inputs.
        ConfigError: an illegal ``cfg``.

    Differentiable in query, key, value, bias, softmax_aux and the arrays of score_mod (and through
    ``lse``); the backward pass recomputes probabilities from ``lse``.

    Source: Dao et al. 2022, "FlashAttention" (arXiv 2205.14135), algorithms 1 and 4; Dao 2023
    (arXiv 2307.08691), section 3.1; sinks: Xiao et al. 2023 (arXiv 2309.17453).
    """
    return get_default_executor()(FlashAttention.shared(), **flatten(locals()))


class FlashAttention(Operation[FlashAttentionConfig]):
    spec = calls.FlashAttention
    function = staticmethod(flash_attention)

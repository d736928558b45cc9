"""The public function: arguments to canonical form, then the differentiable core."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.blockwise import Spec
from ejkernel.kernels.xla._common.dropout import seed_words
from ejkernel.kernels.xla.flash_attention import tiles
from ejkernel.kernels.xla.flash_attention.core import attend
from ejkernel.types import MaskInfo, combine_masks
from ejkernel.types import attention as arg


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    cum_seqlens_q: jax.Array | None = None,
    cum_seqlens_k: jax.Array | None = None,
    softmax_aux: jax.Array | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: jax.Array | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | jax.Array | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    precision: Any = None,
    logits_dtype: Any = jnp.float32,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention in memory linear in the lengths.

        x = softmax_scale * q k^T + bias;  x = cap * tanh(x / cap)
        lse = log(sum over visible keys of exp(x) + sum over sinks of exp(softmax_aux))
        o = drop(exp(x - lse)) v

    A key is visible if every constraint given allows it. A row that sees no key gives o = 0 and
    lse = -inf, and no gradient passes through it.

    Args:
        query, key, value: float ``[b, q, h, d]``, ``[b, k, hk, d]``, ``[b, k, hk, dv]``; h is a
            multiple of hk. Dtypes may differ; products accumulate in float32 (float64 when any
            of the three or ``logits_dtype`` is float64).
        bias: float ``[#b, #h, #q, k]``, added to the logits.
        cum_seqlens_q, cum_seqlens_k: int ``[n + 1]``, packed sequences of one batch row; k
            defaults to q. Causal and window rules then count inside the sequences.
        softmax_aux: sink logits ``[h, n]``, or ``[n]`` for all heads.
        mask_info, attention_mask: further constraints; the array is bool or integer
            ``[#b, #h, #q, #k]``, ``[#b, q, k]`` or a key padding mask ``[#b, k]``.
        softmax_scale: static; default ``d ** -0.5``.
        dropout_prob, dropout_seed: drop probabilities in [0, 1); int, integer ``[]``, or
            ``[3]`` = (seed, global batch index, global head index) for one shard of a call.
        causal, causal_offset: key j is visible from query i if ``j <= i + causal_offset``.
        sliding_window: ``(left, right)`` or an int for both, around ``i + causal_offset``.
        logits_soft_cap: cap > 0.
        return_lse: also return lse ``[b, q, h]``: natural log, with sinks, before dropout.
        precision: of the products; "highest" also keeps probabilities in float32.
        logits_dtype: lower bound of the accumulation dtype.
        cfg: its ``fwd_params`` and ``bwd_params`` may give ``q_blocksize`` and ``kv_blocksize``.

    Returns:
        o ``[b, q, h, dv]`` in the query's dtype, or (o, lse).

    Differentiable in reverse mode in query, key, value, bias and softmax_aux, through o and lse.

    Raises:
        InvalidArgument: an array of wrong dtype, rank or size. ValueError: an illegal value.

    Source: Dao 2023, FlashAttention-2, sections 3.1 and 3.2.
    """
    q, k, v = arg.query_key_value(query, key, value)
    h, d, groups = q.shape[2], q.shape[3], q.shape[2] // max(k.shape[2], 1)
    block_q, block_kv = tiles.blocks(cfg, "fwd_params", groups, d)
    fwd = Spec(
        scale=arg.scale_of(softmax_scale, d),
        block_q=block_q,
        block_kv=block_kv,
        soft_cap=arg.soft_cap_of(logits_soft_cap),
        dropout_prob=arg.probability(dropout_prob),
        precision=tuple(precision) if isinstance(precision, list) else precision,
        logits_dtype=jnp.dtype(logits_dtype),
    )
    block_q, block_kv = tiles.blocks(cfg, "bwd_params", groups, d)
    bwd = replace(fwd, block_q=block_q, block_kv=block_kv)
    mask = combine_masks(
        mask_info,
        attention_mask=attention_mask,
        causal=causal,
        causal_offset=causal_offset,
        sliding_window=sliding_window,
        cum_seqlens_q=cum_seqlens_q,
        cum_seqlens_k=cum_seqlens_k,
        q_len=q.shape[1],
        kv_len=k.shape[1],
        batch=q.shape[0],
        heads=h,
    )
    seed = seed_words(dropout_seed) if fwd.dropout_prob > 0.0 else None
    bias, sinks = arg.bias_array(bias, q, k), arg.sink_array(softmax_aux, h)
    o, lse = attend(fwd, bwd, q, k, v, bias, sinks, mask, seed)
    return (o, lse) if return_lse else o

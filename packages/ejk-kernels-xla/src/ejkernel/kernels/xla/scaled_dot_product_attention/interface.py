"""Scaled dot product attention, differentiable in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ejkernel.kernels.xla._common.dots import DotPolicy
from ejkernel.kernels.xla._common.plain import Sight, probabilities, weighted_values
from ejkernel.types import MaskInfo, combine_masks
from ejkernel.types import attention as arg
from ejkernel.types.softmax import named_out


def scaled_dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    cum_seqlens_q: jax.Array | None = None,
    cum_seqlens_k: jax.Array | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: jax.Array | None = None,
    init_bias: Callable[[], jax.Array] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    cfg: Any = None,
) -> jax.Array:
    """o = softmax(softmax_scale * q k^T + bias over the visible keys) v, in O(q * k) memory.

    Args:
        query, key, value: float ``[b, q, h, d]``, ``[b, k, hk, d]``, ``[b, k, hk, dv]``, h a
            multiple of hk.
        bias: float ``[#b, #h, #q, k]``. ``init_bias()`` gives it when it is None.
        cum_seqlens_q, cum_seqlens_k: int ``[n + 1]``, packed sequences of one batch row.
        cfg: accepted for uniformity; nothing to tune.

    The other arguments are those of ``flash_attention``.

    Returns:
        o ``[b, q, h, dv]`` in the query's dtype; a row that sees no key is 0.

    Differentiable in forward and reverse mode, any order, in every float array.

    Raises:
        InvalidArgument: an array of wrong dtype, rank or size. ValueError: an illegal value.
    """
    q, k, v = arg.query_key_value(query, key, value)
    if bias is None and init_bias is not None:
        bias = init_bias()
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
        heads=q.shape[2],
    )
    dots = DotPolicy.of(q, k, v)
    scale = arg.scale_of(softmax_scale, q.shape[3])
    bias = arg.bias_array(bias, q, k)
    sight = Sight.of(mask, q.shape[1], k.shape[1])
    p = probabilities(q, k, bias, None, sight, scale=scale, soft_cap=None, dots=dots)
    return named_out(weighted_values(p, v, dots, sight).astype(q.dtype))

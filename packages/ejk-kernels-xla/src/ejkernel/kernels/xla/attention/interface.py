"""Plain attention with weights: the readable reference of the softmax operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.dots import DotPolicy
from ejkernel.kernels.xla._common.dropout import Dropout
from ejkernel.kernels.xla._common.plain import Sight, probabilities, weighted_values
from ejkernel.types import MaskInfo, combine_masks
from ejkernel.types import attention as arg
from ejkernel.types.softmax import named_out


def _seed(dropout_rng: Any) -> Any:
    """The seed that a key stands for; integer ``[3]`` words of a sharded call pass through."""
    if dropout_rng is None:
        raise ValueError(
            "dropout_rng: needed when dropout_prob > 0 and not deterministic, got None"
        )
    key = jnp.asarray(dropout_rng)
    if key.dtype == jnp.int32 and key.shape == (3,):
        return key
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not (typed and key.ndim == 0) and not (key.dtype == jnp.uint32 and key.ndim == 1):
        raise arg.invalid("dropout_rng", "a PRNG key (typed, or raw uint32[n])", key)
    return jax.random.bits(key, (), "uint32")


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    dropout_rng: jax.Array | None = None,
    softmax_aux: jax.Array | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: jax.Array | None = None,
    init_bias: Callable[[], jax.Array] | None = None,
    deterministic: bool = True,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    dtype: Any = None,
    softmax_dtype: Any = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    precision: Any = None,
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention and its weights, in O(q * k) memory.

        x = softmax_scale * q k^T + bias;  x = cap * tanh(x / cap)
        w = drop(exp(x) / (sum over visible keys of exp(x) + sum over sinks of exp(softmax_aux)))
        o = w v

    Args:
        query, key, value: float ``[b, q, h, d]``, ``[b, k, hk, d]``, ``[b, k, hk, dv]``, h a
            multiple of hk.
        bias: float ``[#b, #h, #q, k]``. ``init_bias()`` gives it when it is None.
        dropout_rng: typed or raw key, needed when dropout is active: not ``deterministic`` and
            ``dropout_prob`` > 0. Its seed is ``jax.random.bits(dropout_rng, (), "uint32")``.
        softmax_aux: sink logits ``[h, n]``, or ``[n]`` for all heads.
        dtype: query, key and value are cast to it and both results have it; None: no cast, results
            in the query's dtype.
        softmax_dtype: lower bound of the softmax dtype, at least float32.
        cfg: accepted for uniformity; nothing to tune.

    The other arguments are those of ``flash_attention``.

    Returns:
        o ``[b, q, h, dv]`` and w ``[b, h, q, k]``, w as multiplied with the values. A row that
        sees no key is 0 in both.

    Differentiable in forward and reverse mode, any order, in every float array.

    Raises:
        InvalidArgument: an array of wrong dtype, rank or size. ValueError: an illegal value.
    """
    q, k, v = arg.query_key_value(query, key, value)
    out_dtype = q.dtype if dtype is None else jnp.dtype(dtype)
    if dtype is not None:
        q, k, v = (x.astype(out_dtype) for x in (q, k, v))
    if bias is None and init_bias is not None:
        bias = init_bias()
    prob = arg.probability(dropout_prob)
    b, q_len, h, d = q.shape
    mask = combine_masks(
        mask_info,
        attention_mask=attention_mask,
        causal=causal,
        causal_offset=causal_offset,
        sliding_window=sliding_window,
        q_len=q_len,
        kv_len=k.shape[1],
        batch=b,
        heads=h,
    )
    at_least = jnp.float32 if softmax_dtype is None else softmax_dtype
    dots = DotPolicy.of(q, k, v, precision=precision, at_least=at_least)
    sight = Sight.of(mask, q_len, k.shape[1])
    p = probabilities(
        q,
        k,
        arg.bias_array(bias, q, k),
        arg.sink_array(softmax_aux, h),
        sight,
        scale=arg.scale_of(softmax_scale, d),
        soft_cap=arg.soft_cap_of(logits_soft_cap),
        dots=dots,
    )
    if prob > 0.0 and not deterministic:
        dropout = Dropout.make(_seed(dropout_rng), b, h, q_len, k.shape[1])
        p = jnp.where(dropout.keep(prob), p / (1.0 - prob), 0.0)
    o = named_out(weighted_values(p, v, dots, sight).astype(out_dtype))
    return o, p.astype(out_dtype)

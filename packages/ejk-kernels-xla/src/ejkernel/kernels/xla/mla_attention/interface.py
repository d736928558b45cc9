"""mla_attention: keys and values expanded from a latent row, then blockwise attention.

The expansion costs ``2 * k * r * hk * (dn + dv)`` operations per batch row, once; attention costs
``2 * q * k * h * (dn + dr + dv)``. Past a few thousand tokens the expansion is the small part.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla.flash_attention import flash_attention
from ejkernel.types import attention as arg
from ejkernel.types import combine_masks
from ejkernel.types.arrays import result_dtype
from ejkernel.types.hidden import cleared, seen_keys


def _expand(latent: jax.Array, weight: jax.Array, precision: Any = None) -> jax.Array:
    """``[b, k, hk, n]`` of ``[b, k, r]`` and ``[r, hk, n]``, in their common dtype."""
    dtype = result_dtype(latent, weight)
    wide = accumulation_dtype(latent, weight)
    x = jnp.einsum(
        "bkr,rhn->bkhn", latent.astype(dtype), weight.astype(dtype),
        preferred_element_type=wide, precision=precision,
    )  # fmt: skip
    return x.astype(dtype)


def _shared(rotary: jax.Array, heads: int, like: jax.Array) -> jax.Array:
    """One rotary part for every head: ``[b, s, heads, dr]`` of ``[b, s, dr]``."""
    b, s, dr = rotary.shape
    return jnp.broadcast_to(rotary[:, :, None], (b, s, heads, dr)).astype(like.dtype)


def _checked(query, key_value, w_kc, w_vc, b_q, b_k):
    q = arg.float_array(query, "query", "batch q_len heads query_dim")
    latent = arg.float_array(key_value, "key_value", "batch kv_len rank")
    w_kc = arg.float_array(w_kc, "w_kc", "rank kv_heads nope_dim")
    w_vc = arg.float_array(w_vc, "w_vc", "rank kv_heads value_dim")
    for name, w in (("w_kc", w_kc), ("w_vc", w_vc)):
        if w.shape[0] != latent.shape[2] or w.shape[1] != w_kc.shape[1]:
            expected = f"float[{latent.shape[2]}, {w_kc.shape[1]}, dim] for key_value's rank"
            raise arg.invalid(name, expected, w)
    dn, dr = w_kc.shape[2], 0
    if b_k is None and b_q is not None:
        raise ValueError("b_q: given without b_k; give both, b_k alone, or neither")
    if b_k is not None:
        b_k = arg.float_array(b_k, "b_k", "batch kv_len rotary_dim")
        if b_k.shape[:2] != latent.shape[:2]:
            raise arg.invalid("b_k", f"float[{latent.shape[0]}, {latent.shape[1]}, dr]", b_k)
        dr = b_k.shape[2]
    if b_q is not None:
        b_q = arg.float_array(b_q, "b_q", "batch q_len rotary_dim")
        if b_q.shape != (*q.shape[:2], dr):
            raise arg.invalid("b_q", f"float[{q.shape[0]}, {q.shape[1]}, {dr}]", b_q)
    want = dn if b_q is not None else dn + dr
    if q.shape[3] != want:
        raise arg.invalid("query", f"float[batch, q_len, heads, {want}]", q)
    return q, latent, w_kc, w_vc, b_q, b_k


def mla_attention(
    query,
    key_value,
    w_kc,
    w_vc,
    b_q=None,
    b_k=None,
    cu_seqlens=None,
    *,
    mask_info=None,
    attention_mask=None,
    bias=None,
    softmax_aux=None,
    softmax_scale=None,
    causal=False,
    causal_offset=0,
    sliding_window=None,
    logits_soft_cap=None,
    dropout_prob=0.0,
    dropout_seed=None,
    return_lse=False,
    cfg=None,
):
    """Attention whose keys and values are projections of one latent row per token.

        k[j] = c[j] w_kc;  v[j] = c[j] w_vc   per key/value head
        x[i, j] = softmax_scale * (dot(q_nope[i], k[j]) + dot(q_rope[i], b_k[j])) + bias

    and then softmax attention with masks, soft cap, sinks and dropout as ``flash_attention``.

    Args:
        query: float ``[b, q, h, dq]``. Without b_k, dq = dn. With b_k alone, dq = dn + dr and the
            last dr dims meet b_k. With b_q too, dq = dn and ``dot(b_q, b_k)`` is added for all
            heads.
        key_value: float ``[b, k, r]``; w_kc ``[r, hk, dn]``; w_vc ``[r, hk, dv]``.
        b_q, b_k: float ``[b, q, dr]``, ``[b, k, dr]``, shared by all heads.
        cu_seqlens: int ``[n + 1]``, packed sequences of one batch row with q == k.
        softmax_scale: default ``(dn + dr) ** -0.5``, ``dn ** -0.5`` without b_k.

    Returns ``[b, q, h, dv]`` in the query's dtype, with ``return_lse`` also lse ``[b, q, h]``.
    Differentiable in every float array. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """
    q, latent, w_kc, w_vc, b_q, b_k = _checked(query, key_value, w_kc, w_vc, b_q, b_k)
    h, hk = q.shape[2], w_kc.shape[1]
    mask = combine_masks(
        mask_info,
        attention_mask=attention_mask,
        causal=causal,
        causal_offset=causal_offset,
        sliding_window=sliding_window,
        cum_seqlens_q=cu_seqlens,
        q_len=q.shape[1],
        kv_len=latent.shape[1],
        batch=q.shape[0],
        heads=h,
    )
    # rows that nobody sees may hold NaN, which would reach the gradients of the weights
    seen = seen_keys(mask.conjuncts, q.shape[1], latent.shape[1])
    (latent,) = cleared(seen, latent)
    k, v = _expand(latent, w_kc), _expand(latent, w_vc)
    if b_k is not None:
        (b_k,) = cleared(seen, b_k)
        k = jnp.concatenate([k, _shared(b_k, hk, k)], -1)
    if b_q is not None:
        q = jnp.concatenate([q, _shared(b_q, h, q)], -1)
    return flash_attention(
        q, k, v, bias, None, None, softmax_aux, mask_info=mask,
        softmax_scale=arg.scale_of(softmax_scale, q.shape[3]),
        dropout_prob=dropout_prob, dropout_seed=dropout_seed,
        logits_soft_cap=logits_soft_cap, return_lse=return_lse, cfg=cfg,
    )  # fmt: skip


def heuristic(inv) -> dict:
    """The blocks of flash attention, which see the expanded head dims."""
    return {}


def sample_inputs(inv, rng):
    """Random floats; sequences of equal length."""
    a = dict(inv.arguments)
    if a["cu_seqlens"] is not None:
        n, s = a["cu_seqlens"].shape[0] - 1, a["query"].shape[1]
        a["cu_seqlens"] = jnp.asarray([s * r // max(n, 1) for r in range(n + 1)], jnp.int32)
    for name in ("query", "key_value", "w_kc", "w_vc", "b_q", "b_k", "bias", "softmax_aux"):
        if a[name] is not None:
            a[name] = jnp.asarray(rng.standard_normal(a[name].shape), a[name].dtype)
    return (), a

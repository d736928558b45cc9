"""One token per row attends to a slice of its cache, by one matmul over the whole cache."""

import jax.numpy as jnp


def ragged_decode_attention(
    query,
    key,
    value,
    sequence_start,
    sequence_end,
    softmax_aux=None,
    *,
    softmax_scale=None,
    sliding_window=None,
    logits_soft_cap=None,
    return_lse=False,
    cfg=None,
):
    b, h, d = query.shape
    kv_len, hk = key.shape[1:3]
    q = query.reshape(b, hk, h // hk, d)

    j = jnp.arange(kv_len)
    seen = (j >= sequence_start[:, None]) & (j < sequence_end[:, None])
    key, value = (jnp.where(seen[:, :, None, None], x, 0) for x in (key, value))  # may hold NaN
    seen = seen[:, None, None]

    x = softmax_scale * jnp.einsum("bkgd,bjkd->bkgj", q, key, preferred_element_type=jnp.float32)
    x = jnp.where(seen, x, -1e30)  # before exp: an inf in a branch not taken makes NaN gradients
    peak = x.max(-1, keepdims=True)
    p = jnp.where(seen, jnp.exp(x - peak), 0.0)
    total = p.sum(-1, keepdims=True)
    p = p / jnp.where(total > 0, total, 1.0)  # an empty range gives 0
    out = jnp.einsum("bkgj,bjkd->bkgd", p, value).reshape(b, h, -1).astype(query.dtype)
    return (out, (peak + jnp.log(total)).reshape(b, h)) if return_lse else out

"""Softmax attention as one matrix of probabilities: readable, and differentiable in every mode.

    x = scale * q k^T + bias;  x = cap * tanh(x / cap);  x = -inf where hidden
    p = exp(x) / (sum_j exp(x) + sum_s exp(sink));  o = p v

O(q_len * kv_len) memory. No custom derivative: forward mode and second order work.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.dots import DotPolicy
from ejkernel.kernels.xla._common.softmax import narrowed
from ejkernel.types import MaskInfo, prepare_mask
from ejkernel.types.masks.hidden import clear_unless


def dense_tile(mask: MaskInfo, q_len: int, kv_len: int) -> jax.Array | None:
    """The whole mask as bool ``[#b, #h, q, k]``; None when every pair is visible."""
    if 0 in (q_len, kv_len):
        return None
    sizes = {"q_len": q_len, "kv_len": kv_len, "block_q": q_len, "block_kv": kv_len}
    return prepare_mask(mask, **sizes).tile(0, 0)


class Visibility(NamedTuple):
    """Visible ``pairs`` ``[#b, #h, q, k]``, ``rows`` ``[#b, q, #h]`` that see a key and ``keys``
    ``[#b, k]`` that a row sees. Other rows and keys may hold anything: they affect no result."""

    pairs: jax.Array
    rows: jax.Array
    keys: jax.Array

    @classmethod
    def from_mask(cls, mask: MaskInfo, q_len: int, kv_len: int) -> Visibility | None:
        """Returns the visibility under ``mask``; None when every pair is visible."""
        pairs = dense_tile(mask, q_len, kv_len)
        if pairs is None:
            return None
        pairs = jnp.asarray(pairs)
        return cls(pairs, pairs.any(3).swapaxes(1, 2), pairs.any((1, 2)))

    def clear_rows(self, x: jax.Array) -> jax.Array:
        """Returns ``x`` ``[b, q, h, c]`` and so its gradient with zeros in rows that see no key."""
        return jnp.where(self.rows[..., None], x, jnp.zeros((), x.dtype))


def probabilities(
    q: jax.Array,
    k: jax.Array,
    bias: jax.Array | None,
    sinks: jax.Array | None,
    visibility: Visibility | None,
    *,
    scale: float,
    soft_cap: float | None,
    dots: DotPolicy,
) -> jax.Array:
    """p ``[b, h, q, k]`` in the accumulation dtype; rows that see no key are 0."""
    b, q_len, h, d = q.shape
    kv_len, hk = k.shape[1], k.shape[2]
    if visibility is not None:
        (k,) = clear_unless(visibility.keys, k)
        q = visibility.clear_rows(q)
    rows = q.reshape(b, q_len, hk, h // max(hk, 1), d).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(b, hk, (h // max(hk, 1)) * q_len, d)
    x = dots.rows_cols(rows, k.transpose(0, 2, 1, 3)).reshape(b, h, q_len, kv_len) * scale
    if bias is not None:
        x = x + narrowed(bias, x.dtype)
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    if visibility is not None:
        x = jnp.where(visibility.pairs, x, -jnp.inf)
    top = jnp.max(x, axis=-1, keepdims=True, initial=-jnp.inf)
    empty = top == -jnp.inf
    if sinks is None:
        sinks = jnp.zeros((h, 0), x.dtype)
    sinks = sinks.astype(x.dtype)[None, :, None, :]
    top = jnp.maximum(top, jnp.max(sinks, axis=-1, keepdims=True, initial=-jnp.inf))
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top))
    below = x - top  # at most 0, but for x rounded otherwise when it is computed again
    e = jnp.exp(below - jax.lax.stop_gradient(jnp.maximum(below, 0.0)))
    total = e.sum(-1, keepdims=True) + jnp.exp(sinks - top).sum(-1, keepdims=True)
    return jnp.where(empty, 0.0, e / jnp.where(empty, 1.0, total))


def weighted_values(
    p: jax.Array, v: jax.Array, dots: DotPolicy, visibility: Visibility | None = None
) -> jax.Array:
    """``[b, h, q, k]`` and ``[b, k, hk, dv]`` -> ``[b, q, h, dv]`` in the accumulation dtype."""
    b, h, q_len, kv_len = p.shape
    hk, dv = v.shape[2:]
    if visibility is not None:
        (v,) = clear_unless(visibility.keys, v)
    rows = p.reshape(b, hk, (h // max(hk, 1)) * q_len, kv_len)
    o = dots.weigh(rows, v.transpose(0, 2, 1, 3))
    o = o.reshape(b, h, q_len, dv).transpose(0, 2, 1, 3)
    return o if visibility is None else visibility.clear_rows(o)

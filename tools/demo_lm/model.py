"""A byte-level transformer whose attention is ``ejkernel.modules.flash_attention``."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from demo_lm.text import VOCABULARY
from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo


@dataclass(frozen=True)
class Size:
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    length: int = 512

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def init(size: Size, key: jax.Array) -> dict:
    def normal(key, *shape):
        return jax.random.normal(key, shape) * shape[0] ** -0.5

    w, hd = size.width, size.head_dim
    keys = iter(jax.random.split(key, 2 + 6 * size.layers))
    blocks = [
        {
            "norm1": jnp.ones(w),
            "q": normal(next(keys), w, size.heads * hd),
            "k": normal(next(keys), w, size.kv_heads * hd),
            "v": normal(next(keys), w, size.kv_heads * hd),
            "o": normal(next(keys), size.heads * hd, w),
            "norm2": jnp.ones(w),
            "up": normal(next(keys), w, 4 * w),
            "down": normal(next(keys), 4 * w, w),
        }
        for _ in range(size.layers)
    ]
    embed = jax.random.normal(next(keys), (VOCABULARY, w)) * 0.02
    return {"embed": embed, "blocks": blocks, "norm": jnp.ones(w)}


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def rotary(x, positions):
    """Rotate pairs of channels of ``[batch, seq, heads, head_dim]`` by their position."""
    half = x.shape[-1] // 2
    angle = positions[..., None] * 10000.0 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angle)[:, :, None], jnp.cos(angle)[:, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def project(block, x, positions, size: Size):
    """Queries, keys and values of one layer, queries and keys rotated."""
    h = rms_norm(x, block["norm1"])

    def split(y, heads):
        return y.reshape(*x.shape[:2], heads, size.head_dim)

    q = rotary(split(h @ block["q"], size.heads), positions)
    k = rotary(split(h @ block["k"], size.kv_heads), positions)
    return q, k, split(h @ block["v"], size.kv_heads)


def finish(block, x, attended):
    """Output projection and feed-forward, each added to the stream."""
    x = x + attended.reshape(*x.shape[:2], -1) @ block["o"]
    h = rms_norm(x, block["norm2"])
    return x + jax.nn.gelu(h @ block["up"]) @ block["down"]


def logits_of(params, x):
    return rms_norm(x, params["norm"]) @ params["embed"].T


def forward(params, tokens, positions, mask: MaskInfo | None, size: Size):
    """Logits ``[batch, seq, 256]``; causal inside each document of ``mask``."""
    x = params["embed"][tokens.astype(jnp.int32)]
    for block in params["blocks"]:
        q, k, v = project(block, x, positions, size)
        x = finish(block, x, flash_attention(q, k, v, causal=True, mask_info=mask))
    return logits_of(params, x)


def loss(params, tokens, segment_ids, positions, size: Size):
    """Mean bits per byte of predicting the next byte of the same document."""
    mask = MaskInfo.from_segments(segment_ids)
    logits = forward(params, tokens, positions, mask, size)[:, :-1]
    target = tokens[:, 1:].astype(jnp.int32)
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], -1)[..., 0]
    inside = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] >= 0)
    return -jnp.sum(log_p * inside) / jnp.maximum(jnp.sum(inside), 1) / jnp.log(2.0)

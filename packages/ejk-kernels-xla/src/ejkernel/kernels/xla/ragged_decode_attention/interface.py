"""ragged_decode_attention: one new token per row against a slice of its contiguous cache.

Bound: memory, as for every decoding step; the walk covers the blocks between the earliest start
and the latest end of the batch.
"""

from __future__ import annotations

import jax.numpy as jnp

from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._paged.core import Spec, Tiles
from ejkernel.kernels.xla._paged.decode import (
    attend_rows,
    head_scale,
    head_sinks,
    left_of,
    step_tokens,
)  # fmt: skip
from ejkernel.kernels.xla._paged.layouts import Contiguous
from ejkernel.types.attention import field


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
    cfg=None,
):
    """Attention of one token per row over the keys ``sequence_start <= j < sequence_end``.

    The row stands at position ``sequence_end - 1``, which the window counts from::

        x[j] = softmax_scale * dot(query, key[j]);  x = cap * tanh(x / cap)
        out = sum_j exp(x[j] - lse) * value[j]

    query ``[b, 1, h, d]`` or ``[b, h, d]``; key ``[b, S, hk, d]``; value ``[b, S, hk, dv]``;
    sequence_start, sequence_end ``[b]``, clipped to ``[0, S]``; an empty slice gives 0. Returns
    the rank of the query with last axis ``dv``. Differentiable in every float array.
    """
    query, key, value = map(jnp.asarray, (query, key, value))
    squeeze = query.ndim == 3
    q = query if squeeze else query[:, 0]
    b, h, d = q.shape
    length, hk = key.shape[1:3]
    dtype = accumulation_dtype(query, key, value)
    row_bytes = b * hk * (d + value.shape[-1]) * jnp.dtype(q.dtype).itemsize
    forward = field(cfg, "fwd_params")
    tokens = field(forward, "blocksize_keys") or field(forward, "kv_blocksize")
    tokens = min(tokens, max(length, 1)) if tokens else step_tokens(None, length, row_bytes)
    start, stop = (
        jnp.clip(jnp.asarray(x, jnp.int32), 0, length) for x in (sequence_start, sequence_end)
    )
    tiles = Tiles(jnp.arange(b, dtype=jnp.int32), stop[:, None] - 1, start, stop)
    spec = Spec(tokens, max(b, 1), logits_soft_cap, left_of(sliding_window), dtype)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    o, _ = attend_rows(
        spec,
        Contiguous(length),
        q.reshape(b, 1, hk, h // max(hk, 1), d),
        (key, value),
        head_scale(hk, dtype, scale),
        head_sinks(softmax_aux, h, hk, dtype),
        tiles,
    )
    o = o.reshape(b, h, value.shape[-1]).astype(query.dtype)
    return o if squeeze else o[:, None]


def heuristic(inv) -> dict:
    """The step of the walk follows from the bytes of a row; nothing else to choose."""
    return {}


def sample_inputs(inv, rng):
    """Random arrays and full rows."""
    a = dict(inv.arguments)
    b, length = a["key"].shape[:2]
    a["sequence_start"] = jnp.zeros((b,), jnp.int32)
    a["sequence_end"] = jnp.full((b,), length, jnp.int32)
    for name in ("query", "key", "value", "softmax_aux"):
        if a[name] is not None:
            a[name] = jnp.asarray(rng.standard_normal(a[name].shape), a[name].dtype)
    return (), a

"""flash_attention against JAX's own attention; on a GPU also each platform that can do the call."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from bench.case import Case
from bench.shapes import ATTENTION, AttentionShape
from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _inputs(shape: AttentionShape) -> tuple:
    keys = jax.random.split(jax.random.key(0), 4)
    b, h, hk = shape.batch, shape.heads, shape.kv_heads
    q = jax.random.normal(keys[0], (b, shape.q_len, h, shape.head_dim), shape.dtype)
    k = jax.random.normal(keys[1], (b, shape.keys, hk, shape.head_dim), shape.dtype)
    v = jax.random.normal(keys[2], (b, shape.keys, hk, shape.value_dim), shape.dtype)
    return q, k, v


def _ours(shape: AttentionShape, platform: str):
    options: dict = {"causal": shape.causal, "platform": platform}
    if shape.window is not None:
        options["sliding_window"] = shape.window
    if shape.soft_cap is not None:
        options["logits_soft_cap"] = shape.soft_cap
    if shape.dropout:
        options["dropout_prob"] = shape.dropout
    if shape.documents > 1:
        ids = np.repeat(np.arange(shape.documents), shape.q_len // shape.documents)
        ids = jnp.asarray(np.broadcast_to(ids, (shape.batch, shape.q_len)), jnp.int32)
        options["mask_info"] = MaskInfo.from_segments(ids)
    if shape.sinks:
        options["softmax_aux"] = jnp.ones((shape.heads, shape.sinks), jnp.float32)
    return lambda q, k, v: flash_attention(q, k, v, **options)


def _jax_nn(shape: AttentionShape, implementation: str):
    unsupported = (shape.soft_cap, shape.sinks or None, shape.dropout or None)
    if any(x is not None for x in unsupported) or shape.documents > 1:
        return "jax.nn has no such option"
    if shape.head_dim != shape.value_dim:
        return "jax.nn wants equal head dims"
    window = None if shape.window is None else (shape.window, 0 if shape.causal else shape.window)
    return functools.partial(
        jax.nn.dot_product_attention,
        is_causal=shape.causal,
        local_window_size=window,
        implementation=implementation,
    )


def _case(shape: AttentionShape, device: str) -> Case:
    contenders: dict = {"ejkernel": _ours(shape, "auto")}
    if device == "gpu":
        contenders |= {f"ejkernel-{p}": _ours(shape, p) for p in ("triton", "pallas", "cuda")}
        contenders["cudnn"] = _jax_nn(shape, "cudnn")
    # jax.nn's XLA form holds every logit: only where they fit
    if shape.batch * shape.heads * shape.q_len * shape.keys <= 2**30:
        contenders["jax-xla"] = _jax_nn(shape, "xla")
    width = DTYPE_BYTES[shape.dtype] * shape.batch
    q = shape.q_len * shape.heads * (shape.head_dim + shape.value_dim)
    kv = shape.keys * shape.kv_heads * (shape.head_dim + shape.value_dim)
    return Case(
        shape.name,
        functools.partial(_inputs, shape),
        contenders,
        shape.flops(),
        float(width * (q + kv)),
        shape.dtype,
        (0, 1, 2),
        notes=shape.source,
    )


def cases(device: str) -> list[Case]:
    return [
        _case(s, device) for s in ATTENTION if s.device == ("cpu" if device == "cpu" else "gpu")
    ]

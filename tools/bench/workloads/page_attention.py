"""page_attention against attention on the same cache laid out contiguously."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from bench.case import Case
from bench.shapes import DECODE, DecodeShape
from ejkernel.modules import page_attention, ragged_decode_attention

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


def _contexts(shape: DecodeShape) -> np.ndarray:
    """Even contexts, or the same total spread between 16 and four times the mean."""
    if not shape.uneven:
        return np.full(shape.batch, shape.context, np.int32)
    drawn = np.random.default_rng(0).lognormal(0.0, 1.0, shape.batch)
    drawn = np.clip(drawn / drawn.mean() * shape.context, 16, 4 * shape.context)
    drawn *= shape.context * shape.batch / drawn.sum()
    return np.clip(drawn, 16, 4 * shape.context).astype(np.int32)


def _columns(shape: DecodeShape) -> int:
    return -(-int(_contexts(shape).max()) // shape.page)


def _inputs(shape: DecodeShape) -> tuple:
    columns = _columns(shape)
    pages = shape.batch * columns
    keys = jax.random.split(jax.random.key(0), 3)
    cache = (pages, shape.page, shape.kv_heads, shape.head_dim)
    q = jax.random.normal(keys[0], (shape.batch, shape.heads, shape.head_dim), shape.dtype)
    if jnp.issubdtype(jnp.dtype(shape.cache_dtype), jnp.integer):
        k, v = (jax.random.randint(x, cache, -127, 128, jnp.int8) for x in keys[1:])
    else:
        k, v = (
            jax.random.normal(x, cache, shape.dtype).astype(shape.cache_dtype) for x in keys[1:]
        )
    order = np.random.default_rng(1).permutation(pages).reshape(shape.batch, columns)
    return q, k, v, jnp.asarray(_contexts(shape)), jnp.asarray(order, jnp.int32)


def _contiguous(shape: DecodeShape):
    """The same tokens without a table: rows of equal length, read in place."""
    columns = _columns(shape)

    def run(q, k, v, lens, tables):
        del tables
        k, v = (
            x.reshape(shape.batch, columns * shape.page, shape.kv_heads, shape.head_dim)
            for x in (k, v)
        )
        return ragged_decode_attention(q, k, v, jnp.zeros_like(lens), lens)

    return run


def _dense(shape: DecodeShape):
    """JAX's attention on the contiguous cache, every row full."""
    columns = _columns(shape)

    def run(q, k, v, lens, tables):
        del tables
        k, v = (
            x.reshape(shape.batch, columns * shape.page, shape.kv_heads, shape.head_dim)
            for x in (k, v)
        )
        return jax.nn.dot_product_attention(q[:, None], k, v, key_value_seq_lengths=lens)

    return run


def _case(shape: DecodeShape, device: str) -> Case:
    def ours(platform):
        scale = 0.05 if BYTES[shape.cache_dtype] == 1 else None
        return lambda *a: page_attention(*a, platform=platform, k_scale=scale, v_scale=scale)

    contenders: dict = {"ejkernel": ours("auto")}
    if device == "gpu":
        contenders |= {"ejkernel-triton": ours("triton"), "ejkernel-xla": ours("xla")}
    if shape.cache_dtype == shape.dtype:
        contenders["contiguous"] = _contiguous(shape)
        contenders["jax-xla"] = _dense(shape)
    tokens = int(_contexts(shape).sum())
    moved = 2.0 * tokens * shape.kv_heads * shape.head_dim * BYTES[shape.cache_dtype]
    flops = 4.0 * tokens * shape.heads * shape.head_dim
    return Case(
        shape.name, functools.partial(_inputs, shape), contenders, flops, moved, shape.dtype,
        notes=shape.source,
    )  # fmt: skip


def cases(device: str) -> list[Case]:
    kind = "cpu" if device == "cpu" else "gpu"
    return [_case(s, device) for s in DECODE if s.device == kind]

"""Calls of the operations that read a cache: decoding, and a server's mixed steps."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules.workloads.call import WIDTH
from ejkernel.modules.workloads.families import DecodeShape, LatentDecodeShape, RaggedShape

QUANTISED_SCALE = 0.05


def normals(dtype: str, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    """Draws normal values by name."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    named = zip(shapes.items(), keys, strict=True)
    return {name: jax.random.normal(key, shape, dtype) for (name, shape), key in named}


def contexts(shape: DecodeShape | LatentDecodeShape | RaggedShape) -> np.ndarray:
    """Even contexts, or the same total spread between 16 and four times the mean.

    Rows that read a prompt have contexts at least as long as it.
    """
    rows = shape.sequences if isinstance(shape, RaggedShape) else shape.batch
    if isinstance(shape, RaggedShape) and shape.ramp:
        chunks = 1 + np.arange(shape.prefills)
        return np.r_[[shape.context] * shape.decodes, shape.chunk * chunks].astype(np.int32)
    if not shape.uneven:
        return np.full(rows, shape.context, np.int32)
    drawn = np.random.default_rng(0).lognormal(0.0, 1.0, rows)
    drawn = np.clip(drawn / drawn.mean() * shape.context, 16, 4 * shape.context)
    drawn *= shape.context * rows / drawn.sum()
    lengths = np.clip(drawn, 16, 4 * shape.context).astype(np.int32)
    return np.maximum(lengths, new_tokens(shape)) if isinstance(shape, RaggedShape) else lengths


def new_tokens(shape: RaggedShape) -> np.ndarray:
    """Returns the new tokens of every sequence."""
    return np.asarray([1] * shape.decodes + [shape.chunk] * shape.prefills, np.int32)


def columns(shape: DecodeShape | LatentDecodeShape | RaggedShape) -> int:
    """Pages of the longest row."""
    return -(-int(contexts(shape).max()) // shape.page)


def filled(key: jax.Array, size: tuple[int, ...], dtype: str, cache_dtype: str) -> jax.Array:
    """Returns a cache with a value in every slot."""
    if jnp.issubdtype(jnp.dtype(cache_dtype), jnp.integer):
        return jax.random.randint(key, size, -127, 128, jnp.dtype(cache_dtype))
    return jax.random.normal(key, size, dtype).astype(cache_dtype)


def scattered(rows: int, pages: int) -> np.ndarray:
    """Returns page indices ``[rows, pages]``, each once, in random order."""
    order = np.random.default_rng(1).permutation(rows * pages)
    return order.reshape(rows, pages).astype(np.int32)


def _sinks(shape: DecodeShape | RaggedShape) -> dict[str, Any]:
    if not shape.sinks:
        return {}
    return {"softmax_aux": jnp.ones((shape.heads, shape.sinks), jnp.float32)}


def _options(shape: DecodeShape | RaggedShape, cache_dtype: str) -> dict[str, Any]:
    options: dict[str, Any] = {"sliding_window": shape.window, "logits_soft_cap": shape.soft_cap}
    if WIDTH[cache_dtype] == 1:
        options |= {"k_scale": QUANTISED_SCALE, "v_scale": QUANTISED_SCALE}
    return {name: value for name, value in options.items() if value is not None}


def cached(
    shape: DecodeShape | LatentDecodeShape, query: tuple[int, ...], **rows: tuple[int, ...]
) -> dict[str, Any]:
    """A query a sequence, and a cache in pages for each of ``rows``, the shapes of a token's."""
    keys = jax.random.split(jax.random.key(0), len(rows))
    pages = columns(shape)
    caches = {
        name: filled(key, (shape.batch * pages, shape.page, *row), shape.dtype, shape.cache_dtype)
        for key, (name, row) in zip(keys, rows.items(), strict=True)
    }
    return {
        **normals(shape.dtype, query=(shape.batch, *query)),
        **caches,
        "context_lens": jnp.asarray(contexts(shape)),
        "block_tables": jnp.asarray(scattered(shape.batch, pages)),
    }


def _page_arrays(shape: DecodeShape) -> dict[str, Any]:
    row = (shape.kv_heads, shape.head_dim)
    query = (shape.heads, shape.head_dim)
    return {**cached(shape, query, key_cache=row, value_cache=row), **_sinks(shape)}


def _contiguous_arrays(shape: DecodeShape) -> dict[str, Any]:
    cache = (shape.batch, columns(shape) * shape.page, shape.kv_heads, shape.head_dim)
    query = (shape.batch, shape.heads, shape.head_dim)
    ends = jnp.asarray(contexts(shape))
    return {
        **normals(shape.dtype, query=query, key=cache, value=cache),
        "sequence_start": jnp.zeros_like(ends),
        "sequence_end": ends,
        **_sinks(shape),
    }


def decode(shape: DecodeShape, operation: str) -> dict[str, Any]:
    """The fields of a Call."""
    paged = operation == "page_attention"
    read = contexts(shape)
    if shape.window is not None:
        read = np.minimum(read, shape.window + 1)
    tokens = int(read.sum())
    return {
        "make": functools.partial(_page_arrays if paged else _contiguous_arrays, shape),
        "options": _options(shape, shape.cache_dtype),
        "flops": 4.0 * tokens * shape.heads * shape.head_dim,
        "moved": 2.0 * tokens * shape.kv_heads * shape.head_dim * WIDTH[shape.cache_dtype],
        "dtype": shape.dtype,
    }


def _ragged_arrays(shape: RaggedShape, operation: str) -> dict[str, Any]:
    pages = columns(shape)
    cache = (shape.sequences * pages, shape.page, 2 * shape.kv_heads, shape.head_dim)
    starts = np.concatenate([[0], np.cumsum(new_tokens(shape))]).astype(np.int32)
    lengths = jnp.asarray(contexts(shape))
    new = (shape.tokens, shape.kv_heads, shape.head_dim)
    drawn = normals(
        shape.dtype, queries=(shape.tokens, shape.heads, shape.head_dim), keys=new, values=new
    )
    tables = jnp.asarray(scattered(shape.sequences, pages))
    filled_cache = filled(jax.random.key(1), cache, shape.dtype, shape.cache_dtype or shape.dtype)
    where = {"block_tables": tables, "query_start_loc": jnp.asarray(starts)}
    if operation == "ragged_page_attention":
        count = jnp.asarray(shape.sequences, jnp.int32)
        arrays = {"queries": drawn["queries"], "kv_pages": filled_cache, "context_lens": lengths}
        return {**arrays, **where, "num_seqs": count, **_sinks(shape)}
    ends = jnp.asarray((shape.decodes, shape.decodes, shape.sequences), jnp.int32)
    arrays = {**drawn, "kv_cache": filled_cache, "kv_lens": lengths}
    return {**arrays, **where, "distribution": ends, **_sinks(shape)}


def ragged(shape: RaggedShape, operation: str) -> dict[str, Any]:
    """The fields of a Call."""
    # a row of a prompt's chunk sees on average half of its chunk and the tokens before it
    rows, lengths = new_tokens(shape).astype(np.float64), contexts(shape)
    pairs = float((rows * (lengths - rows + (rows + 1) / 2)).sum())
    if shape.window is not None:
        pairs = min(pairs, shape.tokens * (shape.window + 1))
    width = WIDTH[shape.dtype] * shape.head_dim
    cache_dtype = shape.cache_dtype or shape.dtype
    cached = 2.0 * float(lengths.sum()) * shape.kv_heads * WIDTH[cache_dtype] * shape.head_dim
    return {
        "make": functools.partial(_ragged_arrays, shape, operation),
        "options": _options(shape, cache_dtype),
        "flops": 4.0 * pairs * shape.heads * shape.head_dim,
        "moved": cached + 2.0 * shape.tokens * shape.heads * width,
        "dtype": shape.dtype,
    }

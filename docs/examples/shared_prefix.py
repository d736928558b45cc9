"""Decoding many continuations of one prefix, whose keys and values are read once for all of them.

    python docs/examples/shared_prefix.py

Answers to one question, branches of a search and requests with one system prompt share their first
tokens. Each would read the keys and values of the prefix again. Here the prefix is attended to
once, the new tokens of all continuations being the rows of one matmul, and each continuation reads
the pages of its own tokens only; ``merge_attention`` joins both by their log-sum-exps. The prefix
is not in any page table, and the lengths count the tokens after it.

Sinks would go to the call over pages alone. A sliding window that begins inside the prefix cannot
be cut in two like this, as positions there begin after the prefix.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import flash_attention, merge_attention, page_attention

PART = 1024  # keys of a part of the prefix: 8 parts of 8192 keys and 8 kv heads fill a GPU


def attend_prefix(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, ...]:
    """Returns attention of rows ``[n, h, d]`` to a prefix ``[keys, hk, d]``, and its log-sum-exp.

    A batch row of the call is a part of the prefix, so that a few query rows fill a GPU too. The
    query heads of a kv head are rows of one matmul, as its keys are the same for all of them.
    """
    n, heads, dim = query.shape
    kv_heads = key.shape[1]
    rows = query.reshape(n, kv_heads, -1, dim).swapaxes(1, 2).reshape(1, -1, kv_heads, dim)
    parts = max(1, key.shape[0] // PART)
    even_rows = key.shape[0] // parts * parts
    key_parts, value_parts = (x[:even_rows].reshape(parts, -1, *x.shape[1:]) for x in (key, value))
    queries = jnp.broadcast_to(rows, (parts, *rows.shape[1:]))
    outs, lses = flash_attention(queries, key_parts, value_parts, return_lse=True)
    attended = [(outs[i], lses[i]) for i in range(parts)]
    if even_rows < key.shape[0]:
        tail = (x[even_rows:][None] for x in (key, value))
        out, lse = flash_attention(rows, *tail, return_lse=True)
        attended.append((out[0], lse[0]))
    out, lse = merge_attention(*zip(*attended, strict=True))
    out, lse = (x.reshape(n, -1, kv_heads, *x.shape[2:]).swapaxes(1, 2) for x in (out, lse))
    return out.reshape(n, heads, -1), lse.reshape(n, heads)


@jax.jit
def attend(
    query: jax.Array,
    prefix: tuple[jax.Array, jax.Array],
    caches: tuple[jax.Array, jax.Array],
    lengths: jax.Array,
    tables: jax.Array,
) -> jax.Array:
    """Returns attention of one new token ``[n, h, d]`` of each continuation.

    prefix: keys and values ``[keys, hk, d]``. caches: pages ``[pages, page_size, hk, d]`` of what
    follows it, by ``lengths [n]`` and ``tables [n, max_pages]``.
    """
    own_out = page_attention(query, *caches, lengths, tables, return_lse=True)
    out, _ = merge_attention(*zip(attend_prefix(query, *prefix), own_out, strict=True))
    return out


@jax.jit
def attend_without_sharing(query, prefix, caches, lengths, tables):
    """Returns the same by a cache in which the prefix has pages that all tables name."""
    page_size = caches[0].shape[1]
    count = prefix[0].shape[0] // page_size
    caches = [
        jnp.concatenate([x.reshape(count, page_size, *x.shape[1:]), cache])
        for x, cache in zip(prefix, caches, strict=True)
    ]
    shared = jnp.broadcast_to(jnp.arange(count, dtype=tables.dtype), (tables.shape[0], count))
    tables = jnp.concatenate([shared, tables + count], axis=1)
    return page_attention(query, *caches, lengths + count * page_size, tables)


def make(
    continuations: int,
    keys: int,
    longest: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    page_size: int = 16,
    dtype: jnp.dtype = jnp.float32,
) -> tuple:
    """Returns random arguments of ``attend``: lengths up to ``longest``, pages in random order."""
    rng = np.random.default_rng(0)
    draw = functools.partial(jax.random.normal, dtype=dtype)
    q, *kv = jax.random.split(jax.random.key(0), 5)
    pages = -(-longest // page_size)
    shape = (continuations * pages, page_size, kv_heads, dim)
    return (
        draw(q, (continuations, heads, dim)),
        tuple(draw(key, (keys, kv_heads, dim)) for key in kv[:2]),
        tuple(draw(key, shape) for key in kv[2:]),
        jnp.asarray(rng.integers(1, longest + 1, continuations), jnp.int32),
        jnp.asarray(rng.permutation(shape[0]).reshape(continuations, pages), jnp.int32),
    )


def main(continuations: int = 16, keys: int = 1024, longest: int = 64) -> float:
    """Compares both forms; returns the largest difference."""
    arguments = make(continuations, keys, longest)
    difference = attend(*arguments) - attend_without_sharing(*arguments)
    lengths = int(arguments[3].sum())
    print(
        f"{continuations} continuations of {keys} tokens read {keys + lengths} keys a head, "
        f"{continuations * keys + lengths} without sharing; the outputs differ by "
        f"{float(jnp.max(jnp.abs(difference))):.1e}"
    )
    return float(jnp.max(jnp.abs(difference)))


if __name__ == "__main__":
    main()

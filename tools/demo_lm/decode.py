"""Generation one byte at a time from a paged key/value cache.

Several continuations of one prompt are drawn together. Their pages lie scattered in one pool, as a
server's would; a table per row says where.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from demo_lm.model import Size, finish, logits_of, project
from ejkernel.modules import page_attention

PAGE = 16


def empty_cache(size: Size, rows: int, seed: int) -> tuple[list[dict], jax.Array]:
    """Pages ``[P, PAGE, kv_heads, head_dim]`` per layer and shuffled tables ``[rows, columns]``."""
    columns = -(-size.length // PAGE)
    shape = (rows * columns, PAGE, size.kv_heads, size.head_dim)
    tables = np.random.default_rng(seed).permutation(rows * columns).reshape(rows, columns)
    cache = [{"k": jnp.zeros(shape), "v": jnp.zeros(shape)} for _ in range(size.layers)]
    return cache, jnp.asarray(tables, jnp.int32)


@partial(jax.jit, static_argnames="size", donate_argnums=1)
def decode_step(params, cache, tables, tokens, position, size: Size):
    """Logits ``[rows, 256]`` after ``tokens [rows]`` at ``position``, and the cache with them."""
    rows = tokens.shape[0]
    page, row = tables[:, position // PAGE], position % PAGE
    lens = jnp.full((rows,), position + 1)
    x = params["embed"][tokens][:, None]
    new = []
    for block, pages in zip(params["blocks"], cache, strict=True):
        q, k, v = project(block, x, position[None, None], size)
        k_pages = pages["k"].at[page, row].set(k[:, 0])
        v_pages = pages["v"].at[page, row].set(v[:, 0])
        x = finish(block, x, page_attention(q, k_pages, v_pages, lens, tables))
        new.append({"k": k_pages, "v": v_pages})
    return logits_of(params, x)[:, 0], new


def generate(params, prompt: bytes, count: int, size: Size, *, rows: int, seed: int):
    """Returns the texts as uint8 ``[rows, n]`` and the logits ``[rows, n - 1, 256]`` on the way."""
    start = np.frombuffer(prompt, np.uint8)[: size.length // 2]
    total = min(len(start) + count, size.length)
    tokens = np.zeros((rows, total), np.int32)
    tokens[:, : len(start)] = start
    cache, tables = empty_cache(size, rows, seed)
    key, seen = jax.random.key(seed), []
    for position in tqdm(range(total - 1), desc="decoding", unit="byte", dynamic_ncols=True):
        logits, cache = decode_step(
            params, cache, tables, tokens[:, position], jnp.int32(position), size
        )
        seen.append(np.asarray(logits))
        if position + 1 >= len(start):
            draw = jax.random.fold_in(key, position)
            tokens[:, position + 1] = np.asarray(jax.random.categorical(draw, logits / 0.7))
    return tokens.astype(np.uint8), np.stack(seen, axis=1)

"""Generation one byte at a time from a key/value cache."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from demo_lm.model import Size, finish, logits_of, project
from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo


def empty_cache(size: Size) -> list[dict]:
    shape = (1, size.length, size.kv_heads, size.head_dim)
    return [{"k": jnp.zeros(shape), "v": jnp.zeros(shape)} for _ in range(size.layers)]


@partial(jax.jit, static_argnames="size", donate_argnums=1)
def decode_step(params, cache, token, position, size: Size):
    """Logits ``[256]`` after ``token`` at ``position``, and the cache that now holds it."""
    x = params["embed"][token][None, None]
    # only the cache entries written so far are visible to the one query row
    mask = MaskInfo.from_lengths(
        jnp.ones(1, jnp.int32), position[None] + 1, max_q_len=1, max_kv_len=size.length
    )
    new = []
    for block, held in zip(params["blocks"], cache, strict=True):
        q, k, v = project(block, x, position[None, None], size)
        at = (0, position, 0, 0)
        k = jax.lax.dynamic_update_slice(held["k"], k, at)
        v = jax.lax.dynamic_update_slice(held["v"], v, at)
        x = finish(block, x, flash_attention(q, k, v, mask_info=mask))
        new.append({"k": k, "v": v})
    return logits_of(params, x)[0, 0], new


def generate(params, prompt: bytes, count: int, size: Size, *, seed: int, temperature=0.7):
    """Returns (all bytes, logits ``[len - 1, 256]`` seen on the way)."""
    tokens = list(prompt)[: size.length - 1]
    count = min(count, size.length - len(tokens))
    cache, seen, key = empty_cache(size), [], jax.random.key(seed)
    with tqdm(total=len(tokens) + count - 1, desc="decoding", unit="byte") as bar:
        position = 0
        while position < len(prompt) + count - 1:
            logits, cache = decode_step(
                params, cache, jnp.int32(tokens[position]), jnp.int32(position), size
            )
            seen.append(np.asarray(logits))
            position += 1
            if position == len(tokens):
                draw = jax.random.categorical(
                    jax.random.fold_in(key, position), logits / temperature
                )
                tokens.append(int(draw))
            bar.update()
    return bytes(tokens), np.stack(seen)

"""Canonical arguments of attention in the forms that kernels read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.errors import invalid


def bias_of_rows(bias: jax.Array | None, q_len: int) -> jax.Array | None:
    """Returns the bias with a row for every query, for kernels that read whole tiles of it."""
    if bias is None or bias.shape[2] == q_len:
        return bias
    return jnp.broadcast_to(bias, (*bias.shape[:2], q_len, bias.shape[3]))


def sink_logit(sinks: jax.Array | None) -> jax.Array | None:
    """Returns one logit for all sinks of a head, float32 ``[1, h]``: the log of their sum."""
    if sinks is None or sinks.shape[1] == 0:
        return None
    return jax.nn.logsumexp(sinks.astype(jnp.float32), axis=-1)[None]


SEED_WORDS = 5


def seed_words(seed: Any) -> jax.Array:
    """Returns int32 ``[1, 5]``: seed, global indices of batch row, head, query and key 0.

    ``seed`` is None (0), an int, an integer array ``[]``, or an integer array that already holds
    the first three or all five words, for a call that is one shard of a larger one.
    """
    if seed is None or isinstance(seed, (int, np.integer)):
        word = int(seed or 0) & 0xFFFFFFFF
        words = np.array([word, 0, 0, 0, 0], np.uint32).view(np.int32)
        return jnp.asarray(words)[None]
    words = jnp.asarray(seed)
    legal = words.shape in ((), (3,), (SEED_WORDS,))
    if not jnp.issubdtype(words.dtype, jnp.integer) or not legal:
        raise invalid("dropout_seed", "an int or integer[]", words)
    words = jax.lax.bitcast_convert_type(words.astype(jnp.uint32), jnp.int32).reshape(-1)
    zero = words[:1] * 0
    return jnp.concatenate([words, *[zero] * (SEED_WORDS - words.shape[0])])[None]

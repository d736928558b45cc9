"""The part of the dropout hash that belongs to rows, computed by XLA.

The mask is a hash of (seed, batch, head, query index, key index): a pure function of these five
values in uint32 arithmetic, the same on every backend, so no random state is stored and the
backward pass recomputes it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.types.attention.dropout import P1, P2, P3, P4, P5, fmix


def row_words(seed: jax.Array, batch: int, heads: int, rows: int) -> jax.Array:
    """Returns the row words uint32 ``[b, h, 2, q]`` for the seed words int32 ``[1, 5]``.

    The seed words are the seed and the indices of the first batch row, head, query and key.
    """
    words = seed[0].astype(jnp.uint32)
    b = words[1] + jnp.arange(batch, dtype=jnp.uint32)[:, None, None]
    h = words[2] + jnp.arange(heads, dtype=jnp.uint32)[None, :, None]
    key = fmix(fmix(fmix(words[0] + P1) + b * P2) + h * P3)
    index = words[3] + jnp.arange(rows, dtype=jnp.uint32)[None, None]
    r = fmix(key + index * P4)
    s = fmix(r ^ P1)
    # kernels count keys from 0
    r = r + words[4] * P5
    # shift-xor is linear: (x ^ s) ^ ((x ^ s) >> 13) is x ^ (x >> 13) ^ (s ^ (s >> 13))
    return jnp.stack([r, s ^ (s >> 13)], axis=2)

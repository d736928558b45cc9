"""The part of the dropout hash that belongs to rows, computed by XLA.

The mask is a hash of (seed, batch, head, query index, key index): a pure function of those five
numbers in uint32 arithmetic, the same on every backend, so no random state is stored and the
backward pass recomputes it. The mixing function is the 32-bit finaliser of MurmurHash3 (Appleby).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_P1, _P2, _P3, _P4, _M1, _M2 = (
    np.uint32(x) for x in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x85EBCA6B, 0xC2B2AE35)
)


def _fmix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * _M1
    x = (x ^ (x >> 13)) * _M2
    return x ^ (x >> 16)


def row_words(seed: jax.Array, batch: int, heads: int, rows: int) -> jax.Array:
    """uint32 ``[b, h, 2, q]`` of the seed words int32 ``[1, 3]``: what ``kept`` needs of rows.

    The seed words are the seed and the indices of the first batch row and head.
    """
    words = seed[0].astype(jnp.uint32)
    b = words[1] + jnp.arange(batch, dtype=jnp.uint32)[:, None, None]
    h = words[2] + jnp.arange(heads, dtype=jnp.uint32)[None, :, None]
    key = _fmix(_fmix(_fmix(words[0] + _P1) + b * _P2) + h * _P3)
    index = jnp.arange(rows, dtype=jnp.uint32)[None, None]
    r = _fmix(key + index * _P4)
    s = _fmix(r ^ _P1)
    # shift-xor is linear: (x ^ s) ^ ((x ^ s) >> 13) is x ^ (x >> 13) ^ (s ^ (s >> 13))
    return jnp.stack([r, s ^ (s >> 13)], axis=2)

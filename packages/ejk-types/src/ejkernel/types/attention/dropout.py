"""The hash that decides dropout, the same on every backend.

All arithmetic is uint32 modulo 2**32; ``fmix`` is the finaliser of MurmurHash3 (Appleby) and the
odd constants are the primes of xxHash32 (Collet).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

P1, P2, P3, P4, P5 = (
    np.uint32(x) for x in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
)
M1, M2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


def fold(x: jax.Array, shift: int) -> jax.Array:
    """Returns ``x ^ (x >> shift)``."""
    return x ^ jax.lax.shift_right_logical(x, jnp.asarray(shift, jnp.uint32))


def fmix(x: jax.Array) -> jax.Array:
    """Mixes the bits of uint32 ``x``; a bijection."""
    return fold(fold(fold(x, 16) * M1, 13) * M2, 16)

"""Dropout as a pure function of (seed, batch row, query head, query index, key index).

The same 32-bit mixing on every platform (``ejkernel.types.attention.dropout``), so that masks do
not depend on blocks, splits, devices or backends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.attention import operands
from ejkernel.types.attention.dropout import M1, M2, P1, P2, P3, P4, P5, fmix, fold


def seed_words(seed: Any) -> jax.Array:
    """uint32 ``[5]``: seed, global indices of batch row, head, query and key 0."""
    return jax.lax.bitcast_convert_type(operands.seed_words(seed)[0], jnp.uint32)


def random_words(base: jax.Array, rows: jax.Array, cols: jax.Array) -> jax.Array:
    """uint32 ``[..., rows, cols]`` from ``base`` ``[...]`` (one word per batch row and head)."""
    outer = (None,) * base.ndim
    r = fmix(base[..., None] + (rows * P4)[outer])
    s = fmix(r ^ P1)
    x = r[..., None] + (cols * P5)[(*outer, None)]
    x = fold(x, 16) * M1
    x = x ^ s[..., None]
    return fold(fold(x, 13) * M2, 16)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dropout:
    """Hash inputs that decide which probabilities dropout keeps.

    base: uint32 ``[batch, heads]``, the hash of seed, batch row and head.
    rows, cols: uint32 ``[q]``, ``[k]``, the indices that enter the hash.
    """

    base: jax.Array
    rows: jax.Array
    cols: jax.Array

    @classmethod
    def make(
        cls,
        seed: Any,
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
    ) -> Dropout:
        """Masks of a ``[batch, heads, q_len, kv_len]`` call."""
        words = seed_words(seed)
        b = jnp.arange(batch, dtype=jnp.uint32) + words[1]
        h = jnp.arange(heads, dtype=jnp.uint32) + words[2]
        base = fmix(fmix(fmix(words[0] + P1) + b * P2)[:, None] + (h * P3)[None])
        q = jnp.arange(q_len, dtype=jnp.uint32) + words[3]
        k = jnp.arange(kv_len, dtype=jnp.uint32) + words[4]
        return cls(base, q, k)

    def keep(self, prob: float, rows: Any = None, cols: Any = None) -> jax.Array:
        """bool ``[batch, heads, rows, cols]``, True with probability ``1 - prob``."""
        words = random_words(
            self.base, self.rows if rows is None else rows, self.cols if cols is None else cols
        )
        threshold = jnp.asarray(round(prob * 2**24), jnp.uint32)
        return jax.lax.shift_right_logical(words, jnp.asarray(8, jnp.uint32)) >= threshold

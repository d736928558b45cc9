"""What the copy engine asks of arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp

GROUP = 8  # rows that a tiled copy moves together


def whole_rows(n: int) -> int:
    """``n`` rounded up to whole groups of rows."""
    return -(-n // GROUP) * GROUP


def whole(x: jax.Array) -> jax.Array:
    """``[b, rows, h, d]`` with rows of zeros added to fill the last group; a copy if there are."""
    missing = whole_rows(x.shape[1]) - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, missing), (0, 0), (0, 0)]) if missing else x

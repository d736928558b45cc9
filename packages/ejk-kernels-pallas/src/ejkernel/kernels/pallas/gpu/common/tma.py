"""Row padding and shared-memory layouts for TMA copies."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

COPY_ROWS = 8  # rows that a tiled copy moves together


def padded_rows(n: int) -> int:
    """Returns ``n`` rounded up to full groups of ``COPY_ROWS``."""
    return -(-n // COPY_ROWS) * COPY_ROWS


def pad_rows(x: jax.Array) -> jax.Array:
    """``[b, rows, h, d]`` with rows of zeros added to fill the last group; a copy if there are."""
    missing = padded_rows(x.shape[1]) - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, missing), (0, 0), (0, 0)]) if missing else x


def row_bytes(*columns: int, itemsize: int) -> int:
    """Returns the longest row of shared memory's pattern that divides these columns."""
    return math.gcd(128, *(n * itemsize for n in columns))


def tiled(shape: tuple[int, ...], dtype: Any, swizzle: int = 128) -> Any:
    """Shared memory in the pattern that wgmma and TMA read, in rows of ``swizzle`` bytes."""
    columns = plgpu.TilingTransform((COPY_ROWS, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(columns, plgpu.SwizzleTransform(swizzle)))

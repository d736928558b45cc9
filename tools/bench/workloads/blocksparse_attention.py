"""blocksparse_attention at a tenth of the blocks against flash_attention on all of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from bench.case import Case
from ejkernel.modules import blocksparse_attention, flash_attention

LENGTH, HEADS, DIM, BLOCK = 4096, 8, 64, 128
DENSITY = 0.1


def _pattern(per_head: bool) -> np.ndarray:
    """A random pattern, one for each head or one for all."""
    n = LENGTH // BLOCK
    shape = (1, HEADS if per_head else 1, n, n)
    return np.random.default_rng(0).random(shape) < DENSITY


def _inputs(per_head: bool, dtype: str) -> tuple:
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, LENGTH, HEADS, DIM), dtype) for key in keys)
    return q, k, v, jnp.asarray(_pattern(per_head))


def _sparse(q, k, v, pattern):
    return blocksparse_attention(
        q, k, v, block_mask=pattern, q_block_size=BLOCK, kv_block_size=BLOCK
    )


def _full(q, k, v, pattern):
    del pattern
    return flash_attention(q, k, v)


def _case(per_head: bool, dtype: str) -> Case:
    density = float(_pattern(per_head).mean())
    pairs = density * HEADS * LENGTH * LENGTH
    return Case(
        f"s{LENGTH}-{'per-head' if per_head else 'shared'}-{DENSITY}",
        functools.partial(_inputs, per_head, dtype),
        {"ejkernel": _sparse, "full": _full},
        4.0 * pairs * DIM,
        4.0 * LENGTH * HEADS * DIM * jnp.dtype(dtype).itemsize,
        dtype,
        (0, 1, 2),
        notes=f"{density:.1%} of the {BLOCK} x {BLOCK} blocks",
    )


def cases(device: str) -> list[Case]:
    dtype = "float32" if device == "cpu" else "bfloat16"
    return [_case(per_head, dtype) for per_head in (True, False)]

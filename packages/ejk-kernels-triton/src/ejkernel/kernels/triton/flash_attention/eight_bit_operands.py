"""8-bit operands of the forward kernel: their scales, and probabilities that are rounded to 8 bits.

Logits are q k^T times a scale of the row and a scale of the key. A float8_e4m3fn has full precision
from 2^-6 to 448: probabilities relative to the largest of their row are multiplied by 2^8 first, so
that they keep it down to 2^-14.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.common.dims import split_dim
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.attention.problem import Problem

FLOAT8 = "float8_e4m3fn"
PROBABILITY_FACTOR = 2.0**8  # see above
ALIGNED = 16  # bytes of one load


def has_8_bit_matmuls(problem: Problem, target: Target) -> bool:
    """Returns whether matmuls of the target take the 8-bit operands as they are.

    They sum over at least 32 columns.
    """
    parts = [n for dim in (problem.dim, problem.value_dim) for n in split_dim(dim) if n]
    return target.platform == "cuda" and int(target.arch) >= 89 and min(parts) >= 32


def tokens_innermost(v: jax.Array) -> jax.Array:
    """``v [b, k, hk, dv]`` as ``[b, hk, dv, padded k]``: 8-bit matmuls sum over adjacent values."""
    v = v.transpose(0, 2, 3, 1)
    missing = -v.shape[3] % ALIGNED
    return jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else v


@triton.jit
def load_scales(scales, i, b, h, hk, sizes):
    """Loads the scales of the rows ``i``; returns them, and the pointer to the scales of the keys.

    A scale that all keys share is in the scales of the rows.
    """
    block = tl.minimum(i, sizes.q_len - 1) // scales.Q_BLOCK
    row_scale = tl.load(scales.q + (b * sizes.heads + h) * scales.q_blocks + block)
    key_scales = scales.k + (b * sizes.kv_heads + hk) * scales.k_blocks
    if scales.K_BLOCK == 0:
        row_scale = row_scale * tl.load(key_scales)
    return row_scale, key_scales


@triton.jit
def scale_scores(s, scales, row_scale, key_scales, j, sizes):
    """Returns s times the scales of its rows and its keys ``j``."""
    s = s * row_scale[:, None]
    if scales.K_BLOCK:
        block = tl.minimum(j, sizes.kv_len - 1) // scales.K_BLOCK
        s = s * tl.load(key_scales + block)[None, :]
    return s


@triton.jit
def scale_probabilities(p, scales):
    """Returns probabilities times their factor, as they are rounded to 8 bits."""
    if scales.PROBABILITY_FACTOR is not None:
        p = p * scales.PROBABILITY_FACTOR
    return p


@triton.jit
def output_scale(scales, b, hk, sizes):
    """Returns the factor of the output: the scale of the values, less the probabilities'."""
    scale = tl.load(scales.v + b * sizes.kv_heads + hk)
    if scales.PROBABILITY_FACTOR is not None:
        scale = scale / scales.PROBABILITY_FACTOR
    return scale


def probability_factor(problem: Problem) -> Any:
    """Returns the factor of probabilities, None where they keep 16 bits."""
    return PROBABILITY_FACTOR if problem.dtype == FLOAT8 else None

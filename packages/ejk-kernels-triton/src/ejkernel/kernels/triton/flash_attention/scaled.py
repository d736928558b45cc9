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
LARGEST = 2.0**8
ALIGNED = 16  # bytes of one load


def multiplies(problem: Problem, target: Target) -> bool:
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
    """Returns the scales of the rows ``i``, and of all keys where these have one."""
    row = tl.minimum(i, sizes.q_len - 1) // scales.Q_BLOCK
    of_rows = tl.load(scales.q + (b * sizes.heads + h) * scales.q_blocks + row)
    of_keys = scales.k + (b * sizes.kv_heads + hk) * scales.k_blocks
    if scales.K_BLOCK == 0:
        of_rows = of_rows * tl.load(of_keys)
    return of_rows, of_keys


@triton.jit
def scaled_product(s, scales, row_scale, key_scale, j, sizes):
    """Returns s times the scales of its rows and its keys ``j``."""
    s = s * row_scale[:, None]
    if scales.K_BLOCK:
        block = tl.minimum(j, sizes.kv_len - 1) // scales.K_BLOCK
        s = s * tl.load(key_scale + block)[None, :]
    return s


@triton.jit
def enlarged(p, scales):
    """Returns probabilities as they are rounded."""
    if scales.LARGEST is not None:
        p = p * scales.LARGEST
    return p


@triton.jit
def value_scale(scales, b, hk, sizes):
    """Returns the factor of the output."""
    scale = tl.load(scales.v + b * sizes.kv_heads + hk)
    if scales.LARGEST is not None:
        scale = scale / scales.LARGEST
    return scale


def largest(problem: Problem) -> Any:
    """Returns the factor of probabilities, None where they keep 16 bits."""
    return LARGEST if problem.dtype == FLOAT8 else None

"""Calls of the gated delta rule and of the convolution before it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules.workloads.call import WIDTH
from ejkernel.modules.workloads.families import ConvolutionShape, DeltaShape
from ejkernel.modules.workloads.paged import normals


def _packed_lengths(tokens: int, sequences: int) -> np.ndarray:
    """Cumulative lengths of sequences of log-normal lengths, int32 ``[sequences + 1]``."""
    weights = np.random.default_rng(0).lognormal(size=sequences)
    ends = np.floor(np.cumsum(weights) / weights.sum() * tokens)
    return np.concatenate([[0], ends[:-1], [tokens]]).astype(np.int32)


def _arrays(shape: DeltaShape) -> dict[str, Any]:
    b, s, h, d = shape.batch, shape.length, shape.heads, shape.head_dim
    arrays = normals(
        shape.dtype,
        query=(b, s, shape.key_heads, d),
        key=(b, s, shape.key_heads, d),
        value=(b, s, h, shape.value_dim),
        g=(b, s, h, d) if shape.per_channel else (b, s, h),
        beta=(b, s, h),
    )
    arrays["key"] *= d**-0.5  # of about length 1
    arrays["g"] = -jax.nn.softplus(arrays["g"].astype(jnp.float32)) / 16
    arrays["beta"] = jax.nn.sigmoid(arrays["beta"])
    states = b if shape.sequences is None else shape.sequences
    if shape.state:
        arrays |= normals("float32", initial_state=(states, h, d, shape.value_dim))
    if shape.sequences is not None:
        arrays["cu_seqlens"] = jnp.asarray(_packed_lengths(s, shape.sequences))
    return arrays


def delta_rule(shape: DeltaShape, _: str) -> dict[str, Any]:
    """The fields of a Call: a token reads the state for its key, updates it, and reads it again.

    A given state is read and written once.
    """
    rows, d, dv = shape.batch * shape.length, shape.head_dim, shape.value_dim
    per_head = 2 * dv + 1  # value, output and beta
    entries = rows * (2 * shape.key_heads * d + shape.heads * per_head)
    gates = rows * shape.heads * (d if shape.per_channel else 1)
    states = (shape.sequences or shape.batch) * shape.heads * d * dv
    return {
        "make": functools.partial(_arrays, shape),
        "options": {"return_state": True} if shape.state else {},
        "flops": 6.0 * rows * shape.heads * d * dv,
        "moved": float(entries * WIDTH[shape.dtype] + 4 * gates + 8 * states * shape.state),
        "dtype": shape.dtype,
        "gradients": () if shape.state else ("query", "key", "value", "g", "beta"),
    }


def _convolved(shape: ConvolutionShape) -> dict[str, Any]:
    c, w = shape.channels, shape.width
    arrays = normals(shape.dtype, x=(shape.batch, shape.length, c), weight=(c, w), bias=(c,))
    if shape.state:
        arrays |= normals(shape.dtype, initial_state=(shape.batch, c, w - 1))
    return arrays


def convolution(shape: ConvolutionShape, _: str) -> dict[str, Any]:
    """The fields of a Call: tokens are read once and written once, and so is a given state."""
    entries = shape.batch * shape.length * shape.channels
    states = shape.batch * shape.channels * (shape.width - 1) * shape.state
    return {
        "make": functools.partial(_convolved, shape),
        "options": {"activation": "silu"} | ({"return_state": True} if shape.state else {}),
        "flops": 2.0 * entries * shape.width,
        "moved": 2.0 * (entries + states) * WIDTH[shape.dtype],
        "dtype": shape.dtype,
        "gradients": () if shape.state else ("x", "weight", "bias"),
        "backward_factor": 2.0,
    }

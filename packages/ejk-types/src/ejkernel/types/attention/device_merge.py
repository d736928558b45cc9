"""Attention of the same rows on several devices, each over its own keys, merged on all of them.

Two ways to the same result. Every device gathers the outputs and log-sum-exps of all: one
collective. Or the largest log-sum-exp is found, and the weighted outputs are added up: two
all-reduces, which wait for one another. Decoding has few rows, and a collective then takes as long
as it takes to start; with many rows and many devices all-reduces move fewer bytes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.arrays import result_dtype
from ejkernel.types.attention.softmax import merge_parts
from ejkernel.types.collectives import gather

START_BYTES = 2**21
"""Bytes that links of 200 GB/s carry in 10 us: about as long as a second collective waits for."""


class MergeBytes(NamedTuple):
    """Bytes of one device's part of the rows.

    Attributes:
        gathered: of the output and the log-sum-exp, as they are sent.
        summed: of the weighted output with its weights, in the accumulation dtype.
        largest: of the log-sum-exp in that dtype.
        devices: that have a part.
    """

    gathered: int
    summed: int
    largest: int
    devices: int

    @classmethod
    def for_rows(
        cls, rows: int, dim: int, out_dtype: Any, lse_dtype: Any, devices: int
    ) -> MergeBytes:
        """Returns the bytes of ``rows`` of ``dim`` values and one log-sum-exp."""
        wide = result_dtype(jnp.float32, out_dtype, lse_dtype).itemsize
        row = dim * np.dtype(out_dtype).itemsize + np.dtype(lse_dtype).itemsize
        return cls(rows * row, rows * (dim + 1) * wide, rows * wide, devices)

    @property
    def is_one_gather(self) -> bool:
        """Returns whether devices gather: it moves few bytes, or no more than all-reduces do."""
        others = self.devices - 1
        reduced = 2 * others * (self.summed + self.largest) // self.devices
        return others * self.gathered <= reduced + START_BYTES


def merge_over_devices(
    o: jax.Array, lse: jax.Array, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Returns ``merge_parts`` of the parts of all devices along bound mesh axes, on each of them.

    One all-gather, or two all-reduces where those move fewer bytes (``MergeBytes``).
    """
    devices = math.prod(jax.lax.axis_size(axis) for axis in axes)
    sizes = MergeBytes.for_rows(math.prod(lse.shape), o.shape[-1], o.dtype, lse.dtype, devices)
    if sizes.is_one_gather:
        outs, lses = gather((o, lse), axes)
        return merge_parts(outs, lses)
    return _sum_weighted(o, lse, axes)


def _sum_weighted(
    o: jax.Array, lse: jax.Array, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Returns the merged parts by all-reduces: of the largest lse, and of the weighted outputs."""
    wide = result_dtype(jnp.float32, o, lse)
    lse = lse.astype(wide)
    top = jax.lax.pmax(jax.lax.stop_gradient(lse), axes)
    base = jnp.where(top > -jnp.inf, top, 0)
    weight = jnp.exp(lse - base)[..., None]
    terms = jnp.where(weight > 0, o.astype(wide), 0) * weight
    summed = jax.lax.psum(jnp.concatenate([terms, weight], -1), axes)
    total = summed[..., -1]
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    return summed[..., :-1] / total[..., None], jnp.where(is_empty, -jnp.inf, base + jnp.log(total))

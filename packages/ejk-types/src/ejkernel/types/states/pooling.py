"""Means over tokens on several devices: each has the mean and the number of its own tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.arrays import result_dtype
from ejkernel.types.states.line import Line


def pool_over_devices(
    a: Mapping[str, Any], line: Line, run: Callable[[dict[str, Any]], Any]
) -> jax.Array:
    """Returns the means, of all tokens, on each device.

    ``a``: the arguments of one device; ``run``: computes a call of one device.
    """
    x, mask, packed = a["x"], a["attention_mask"], a["cu_seqlens"] is not None
    rows, channels = (1, x.shape[1:]) if packed else (x.shape[0], x.shape[2:])
    borders = _borders(line, a["cu_seqlens"], a["chunk_size"])
    groups = borders.shape[0] - 1
    local_borders = jnp.clip(borders - line.offset, 0, line.length)
    # the rows of a batch, one behind the other, are packed sequences: their groups
    first = line.length * jnp.arange(rows, dtype=jnp.int32)[:, None]
    starts = (first + local_borders[None, :-1]).reshape(-1)
    ends = (first + local_borders[None, 1:]).reshape(-1)
    cu = local_borders if packed else jnp.append(starts, jnp.int32(rows * line.length))
    flat = x.reshape(rows * line.length, *channels)
    local = {**a, "x": flat, "cu_seqlens": cu, "chunk_size": None}
    if mask is None:
        counts = ends - starts
    else:
        local["attention_mask"] = mask = mask.reshape(rows * line.length)
        seen = jnp.pad(jnp.cumsum(mask, dtype=jnp.int32), (1, 0))
        counts = seen[ends] - seen[starts]
    dtype = result_dtype(x, jnp.float32)
    counts = counts.reshape(-1, *(1,) * len(channels))
    sums = run(local).astype(dtype) * counts.astype(dtype)
    total = jnp.maximum(line.sum(counts), 1).astype(dtype)
    means = (line.sum(sums) / total).astype(x.dtype)
    per_sequence = () if a["chunk_size"] is None else (_chunks(line, a["chunk_size"]),)
    sequences = groups // math.prod(per_sequence) if packed else rows
    return means.reshape(sequences, *per_sequence, *channels)


def _chunks(line: Line, chunk: int) -> int:
    """Returns the number of chunks that each sequence has in the result."""
    return -(-line.size * line.length // chunk)


def _borders(line: Line, cu: jax.Array | None, chunk: int | None) -> jax.Array:
    """Returns the cumulative lengths of all groups in the whole sequence: starts, and the end."""
    total = line.size * line.length
    cu = jnp.asarray([0, total], jnp.int32) if cu is None else jnp.clip(cu, 0, total)
    if chunk is None:
        return cu
    behind = chunk * jnp.arange(_chunks(line, chunk), dtype=jnp.int32)
    starts = jnp.minimum(cu[:-1, None] + behind, jnp.maximum(cu[1:], cu[:-1])[:, None])
    return jnp.append(starts.reshape(-1), cu[-1])

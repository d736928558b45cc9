"""The public function."""

from __future__ import annotations

import math
import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._common.layout import cdiv
from ejkernel.kernels.xla._common.packed import cumulative_lengths
from ejkernel.kernels.xla.mean_pooling.sums import chunk_sums, group_sums, groups_of_rows
from ejkernel.types.attention import field, invalid

# rows of the first level: few additions per level up to 64k rows, and one pass over them
BLOCK = 128


def heuristic(inv: Any) -> dict[str, Any]:
    """The config fields that suit a call."""
    return {"token_tile": BLOCK}


def _chunk(chunk_size: Any) -> int | None:
    if chunk_size is None:
        return None
    try:
        if isinstance(chunk_size, (bool, jax.Array)):
            raise TypeError
        chunk = operator.index(chunk_size)
    except TypeError:
        raise invalid("chunk_size", "a Python int or None", chunk_size) from None
    if chunk < 1:
        raise ValueError(f"chunk_size: must be at least 1, got {chunk}")
    return chunk


def _rows(x: Any, packed: bool) -> jax.Array:
    form = "float[tokens, *channels]" if packed else "float[batch, seq, *channels]"
    form += " with at least one axis of channels"
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise invalid("x", form, x)
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.ndim < (2 if packed else 3):
        raise invalid("x", form, x)
    return x


def _kept(attention_mask: Any, shape: tuple[int, ...]) -> jax.Array | None:
    if attention_mask is None:
        return None
    form = f"bool or integer[{', '.join(map(str, shape))}]"
    if not hasattr(attention_mask, "shape") or tuple(attention_mask.shape) != shape:
        raise invalid("attention_mask", form, attention_mask)
    mask = jnp.asarray(attention_mask)
    if not (mask.dtype == bool or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise invalid("attention_mask", form, mask)
    return mask.astype(bool)


@partial(jax.jit, static_argnames=("chunk", "block"))
def _pool(
    x: jax.Array,
    cu: jax.Array | None,
    kept: jax.Array | None,
    *,
    chunk: int | None,
    block: int,
) -> jax.Array:
    """``mean_pooling`` of checked arguments."""
    lead = 2 if cu is None else 1
    shape, channels = x.shape[:lead], x.shape[lead:]
    rows, width = shape[-1], math.prod(channels)
    wide = x.astype(accumulation_dtype(x)).reshape(*shape, width)
    ones = jnp.ones((*shape, 1), jnp.int32)
    if kept is not None:
        wide, ones = (jnp.where(kept[..., None], x, 0) for x in (wide, ones))

    groups = shape[:1] if cu is None else (cu.shape[0] - 1,)
    per_group = cdiv(rows, chunk or max(rows, 1))
    form = groups if chunk is None else (*groups, per_group)
    if 0 in (rows, width, *groups):
        return jnp.zeros((*form, *channels), x.dtype)
    if cu is None:
        sums, length = (chunk_sums(t, chunk or rows, block) for t in (wide, ones))
    else:
        owner, changes = groups_of_rows(cu, rows, chunk), groups[0] + per_group + 1
        count = math.prod(form)
        sums = group_sums(wide, owner, count, block, changes=changes)
        length = jax.ops.segment_sum(ones, owner, count)
    mean = sums.reshape(-1, width) / jnp.maximum(length, 1).astype(wide.dtype).reshape(-1, 1)
    return mean.reshape(*form, *channels).astype(x.dtype)


def mean_pooling(
    x: jax.Array,
    cu_seqlens: jax.Array | None = None,
    *,
    chunk_size: int | None = None,
    attention_mask: jax.Array | None = None,
    cfg: Any = None,
) -> jax.Array:
    """Mean over sequences or over chunks of sequences.

    | cu_seqlens | chunk_size | input -> output                                                |
    |------------|------------|----------------------------------------------------------------|
    | None       | None       | ``[b, s, *c] -> [b, *c]``                                      |
    | None       | int c      | ``[b, s, *c] -> [b, ceil(s/c), *c]``                           |
    | given      | None       | ``[T, *c] -> [n, *c]``                                         |
    | given      | int c      | ``[T, *c] -> [n, ceil(T/c), *c]``, chunks restart per sequence |

    Args:
        x: float rows; at least one trailing axis.
        cu_seqlens: integer ``[n + 1]``, packed sequences; may be traced. Rows past the end count
            nowhere.
        chunk_size: static, at least 1. A last, shorter chunk averages its own rows.
        attention_mask: bool or integer ``[b, s]`` or ``[T]``; rows with 0 count neither in the sum
            nor in the length, whatever they hold.
        cfg: its ``token_tile`` is the number of rows summed first.

    Returns:
        The means in the dtype of x, summed in float32 at least. A mean over nothing is 0 and
        passes no gradient.

    Differentiable to every order, forward and reverse, in x.

    Raises:
        InvalidArgument: an array of wrong dtype, rank or size. ValueError: chunk_size < 1, or
        cu_seqlens known to the host that do not start at 0, decrease or end after T.
    """
    chunk, packed = _chunk(chunk_size), cu_seqlens is not None
    x = _rows(x, packed)
    shape = x.shape[: 1 if packed else 2]
    cu = cumulative_lengths(cu_seqlens, "cu_seqlens", shape[-1]) if packed else None
    block = field(cfg, "token_tile", BLOCK)
    if block < 1:
        raise ValueError(f"token_tile: must be at least 1, got {block}")
    return _pool(x, cu, _kept(attention_mask, shape), chunk=chunk, block=int(block))

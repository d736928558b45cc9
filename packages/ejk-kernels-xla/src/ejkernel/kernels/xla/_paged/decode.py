"""From an operation's arguments to the tiles, spec and scales of the shared loop."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._paged.core import NEG_INF, Spec, Tiles, attend
from ejkernel.kernels.xla._paged.layouts import Arrays, Layout, Tables
from ejkernel.ops.varying import vary_alike
from ejkernel.types.arrays import at_most, size_of

# One step of the loop reads about this many bytes of keys and values: large enough to amortise
# the loop, small enough for the gathered tokens to be still in the second-level cache when used.
STEP_BYTES = 1 << 20


def left_of(window) -> int | None:
    """The only side of a window that a causal row has; no cache is longer than 2**30."""
    if window is None:
        return None
    return min(int(window if isinstance(window, int) else window[0]), 2**30)


def head_scale(kv_heads: int, dtype, *scales) -> jax.Array:
    """Multiplies the scales (float, 0-d or ``[hk]``; None = 1) as ``[hk]``."""
    out = jnp.ones((kv_heads,), dtype)
    for s in scales:
        if s is not None:
            out = out * jnp.asarray(s, dtype)
    return out


def head_sinks(softmax_aux, heads: int, kv_heads: int, dtype):
    """Sinks as ``[hk, h // hk, num_sinks]``; a 1-D array is shared by all heads."""
    if softmax_aux is None or softmax_aux.shape[-1] == 0:
        return None
    aux = jnp.broadcast_to(softmax_aux, (heads, softmax_aux.shape[-1])).astype(dtype)
    return aux.reshape(kv_heads, heads // max(kv_heads, 1), softmax_aux.shape[-1])


def step_tokens(table: Tables | None, length: int, row_bytes: int, pages: int | None = None) -> int:
    """Tokens per step: full pages, about ``STEP_BYTES``, at most the length of the cache."""
    size = max(table.page_size, 1) if table is not None else 1
    tokens = pages * size if pages else STEP_BYTES // max(size_of(row_bytes), 1)
    tokens = tokens if pages else max(64, min(1024, tokens))
    count = max(1, at_most(tokens, length) // size)
    return count * size


def split_tiles(tiles: Tiles, splits: int) -> Tiles:
    """Each tile ``splits`` times, over consecutive ranges of its keys."""
    keys_per_split = -(-jnp.maximum(tiles.stop - tiles.start, 0) // splits)
    part = jnp.arange(splits, dtype=jnp.int32)[:, None]
    start = jnp.minimum(tiles.start[None] + part * keys_per_split[None], tiles.stop[None])
    stop = jnp.minimum(start + keys_per_split[None], tiles.stop[None])

    def repeat(x):
        return jnp.broadcast_to(x, (splits, *x.shape)).reshape(-1, *x.shape[1:])

    return Tiles(
        repeat(tiles.sequence), repeat(tiles.position), start.reshape(-1), stop.reshape(-1),
        jax.tree.map(repeat, tiles.tree),
    )  # fmt: skip


def merge_splits(o: jax.Array, log_sum: jax.Array, row_max: jax.Array, sinks, splits: int):
    """o and lse of all keys, from the results of ``attend`` for each split; sinks count once.

    A constant stands for the largest logit, so the gradient passes through ``log_sum`` alone.
    """
    o, log_sum, row_max = (x.reshape(splits, -1, *x.shape[1:]) for x in (o, log_sum, row_max))
    seen = row_max != NEG_INF
    alive = jnp.any(seen, axis=0)
    top = jnp.max(row_max, axis=0)
    if sinks is not None:
        sinks = sinks[None, :, :, None]
        top = jnp.maximum(top, jax.lax.stop_gradient(jnp.max(sinks, axis=-1)))
    top = jnp.where(alive, top, 0.0)
    # hidden splits get exponent 0 before the weight is dropped: an overflow in the branch that
    # is not selected would still make the gradient 0 * inf
    below = jnp.where(seen, jnp.minimum(jnp.where(seen, row_max, 0.0) - top[None], 0.0), 0.0)
    weight = jnp.where(seen, jnp.exp(below + jnp.where(seen, log_sum, 0.0)), 0.0)
    total = jnp.sum(weight, axis=0)
    if sinks is not None:
        sink = jnp.where(alive[..., None], sinks - top[..., None], 0.0)
        total = total + jnp.sum(jnp.exp(sink), axis=-1)
    total = jnp.where(alive, total, 1.0)
    o = jnp.sum(o * (weight / total[None])[..., None], axis=0)
    return o, jnp.where(alive, top + jnp.log(total), NEG_INF)


def attend_rows(
    spec: Spec, layout: Layout, q, arrays: Arrays, scale, sinks, tiles: Tiles, splits: int
):
    """``attend`` with tiles padded to full groups and, with ``splits`` > 1, keys in several splits.

    q ``[n, rows, hk, g, d]`` -> o ``[n, rows, hk, g, dv]``, lse ``[n, rows, hk, g]``.
    """
    n = q.shape[0]
    # where JAX's default integer is 64 bits wide, some were made of that and some were not
    tiles = Tiles(*(x.astype(jnp.int32) for x in tiles[:-1]), tiles.tree)
    if q.size == 0 or layout.capacity == 0:
        lse = jnp.full(q.shape[:-1], NEG_INF, spec.accumulate)
        return jnp.zeros((*q.shape[:-1], layout.value_dim(arrays)), spec.accumulate), lse
    if splits > 1:
        q = jnp.broadcast_to(q, (splits, *q.shape)).reshape(-1, *q.shape[1:])
        tiles = split_tiles(tiles, splits)
    q, arrays, scale, sinks, tiles = vary_alike((q, arrays, scale, sinks, tiles))
    pad = -q.shape[0] % spec.group

    def padded(x, value):
        return jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1), constant_values=value)

    tiles = Tiles(
        padded(tiles.sequence, 0), padded(tiles.position, -1),
        padded(tiles.start, 0), padded(tiles.stop, 0),
        jax.tree.map(lambda x: padded(x, 0), tiles.tree),
    )  # fmt: skip
    inside = None if splits > 1 else sinks
    parts = attend(spec, layout, padded(q, 0), arrays, scale, inside, tiles)
    o, log_sum, row_max = (x[: n * splits] for x in parts)
    row_max = jax.lax.stop_gradient(row_max)
    if splits > 1:
        o, lse = merge_splits(o, log_sum, row_max, sinks, splits)
    else:
        lse = row_max + log_sum
    return jnp.moveaxis(o, 3, 1), jnp.moveaxis(lse, 3, 1)


def attend_call(
    p: Any, layout: Layout, caches: Arrays, query: jax.Array, tiles: Tiles, tokens: int, *,
    sinks: jax.Array | None, scales: tuple[Any, ...], v_scale: Any = None,
    splits: int = 1, group: int | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """``attend_rows`` of a call with problem ``p``: ``query [n, rows, hk, g, d]``.

    ``scales`` multiply the logits; sinks and scales have the form of the call. One loop covers
    ``group`` tiles, by default all.
    """
    n, _, hk, g, _ = query.shape
    dtype = accumulation_dtype(query, *caches[: layout.num_caches])
    spec = Spec(
        tokens, group or max(n * splits, 1), p.logits_soft_cap, left_of(p.sliding_window), dtype
    )
    scale, sinks = head_scale(hk, dtype, *scales), head_sinks(sinks, hk * g, hk, dtype)
    # a row that sees no key, or its cotangent, may be NaN, of which 0 * NaN would reach every key
    first, last = (x[:, None] for x in (tiles.start, tiles.stop))
    sees_keys = (tiles.position >= jnp.maximum(first, 0)) & (first < last)
    alive = sees_keys[:, :, None, None, None]
    query = jnp.where(alive, query, 0)
    o, lse = attend_rows(spec, layout, query, caches, scale, sinks, tiles, splits)
    if v_scale is not None:
        o = o * head_scale(hk, dtype, v_scale)[None, None, :, None, None]
    return jnp.where(alive, o, 0), jnp.where(alive[..., 0], lse, NEG_INF)

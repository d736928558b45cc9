"""Attention of a few query rows over a long cache, block by block.

A *tile* is ``rows`` consecutive query rows of one sequence. All tiles of a group share
one loop over the cache, which covers only the blocks that a tile of the group can see, so its cost
follows the lengths, not the size of the table::

    x[i, j] = scale[head] * dot(q[i], k[j]);  x = cap * tanh(x / cap)
    visible: start <= j < stop, j <= position[i], position[i] - left <= j; with a tree, of the new
             tokens in place of the last two the marked ones and the row's own
    lse[i]  = log(sum_j exp(x[i, j]) + sum_s exp(sink[s]));  o[i] = sum_j exp(x - lse) v[j]

Online softmax: Milakov and Gimelshein 2018 (arXiv 1805.02867), Algorithm 3. The backward pass
recomputes the probabilities from the row's maximum and sum (FlashAttention, arXiv 2205.14135,
section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._paged.layouts import Arrays, Layout
from ejkernel.ops.second_order import current_operation, reverse_once
from ejkernel.ops.varying import zeros
from ejkernel.types.arrays import result_dtype
from ejkernel.types.attention.rows import sum_sinks
from ejkernel.types.attention.softmax import name_residuals

NEG_INF = float("-inf")


@dataclass(frozen=True)
class Spec:
    """Static properties: ``tokens`` per step, ``group`` tiles per loop, ``left`` window."""

    tokens: int
    group: int
    soft_cap: float | None = None
    left: int | None = None
    accumulate: jnp.dtype = jnp.float32
    operation: str = field(default_factory=current_operation)


class Tree(NamedTuple):
    """New tokens that rows see: ``mask [n, rows, columns]``, the first of them ``first [n]``, and
    of every row the position that the window counts, ``position [n, rows]``."""

    mask: jax.Array
    first: jax.Array
    position: jax.Array


class Tiles(NamedTuple):
    """Rows and keys of each tile: ``sequence [n]``, ``position [n, rows]`` (-1 for padding),
    ``start``/``stop [n]``, the range of its sequence's keys."""

    sequence: jax.Array
    position: jax.Array
    start: jax.Array
    stop: jax.Array
    tree: Tree | None = None


def _visible(spec: Spec, tiles: Tiles, position: jax.Array) -> jax.Array:
    """Boolean ``[n, rows, tokens]``."""
    i, j = tiles.position[:, :, None], position[None, None, :]
    at = i if tiles.tree is None else tiles.tree.position[:, :, None]
    seen = j <= i if spec.left is None else (j <= i) & (j >= at - spec.left)
    if tiles.tree is not None:
        mask, first, _ = tiles.tree
        column = j - first[:, None, None]
        inside = (column >= 0) & (column < mask.shape[2])
        columns = jnp.broadcast_to(column, (*mask.shape[:2], position.shape[0]))
        marked = jnp.take_along_axis(mask, jnp.clip(columns, 0, mask.shape[2] - 1), axis=2)
        seen = jnp.where(column < 0, seen, (inside & marked) | (j == i))
    seen &= (j >= tiles.start[:, None, None]) & (j < tiles.stop[:, None, None])
    return seen & (i >= 0) & (j >= 0)


def _block_range(spec: Spec, tiles: Tiles, capacity: int):
    """Returns the half-open range of blocks that some tile of the group sees."""
    row = tiles.position >= 0
    last = jnp.max(jnp.where(row, tiles.position, -1), axis=1) + 1
    first = jnp.min(jnp.where(row, tiles.position, capacity), axis=1)
    stop = jnp.where(last > 0, tiles.stop, 0)
    if tiles.tree is None:
        stop = jnp.minimum(stop, last)
    else:  # no position of a tree is before its first token
        first = jnp.minimum(first, tiles.tree.first)
    start = tiles.start if spec.left is None else jnp.maximum(tiles.start, first - spec.left)
    has_keys = stop > start
    lo = jnp.min(jnp.where(has_keys, start, capacity)) // spec.tokens
    hi = -(-jnp.max(jnp.where(has_keys, stop, 0)) // spec.tokens)
    return lo.astype(jnp.int32), hi.astype(jnp.int32)


def _logits(spec: Spec, q, k, scale):
    """Returns raw dot products and capped logits, ``[n, hk, g, rows, tokens]``."""
    dtype = result_dtype(q, k)
    raw = jnp.einsum(
        "nrkgd,ntkd->nkgrt",
        q.astype(dtype),
        k.astype(dtype),
        preferred_element_type=spec.accumulate,
    )
    x = raw * scale[None, :, None, None, None]
    if spec.soft_cap is not None:
        x = spec.soft_cap * jnp.tanh(x / spec.soft_cap)
    return raw, x


def _weighted(spec: Spec, p, x, equation: str):
    return jnp.einsum(equation, p.astype(x.dtype), x, preferred_element_type=spec.accumulate)


def _block(spec: Spec, layout: Layout, arrays, tiles: Tiles, c, dtype):
    """Returns keys, values and visibility; keys that no row sees may be NaN and are zeroed."""
    k, v, position = layout.fetch(arrays, tiles.sequence, c, spec.tokens)
    seen = _visible(spec, tiles, position)
    used = jnp.any(seen, axis=1)[:, :, None, None]
    # a quantised cache is exact in the query's dtype
    k, v = (
        jnp.where(used, x.astype(result_dtype(x, dtype) if _wide(x) else dtype), 0) for x in (k, v)
    )
    return k, v, seen[:, None, None]


def _wide(x: jax.Array) -> bool:
    """A float of at least 16 bits: differentiable, and not to be narrowed."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize >= 2


def _loop_over_blocks(spec: Spec, blocks, step, carry):
    """Returns the carry after ``step(block, carry)`` of a range of blocks."""
    return reverse_once(jax.lax.fori_loop(*blocks, step, carry), spec.operation)


def _group_forward(spec: Spec, layout: Layout, q, arrays, scale, sinks, tiles: Tiles):
    n, rows, hk, g, _ = q.shape
    blocks = _block_range(spec, tiles, layout.capacity)
    dv = layout.value_dim(arrays)

    def forward_step(c, carry):
        top, total, o = carry
        k, v, seen = _block(spec, layout, arrays, tiles, c, q.dtype)
        x = jnp.where(seen, _logits(spec, q, k, scale)[1], NEG_INF)
        new = jnp.maximum(top, jnp.max(x, axis=-1))
        safe = jnp.where(new == NEG_INF, 0.0, new)
        p = jnp.exp(jnp.minimum(x - safe[..., None], 0.0))
        keep = jnp.exp(top - safe)
        o = o * keep[..., None] + _weighted(spec, p, v, "nkgrt,ntkd->nkgrd")
        return new, total * keep + jnp.sum(p, axis=-1), o

    zero = zeros((n, hk, g, rows), spec.accumulate, q)
    init = (zero + NEG_INF, zero, zeros((n, hk, g, rows, dv), spec.accumulate, q))
    top, total, o = _loop_over_blocks(spec, blocks, forward_step, init)
    alive = total != 0
    # a compiler's maximum may drop NaN, and the row would look as if it saw no key
    top = jnp.where(jnp.isnan(total), total, top)
    top, total = jnp.where(alive, top, 0.0), jnp.where(alive, total, 1.0)
    row_max, keys = top, zero
    if sinks is not None:
        # the larger of the two maxima is the reference; one difference decides for both
        sink, weight = sum_sinks(sinks)
        gap = top - sink[None, :, :, None]
        row_max, keys = jnp.maximum(top, sink[None, :, :, None]), jnp.minimum(gap, 0.0)
        total = total * jnp.exp(keys) + jnp.exp(jnp.minimum(-gap, 0.0)) * weight[None, :, :, None]
    log_sum = jnp.log(total)
    o = jnp.where(alive[..., None], o * jnp.exp(keys - log_sum)[..., None], 0.0)
    return o, log_sum, jnp.where(alive, row_max, NEG_INF), top


def _group_backward(spec: Spec, layout: Layout, carry, q, arrays, scale, sinks, tiles, saved):
    """Adds this group's gradients to ``carry = (d arrays, d scale, d sinks)``; returns dq too."""
    o, log_sum, row_max, top, do, dlse = saved
    alive = row_max != NEG_INF
    row_max = jnp.where(alive, row_max, 0.0)
    log_scale = jnp.minimum(top - row_max, 0.0) - log_sum  # log(exp(top) / sum)
    # d x = p * (dot(do, v) - delta), where delta also carries the gradient of lse
    delta = jnp.where(alive, jnp.sum(do * o, axis=-1) - dlse, 0.0)
    tables = arrays[-1]

    def backward_step(c, carry):
        dq, grads, dscale = carry
        k, v, seen = _block(spec, layout, arrays, tiles, c, q.dtype)
        raw, x = _logits(spec, q, k, scale)
        below = jnp.where(seen, jnp.minimum(x - top[..., None], 0.0), 0.0)
        p = jnp.where(seen, jnp.exp(below + log_scale[..., None]), 0.0)
        dv = _weighted(spec, p, do, "nkgrt,nkgrd->ntkd")
        dp = jnp.einsum("nkgrd,ntkd->nkgrt", do, v.astype(do.dtype))
        ds = p * (dp - delta[..., None])
        if spec.soft_cap is not None:
            ds = ds * (1 - jnp.square(x / spec.soft_cap))
        dscale = dscale + jnp.sum(jnp.where(seen, ds * raw, 0.0), axis=(0, 2, 3, 4))
        ds = ds * scale[None, :, None, None, None]
        dq = dq + jnp.einsum("nkgrt,ntkd->nrkgd", ds, k.astype(ds.dtype))
        dk = jnp.einsum("nkgrt,nrkgd->ntkd", ds, q.astype(ds.dtype))
        if grads is not None:
            grads = layout.accumulate(grads, tables, tiles.sequence, c, dk, dv)
        return dq, grads, dscale

    grads, dscale, dsinks = carry
    dq = zeros(q.shape, spec.accumulate, q)
    blocks = _block_range(spec, tiles, layout.capacity)
    dq, grads, dscale = _loop_over_blocks(spec, blocks, backward_step, (dq, grads, dscale))
    if sinks is not None:
        below = jnp.minimum(sinks[None, :, :, None] - row_max[..., None], 0.0)
        p_sink = jnp.where(alive[..., None], jnp.exp(below - log_sum[..., None]), 0.0)
        dsinks = dsinks - jnp.sum(p_sink * delta[..., None], axis=(0, 3))
    return (grads, dscale, dsinks), dq


def _grouped(spec: Spec, x):
    """Every leading tile axis as ``[groups, group, ...]``."""
    return jax.tree.map(lambda a: a.reshape(a.shape[0] // spec.group, spec.group, *a.shape[1:]), x)


def _flat(x):
    return jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), x)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(spec: Spec, layout: Layout, q, arrays: Arrays, scale, sinks, tiles: Tiles):
    """``o [n, hk, g, rows, dv]``, ``log_sum`` and ``row_max`` ``[n, hk, g, rows]`` of every tile.

    lse = row_max + log_sum, kept apart because their sum loses the smaller one when logits are
    large; ``row_max`` is the largest logit, sinks included, -inf for a row that sees no key. All in
    the accumulation dtype.

    q ``[n, rows, hk, g, d]`` with ``n`` a multiple of ``spec.group``; scale ``[hk]``; sinks ``[hk,
    g, num_sinks]`` or None. Differentiable in q, the float caches of at least 16 bits, scale and
    sinks, through o and log_sum, whose gradient is that of lse: ``row_max`` is a constant.
    """
    return _forward(spec, layout, q, arrays, scale, sinks, tiles)[0]


def _forward(spec: Spec, layout: Layout, q, arrays, scale, sinks, tiles):
    def group(_, x):
        return None, _group_forward(spec, layout, x[0], arrays, scale, sinks, x[1])

    x = _grouped(spec, (q, tiles))
    if q.shape[0] == spec.group:
        first = jax.tree.map(lambda a: a[0], x)
        out = group(None, first)[1]
    else:
        out = _flat(jax.lax.scan(group, None, x)[1])
    out = name_residuals(*out)
    return out[:3], (q, arrays, scale, sinks, tiles, *out)


def _backward(spec: Spec, layout: Layout, saved, cotangent):
    # a numpy argument is saved as it came, and numpy cannot be indexed by a traced number
    q, arrays, scale, sinks, tiles, *rows = jax.tree.map(jnp.asarray, saved)
    caches = arrays[: layout.num_caches]
    floats = any(_wide(a) for a in caches)
    grads = tuple(zeros(a.shape, spec.accumulate, q) for a in caches) if floats else None
    init = (
        grads,
        zeros(scale.shape, spec.accumulate, q),
        None if sinks is None else zeros(sinks.shape, spec.accumulate, q),
    )

    def group(carry, x):
        gq, gtiles, *saved = x
        return _group_backward(spec, layout, carry, gq, arrays, scale, sinks, gtiles, saved)

    x = _grouped(spec, (q, tiles, *rows, *cotangent[:2]))
    (grads, dscale, dsinks), dq = jax.lax.scan(group, init, x)
    # 8-bit caches have no gradient
    darrays = [None] * len(arrays)
    for i, cache in enumerate(caches):
        if grads is not None and _wide(cache):
            darrays[i] = grads[i].astype(cache.dtype)
    return (
        _flat(dq).astype(q.dtype),
        tuple(darrays),
        dscale.astype(scale.dtype),
        None if sinks is None or dsinks is None else dsinks.astype(sinks.dtype),
        None,
    )


attend.defvjp(_forward, _backward)

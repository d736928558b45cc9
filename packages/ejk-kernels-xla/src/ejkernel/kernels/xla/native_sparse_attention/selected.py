"""Attention of every token over the blocks selected for it.

Per tile of queries the selected blocks are gathered a few slots at a time::

    x[t, j] = scale * dot(q[t], k[j]) for j <= t in the selected blocks; o[t] = softmax(x[t]) v

The group's query heads share the gathered keys, so a tile costs ``2 * rows * slots * size * h *
(d + dv)`` operations and reads ``rows * slots * size * hk * (d + dv)`` elements: without reuse
between neighbouring tokens the bytes decide. No array is larger than a tile's gathered keys.
Source: Native Sparse Attention (arXiv 2502.11089), sections 3.3 and 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops.varying import zeros
from ejkernel.types.arrays import result_dtype
from ejkernel.types.attention.softmax import name_residuals
from ejkernel.types.masks.blocks import cdiv

NEG_INF = float("-inf")


@dataclass(frozen=True)
class Spec:
    """``size`` tokens a block, ``rows`` queries a tile, ``slots`` selected blocks a step."""

    scale: float
    size: int
    rows: int
    slots: int
    accumulate: jnp.dtype


class Rows(NamedTuple):
    """Per token of one batch row: ``chosen [s, hk, S]``, ``start [s]`` and ``position [s]``."""

    chosen: jax.Array
    start: jax.Array
    position: jax.Array


def _tokens(spec: Spec, rows: Rows, length: int, step):
    """Returns token indices ``[r, hk, slots * size]`` of one step and whether each may be seen; and
    the first token of each block, ``[r, hk, slots]``."""
    chosen = lax.dynamic_slice_in_dim(rows.chosen, step * spec.slots, spec.slots, axis=2)
    inside = (
        chosen[..., None] * spec.size + jnp.arange(spec.size, dtype=jnp.int32)[None, None, None]
    )
    seen = (chosen[..., None] >= 0) & (inside <= rows.position[:, None, None, None])
    token = rows.start[:, None, None, None] + inside
    flat = (*chosen.shape[:2], -1)
    return jnp.clip(token, 0, length - 1).reshape(flat), seen.reshape(flat), token[..., 0]


def _gather(x, token):
    """``[r, hk, t, d]`` of ``x [s, hk, d]``: head m reads its own tokens.

    Heads are an axis of the gather and not an index, so that sharded ones stay where they are.
    """
    return jax.vmap(lambda x, token: x[token], 1, 1)(x, token)


def _scatter_add(x, token, block, update):
    """``x [s, hk, d]`` with ``update [r, hk, t, d]`` added at each head's own tokens.

    ``block [r, hk, slots]``: the first of each ``t / slots`` tokens.
    """
    return lax.platform_dependent(
        x, token, block, update, default=_add_each, cuda=_add_block_sums, rocm=_add_block_sums
    )


def _add_each(x, token, block, update):
    return jax.vmap(lambda x, token, u: x.at[token].add(u), 1, 1)(x, token, update)


def _add_block_sums(x, token, block, update):
    """``_add_each`` in one order: a scatter on GPUs adds what several rows have for a block in any.

    The first entry of a block adds the sum of all of them; the others add nothing.
    """

    def of_head(x, token, block, update):
        entries = block.reshape(-1)
        token = token.reshape(entries.size, -1)
        update = update.reshape(*token.shape, -1)
        same = entries[:, None] == entries[None]
        sums = jnp.sum(jnp.where(same[:, :, None, None], update[None], 0), 1)
        is_first = ~jnp.any(jnp.tril(same, -1), 1)
        token = jnp.where(is_first[:, None], token, x.shape[0])
        return x.at[token].add(sums, mode="drop")

    return jax.vmap(of_head, 1, 1)(x, token, block, update)


def _logits(spec: Spec, q, k):
    dtype = result_dtype(q, k)
    x = jnp.einsum(
        "rkgd,rktd->rkgt", q.astype(dtype), k.astype(dtype), preferred_element_type=spec.accumulate
    )
    return spec.scale * x


def _tile_forward(spec: Spec, q, k, v, rows: Rows):
    """o ``[r, hk, g, dv]`` of one tile, and of every row the largest logit and the logarithm of
    the sum relative to it, ``[r, hk, g]``; 0 without keys."""

    def forward_step(i, carry):
        top, total, o = carry
        token, seen, _ = _tokens(spec, rows, k.shape[0], i)
        x = jnp.where(seen[:, :, None], _logits(spec, q, _gather(k, token)), NEG_INF)
        new = jnp.maximum(top, jnp.max(x, -1))
        safe = jnp.where(new == NEG_INF, 0.0, new)
        p, keep = jnp.exp(jnp.minimum(x - safe[..., None], 0.0)), jnp.exp(top - safe)
        add = jnp.einsum(
            "rkgt,rktd->rkgd", p.astype(v.dtype), _gather(v, token),
            preferred_element_type=spec.accumulate,
        )  # fmt: skip
        return new, total * keep + jnp.sum(p, -1), o * keep[..., None] + add

    zero = zeros(q.shape[:-1], spec.accumulate, q)
    o = zeros((*q.shape[:-1], v.shape[-1]), spec.accumulate, q)
    steps = rows.chosen.shape[2] // spec.slots
    top, total, o = lax.fori_loop(0, steps, forward_step, (zero + NEG_INF, zero, o))
    alive = total != 0  # as NaN is, which is not to become a row without keys
    total = jnp.where(alive, total, 1.0)
    return o / total[..., None], jnp.where(alive, top, 0.0), jnp.log(total)


def _tile_backward(spec: Spec, dk, dv, q, k, v, rows: Rows, o, top, log_sum, do):
    """Adds to ``dk [s, hk, d]`` and ``dv``; returns dq of the tile."""
    top, log_sum = top[..., None], log_sum[..., None]
    delta = jnp.sum(do * o, -1)[..., None]

    def backward_step(i, carry):
        dq, dk, dv = carry
        token, seen, block = _tokens(spec, rows, k.shape[0], i)
        kt, vt = _gather(k, token), _gather(v, token)
        x = jnp.where(seen[:, :, None], _logits(spec, q, kt) - top, NEG_INF)
        p = jnp.exp(jnp.minimum(x, 0.0) - log_sum)
        dp = jnp.einsum("rkgd,rktd->rkgt", do, vt.astype(do.dtype))
        ds = spec.scale * p * (dp - delta)
        dq = dq + jnp.einsum("rkgt,rktd->rkgd", ds, kt.astype(ds.dtype))
        dk = _scatter_add(dk, token, block, jnp.einsum("rkgt,rkgd->rktd", ds, q.astype(ds.dtype)))
        dv = _scatter_add(dv, token, block, jnp.einsum("rkgt,rkgd->rktd", p, do))
        return dq, dk, dv

    steps = rows.chosen.shape[2] // spec.slots
    start = (zeros(q.shape, spec.accumulate, q), dk, dv)
    dq, dk, dv = lax.fori_loop(0, steps, backward_step, start)
    return dk, dv, dq


def _cut(spec: Spec, x):
    """Leading token axes as ``[tiles, rows, ...]``; the padding of the last tile sees nothing."""

    def cut_axis(a, fill=0):
        tiles = cdiv(a.shape[0], spec.rows)
        pad = tiles * spec.rows - a.shape[0]
        a = jnp.pad(a, [(0, pad)] + [(0, 0)] * (a.ndim - 1), constant_values=fill)
        return a.reshape(tiles, spec.rows, *a.shape[1:])

    return jax.tree.map(lambda a: cut_axis(a, -1 if jnp.issubdtype(a.dtype, jnp.integer) else 0), x)


def _join(x, length: int):
    return x.reshape(-1, *x.shape[2:])[:length]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_selected(spec: Spec, q, k, v, rows: Rows):
    """o ``[s, hk, g, dv]`` of one batch row, accumulation dtype.

    q ``[s, hk, g, d]``, k ``[s, hk, d]``, v ``[s, hk, dv]``; the slot axis of ``rows.chosen`` is a
    multiple of ``spec.slots``. Differentiable in q, k and v.
    """
    return _forward(spec, q, k, v, rows)[0]


def _forward(spec: Spec, q, k, v, rows: Rows):
    def tile(_, x):
        return None, _tile_forward(spec, x[0], k, v, x[1])

    tiles = lax.scan(tile, None, _cut(spec, (q, rows)))[1]
    o, top, log_sum = (_join(x, q.shape[0]) for x in tiles)
    o, top, log_sum = name_residuals(o, top, log_sum)
    return o, (q, k, v, rows, o, top, log_sum)


def _backward(spec: Spec, saved, do):
    q, k, v, rows, o, top, log_sum = saved

    def tile(carry, x):
        q, rows, o, top, log_sum, do = x
        dk, dv, dq = _tile_backward(spec, *carry, q, k, v, rows, o, top, log_sum, do)
        return (dk, dv), dq

    start = tuple(zeros(a.shape, spec.accumulate, q) for a in (k, v))
    (dk, dv), dq = lax.scan(tile, start, _cut(spec, (q, rows, o, top, log_sum, do)))
    dq = _join(dq, q.shape[0])
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


attend_selected.defvjp(_forward, _backward)

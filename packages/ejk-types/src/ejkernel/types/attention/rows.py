"""Rows of softmax attention over a part of the keys: their normaliser, and how parts are merged.

Logits are in a *unit*: the natural logit is unit * x, unit > 0. The difference of two logits is
taken before it is multiplied by the unit, so that rows of any finite logits keep their weights:
lse alone, which adds a maximum and the logarithm of a sum, loses the smaller one when logits are
large.

Sources: Milakov and Gimelshein 2018 (online normaliser); Dao 2023, FlashAttention-2, section 3.1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.types.attention.problem import LOG2E

LN2 = math.log(2.0)
# log2_scale of a row that sees no key; finite, so that no array holds an infinity
DEAD = -3e38
FAINT = -1e30  # the smallest log2_scale of a row that sees a key


class Rows(NamedTuple):
    """Normaliser of finished rows ``[b, q, h]``, over keys alone.

    Attributes:
        m: the maximum in units; -inf: no key.
        l2: log2 of the sum of exponentials relative to it.
    """

    m: jax.Array
    l2: jax.Array


class RowScales(NamedTuple):
    """Row values for the backward pass; m is finite, ``log2_scale`` is DEAD without keys.

    p = 2**(c (x - m) + log2_scale) for a key, 2**((sink - top) * log2(e) + sinks) for a sink.
    """

    m: jax.Array
    log2_scale: jax.Array
    sinks: jax.Array | None = None

    @property
    def alive(self) -> jax.Array:
        return self.log2_scale >= FAINT


def finite(m: jax.Array) -> jax.Array:
    """Returns ``m`` with 0 in place of -inf."""
    return jnp.where(m == -jnp.inf, 0.0, m)


def exponent(x: jax.Array, m: jax.Array, unit: float) -> jax.Array:
    """Returns c (x - m), never above 0: m is a maximum that x may be recomputed for."""
    below = jnp.minimum(x - m, 0.0)
    c = unit * LOG2E
    return below if abs(c - 1.0) < 1e-12 else below * c


def merge(
    a: tuple[jax.Array, Rows], b: tuple[jax.Array, Rows], unit: float
) -> tuple[jax.Array, Rows]:
    """Returns o ``[b, q, h, dv]`` and ``Rows`` of two finished parts over disjoint keys."""
    (o_a, rows_a), (o_b, rows_b) = a, b
    m = jnp.maximum(rows_a.m, rows_b.m)
    w_a, w_b = (jnp.exp2(exponent(r.m, finite(m), unit) + r.l2) for r in (rows_a, rows_b))
    total = jnp.where(m == -jnp.inf, 1.0, w_a + w_b)
    o = o_a * (w_a / total)[..., None] + o_b * (w_b / total)[..., None]
    return o, Rows(m, jnp.log2(total))


def finalize_rows(
    o: jax.Array, rows: Rows, sinks: jax.Array | None, unit: float
) -> tuple[jax.Array, jax.Array, RowScales]:
    """Returns o, the natural lse and ``RowScales`` of finished rows, with the sinks counted once.

    o ``[b, q, h, dv]``, rows ``[b, q, h]``, sinks ``[h, n]`` natural logits. Rows that saw no key
    give 0 and -inf.
    """
    empty = rows.m == -jnp.inf
    m = finite(rows.m)
    if sinks is None or sinks.shape[-1] == 0:
        lse = jnp.where(empty, rows.m, m * unit + rows.l2 * LN2)
        return o, lse, RowScales(m, jnp.where(empty, DEAD, -rows.l2))
    top, weight = sum_sinks(sinks.astype(m.dtype))
    # the larger of the two maxima is the reference; one difference decides for both
    top, weight = top[None, None], weight[None, None]
    gap = m * unit - top
    key, sink = (jnp.minimum(d, 0.0) * LOG2E for d in (gap, -gap))
    l2 = jnp.log2(jnp.exp2(key + rows.l2) + jnp.exp2(sink) * weight)
    lse = jnp.where(empty, rows.m, jnp.maximum(m * unit, top) + l2 * LN2)
    o = o * jnp.where(empty, 0.0, jnp.exp2(key + rows.l2 - l2))[..., None]
    key, sink = (jnp.where(empty, DEAD, jnp.maximum(x - l2, FAINT)) for x in (key, sink))
    return o, lse, RowScales(m, key, sink)


def sum_sinks(sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the largest of ``[..., n]``, finite, and the sum of exponentials relative to it."""
    top = jnp.maximum(sinks.max(-1), jnp.finfo(sinks.dtype).min)
    return top, jnp.exp2((sinks - top[..., None]) * LOG2E).sum(-1)


def sink_gradient(
    sinks: jax.Array | None, row_scales: RowScales, delta: jax.Array
) -> jax.Array | None:
    """Returns d(sinks) ``[h, n]`` = -sum over rows of exp(sink - lse) * delta.

    Rows without keys add 0. delta ``[b, q, h]`` = sum(do * o) - dlse.
    """
    if sinks is None:
        return None
    if row_scales.sinks is None:
        return jnp.zeros_like(sinks)
    wide = sinks.astype(delta.dtype)
    top, _ = sum_sinks(wide)
    p = jnp.exp2(((wide - top[:, None]) * LOG2E)[None, None] + row_scales.sinks[..., None])
    grad = -(p * jnp.where(row_scales.alive, delta, 0.0)[..., None]).sum((0, 1))
    return grad.astype(sinks.dtype)

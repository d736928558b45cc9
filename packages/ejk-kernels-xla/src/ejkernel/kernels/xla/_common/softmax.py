"""Online softmax in base 2.

Logits arrive multiplied by log2(e). A row's state is (acc, m, l): the sum of 2**(x - m) * v, the
running maximum and the sum of 2**(x - m). Hidden logits are -inf; a row that has seen none has
m = -inf, and the maximum is then replaced by 0 before it is subtracted, so nothing is ever NaN.
Sources: Milakov and Gimelshein 2018 (online normaliser); Dao 2023, FlashAttention-2, section 3.1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


class RowState(NamedTuple):
    """acc ``[..., r, dv]``, m and l ``[..., r]``."""

    acc: jax.Array
    m: jax.Array
    l: jax.Array  # noqa: E741


def finite(m: jax.Array) -> jax.Array:
    """``m`` with -inf replaced by 0."""
    return jnp.where(m == -jnp.inf, 0.0, m)


def shift(m: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The maximum after seeing ``x`` ``[..., c]``, what rescales the old sums, and 2**(x - m)."""
    m_new = jnp.maximum(m, x.max(-1))
    base = finite(m_new)
    return m_new, jnp.exp2(m - base), jnp.exp2(x - base[..., None])


def finish(state: RowState) -> tuple[jax.Array, jax.Array]:
    """Normalised output ``[..., r, dv]`` and lse in base 2; a row without keys gives 0, -inf."""
    empty = state.m == -jnp.inf
    total = jnp.where(empty, 1.0, state.l)
    lse2 = jnp.where(empty, -jnp.inf, state.m + jnp.log2(total))
    return state.acc / total[..., None], lse2


def add_sinks(
    o: jax.Array, lse2: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Count the sink logits once in a finished row.

    o ``[b, q, h, dv]``, lse2 ``[b, q, h]`` in base 2, sinks ``[h, n]`` natural logits. Rows that
    saw no key stay 0 and -inf.
    """
    if sinks is None or sinks.shape[-1] == 0:
        return o, lse2
    x = sinks.astype(lse2.dtype)[None, None] * LOG2E
    m = finite(jnp.maximum(lse2, x.max(-1)))
    own = jnp.exp2(lse2 - m)
    total = own + jnp.exp2(x - m[..., None]).sum(-1)
    empty = lse2 == -jnp.inf
    with_sinks = jnp.where(empty, -jnp.inf, m + jnp.log2(jnp.where(empty, 1.0, total)))
    return o * jnp.where(empty, 0.0, own / jnp.where(empty, 1.0, total))[..., None], with_sinks


def merge(
    a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Join two finished parts (o, lse2) of the same rows over disjoint keys."""
    (o_a, lse_a), (o_b, lse_b) = a, b
    m = finite(jnp.maximum(lse_a, lse_b))
    w_a, w_b = jnp.exp2(lse_a - m), jnp.exp2(lse_b - m)
    total = w_a + w_b
    empty = total == 0
    safe = jnp.where(empty, 1.0, total)
    o = o_a * (w_a / safe)[..., None] + o_b * (w_b / safe)[..., None]
    return o, jnp.where(empty, -jnp.inf, m + jnp.log2(safe))


def sink_gradient(sinks: jax.Array | None, lse2: jax.Array, delta: jax.Array) -> jax.Array | None:
    """d(sinks) ``[h, n]`` = -sum over rows of exp(sink - lse) * delta; rows without keys add 0.

    lse2 and delta ``[b, q, h]``, delta = sum(do * o) - dlse.
    """
    if sinks is None:
        return None
    alive = lse2 > -jnp.inf
    x = sinks.astype(lse2.dtype)[None, None] * LOG2E
    x = x - jnp.where(alive, lse2, jnp.inf)[..., None]
    grad = -(jnp.exp2(x) * jnp.where(alive, delta, 0.0)[..., None]).sum((0, 1))
    return grad.astype(sinks.dtype)

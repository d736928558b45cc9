"""Online softmax in base 2, for logits of any finite size.

Logits arrive in a *unit*: the natural logit is unit * x, unit > 0 (the soft cap, or the scale where
nothing is added to the dot products). A row's state is (acc, m, l): the sum of 2**(c (x - m)) * v
with c = unit * log2(e), the running maximum and the sum of 2**(c (x - m)). Hidden logits are -inf;
a row without visible logits has m = -inf, which becomes 0 before it is subtracted.

The difference is taken first, of two values that were computed alike, then multiplied: a compiler
that fuses a multiplication with the following subtraction would round x otherwise than the maximum,
by an ulp, which is 1024 at 1e10. Finished rows are ``ejkernel.types.attention.rows``.

Sources: Milakov and Gimelshein 2018 (online normaliser); Dao 2023, FlashAttention-2, section 3.1.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.types.attention.rows import Rows, exponent, finite


class RowState(NamedTuple):
    """acc ``[..., r, dv]``, m and l ``[..., r]``."""

    acc: jax.Array
    m: jax.Array
    l: jax.Array  # noqa: E741


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def narrowed(bias: jax.Array, dtype: Any) -> jax.Array:
    """``bias`` in ``dtype``, finite where it was: float64 holds values that float32 does not."""
    if float(jnp.finfo(bias.dtype).max) <= float(jnp.finfo(dtype).max):
        return bias.astype(dtype)
    top = jnp.asarray(jnp.finfo(dtype).max, bias.dtype)
    return jnp.where(jnp.isinf(bias), bias, jnp.clip(bias, -top, top)).astype(dtype)


@narrowed.defjvp
def _narrowed_jvp(dtype: Any, primals: Any, tangents: Any) -> Any:
    return narrowed(primals[0], dtype), tangents[0].astype(dtype)


def shift(m: jax.Array, x: jax.Array, unit: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the maximum including ``x`` ``[..., c]``, the accumulators' factor and weights."""
    m_new = jnp.maximum(m, x.max(-1))
    base = finite(m_new)
    weights = jnp.exp2(exponent(x, base[..., None], unit))
    return m_new, jnp.exp2(exponent(m, base, unit)), weights


def finish(state: RowState) -> tuple[jax.Array, Rows]:
    """Normalised output ``[..., r, dv]`` and normaliser; a row without keys gives 0."""
    # a compiler's maximum may drop NaN, and the row would look as if it saw no key
    m = jnp.where(jnp.isnan(state.l), state.l, state.m)
    total = jnp.where(m == -jnp.inf, 1.0, state.l)
    return state.acc / total[..., None], Rows(m, jnp.log2(total))

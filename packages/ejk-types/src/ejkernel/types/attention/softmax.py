"""Steps of attention on plain arrays, next to its kernels: empty calls, reductions over rows.

With ``p = exp(x - lse)``, ``o = p v`` and cotangents ``do`` and ``dlse``, the logits' gradient is
``dx = p * (do . v - delta)`` where ``delta = do . o - dlse``; a sink has no value, so its gradient
is ``-exp(sink - lse) * delta`` summed over rows. (FlashAttention, arXiv 2205.14135, appendix B.2.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ejkernel.types.arrays import result_dtype

OUT, LSE = "ejkernel_out", "ejkernel_lse"


def name_output(o: jax.Array) -> jax.Array:
    """Names the output of a forward pass that saves no other residual."""
    return checkpoint_name(o, OUT)


def name_lse(rows: Any) -> Any:
    """Names the arrays with one value per row that a gradient needs in addition to the output."""
    return jax.tree.map(lambda x: checkpoint_name(x, LSE), rows)


def name_residuals(o: jax.Array, *rows: Any) -> tuple[Any, ...]:
    """Names the residuals of a forward pass by the names that callers may save it by.

    A policy of ``jax.checkpoint`` that saves both names never runs the forward kernel twice, if
    the arrays named here are the residuals themselves.
    """
    return name_output(o), *map(name_lse, rows)


def empty_outputs(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """Returns the outputs of a call without rows, keys or heads; None for every other call.

    Args:
        q, k, v: ``[b, q, h, d]``, ``[b, k, hk, d]``, ``[b, k, hk, dv]``.

    Returns:
        o ``[b, q, h, dv]`` of zeros in q's dtype and lse float32 ``[b, q, h]`` of -inf: no row
        sees a key. No gradient passes through them.
    """
    b, q_len, h, _ = q.shape
    if 0 not in (b, q_len, k.shape[1], h):
        return None
    o = jnp.zeros((b, q_len, h, v.shape[3]), q.dtype)
    return o, jnp.full((b, q_len, h), -jnp.inf, jnp.float32)


def row_delta(o: jax.Array, do: jax.Array, dlse: jax.Array, *, in_order: bool = False) -> jax.Array:
    """Returns ``delta = do . o - dlse``, float32 ``[b, h, q]``.

    o and do ``[b, q, h, dv]``; dlse ``[b, h, q]``. ``in_order``: additions have one order whatever
    the number of rows; XLA chooses another for each.
    """
    if in_order:
        # fused with an addition it would not be rounded, and fusions follow from the shapes
        products = jax.lax.optimization_barrier(do.astype(jnp.float32) * o.astype(jnp.float32))
        return jnp.swapaxes(sum_by_halves(products), 1, 2) - dlse
    delta = jnp.einsum(
        "bqhd,bqhd->bhq", do, o, preferred_element_type=jnp.float32, precision="highest"
    )
    return delta - dlse


def sum_by_halves(x: jax.Array) -> jax.Array:
    """Returns the sum over the last axis in one order: each half is added to the other."""
    if not x.shape[-1]:
        return jnp.zeros(x.shape[:-1], x.dtype)
    while (size := x.shape[-1]) > 1:
        half = size // 2
        pairs = x[..., :half] + x[..., half : 2 * half]
        x = jnp.concatenate([pairs, x[..., 2 * half :]], -1) if size % 2 else pairs
    return x[..., 0]


def sink_gradient(sink: jax.Array | None, lse: jax.Array, delta: jax.Array) -> jax.Array | None:
    """Returns the gradient ``[1, h]`` of one sink logit per head; None without sinks.

    sink ``[1, h]``; lse (natural log, sink included) and delta ``[b, h, q]``. Rows without keys
    add 0.
    """
    if sink is None:
        return None
    alive = lse != -jnp.inf
    weight = jnp.exp(sink[:, :, None] - jnp.where(alive, lse, jnp.inf))
    return -jnp.sum(weight * jnp.where(alive, delta, 0.0), axis=(0, 2))[None]


def count_sinks(o: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns o ``[..., h, dv]`` and lse ``[..., h]`` of rows with the sinks ``[h, sinks]``.

    Rows that see no key stay as they are.
    """
    head_lse = jax.nn.logsumexp(sinks.astype(lse.dtype), axis=-1)
    row_lse = jnp.where(lse != -jnp.inf, jnp.broadcast_to(head_lse, lse.shape), -jnp.inf)
    return merge_parts([o, jnp.zeros_like(o)], [lse, row_lse])


def merge_parts(
    outs: Sequence[jax.Array], lses: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns ``(o, lse)`` of the attention over the union of disjoint sets of keys.

    With ``w_i = exp(lse_i - lse)`` and ``lse = log(sum_i exp(lse_i))`` the output is
    ``sum_i w_i o_i``. A part with lse -inf counts nothing, whatever its output holds; a row for
    which all parts are so gives 0 and -inf. Differentiable in both.

    Args:
        outs: ``[..., dv]``, one array for each set of keys.
        lses: ``[...]``, natural log.

    Returns:
        Both in the accumulation dtype: float32, or float64 if one of the arrays is.
    """
    wide = result_dtype(jnp.float32, *outs, *lses)
    lses = [lse.astype(wide) for lse in lses]
    # the result does not depend on the maximum, so no gradient has to go through it
    top = jax.lax.stop_gradient(reduce(jnp.maximum, lses))
    base = jnp.where(top > -jnp.inf, top, 0)
    weights = [jnp.exp(lse - base) for lse in lses]
    total = reduce(jnp.add, weights)
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    # 0 * NaN is NaN, and a kernel need not write rows that see nothing
    terms = [
        jnp.where((w > 0)[..., None], o.astype(wide), 0) * (w / total)[..., None]
        for o, w in zip(outs, weights, strict=True)
    ]
    return reduce(jnp.add, terms), jnp.where(is_empty, -jnp.inf, base + jnp.log(total))

"""Steps of attention on plain arrays, next to its kernels: empty calls, reductions over rows.

With ``p = exp(x - lse)``, ``o = p v`` and cotangents ``do`` and ``dlse``, the logits' gradient is
``dx = p * (do . v - delta)`` where ``delta = do . o - dlse``; a sink has no value, so its gradient
is ``-exp(sink - lse) * delta`` summed over rows. (FlashAttention, arXiv 2205.14135, appendix B.2.)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

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


def row_delta(o: jax.Array, do: jax.Array, dlse: jax.Array) -> jax.Array:
    """``delta = do . o - dlse``, float32 ``[b, h, q]``.

    o and do ``[b, q, h, dv]``; dlse ``[b, h, q]``.
    """
    delta = jnp.einsum(
        "bqhd,bqhd->bhq", do, o, preferred_element_type=jnp.float32, precision="highest"
    )
    return delta - dlse


def sink_gradient(sink: jax.Array | None, lse: jax.Array, delta: jax.Array) -> jax.Array | None:
    """Gradient ``[1, h]`` of one sink logit per head; rows without keys add 0. None without sinks.

    sink ``[1, h]``; lse (natural log, sink included) and delta ``[b, h, q]``.
    """
    if sink is None:
        return None
    alive = lse > -jnp.inf
    share = jnp.exp(sink[:, :, None] - jnp.where(alive, lse, jnp.inf))
    return -jnp.sum(share * jnp.where(alive, delta, 0.0), axis=(0, 2))[None]

"""State space duality (Mamba-2) in the terms of its paper, by recurrent_attention."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules._configs import RecurrentAttentionConfig
from ejkernel.modules._op import own_errors
from ejkernel.modules.operations.recurrent_attention import recurrent_attention
from ejkernel.ops import Platform, env
from ejkernel.types.calls.signature import Boundary
from ejkernel.types.calls.words import Array, F, I, invalid


def _signature(
    x: F[Array, "batch seq heads v_dim"],
    dt: F[Array, "batch seq heads"],
    A: F[Array, " heads"],
    B: F[Array, "batch seq groups key_dim"],
    C: F[Array, "batch seq groups key_dim"],
    D: F[Array, " heads"] | F[Array, "heads v_dim"] | None = None,
    dt_bias: F[Array, " heads"] | None = None,
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    dt_softplus: bool = False,
    return_state: bool = False,
) -> None: ...


_BOUNDARY = Boundary.from_function("ssd_attention", _signature)


def ssd_attention(
    x: F[Array, "batch seq heads v_dim"],
    dt: F[Array, "batch seq heads"],
    A: F[Array, " heads"],
    B: F[Array, "batch seq groups key_dim"],
    C: F[Array, "batch seq groups key_dim"],
    D: F[Array, " heads"] | F[Array, "heads v_dim"] | None = None,
    dt_bias: F[Array, " heads"] | None = None,
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    dt_softplus: bool = False,
    return_state: bool = False,
    platform: str | Platform | None = None,
    cfg: RecurrentAttentionConfig | Mapping[str, Any] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The state space layer of Mamba-2, by :func:`recurrent_attention`.

    Per batch row and head, with the state H ``[key_dim, v_dim]`` starting at ``initial_state`` or
    0::

        dt_t = softplus(dt_t + dt_bias)                 # either or both, by arguments
        H = exp(dt_t * A) * H + outer(B_t, dt_t * x_t)
        y_t = C_t @ H + D * x_t

    Args:
        x: ``[batch, seq, heads, v_dim]``.
        dt: step sizes ``[batch, seq, heads]``, positive after the softplus.
        A: decay rates ``[heads]``, normally negative.
        B, C: ``[batch, seq, groups, key_dim]``; head i reads group ``i // (heads // groups)``.
        D: the skip connection, ``[heads]`` or ``[heads, v_dim]``; None: none.
        dt_bias: ``[heads]``, added to ``dt`` before the softplus.
        initial_state: ``[batch, heads, key_dim, v_dim]``, or one per sequence with cu_seqlens.
        cu_seqlens: as of :func:`recurrent_attention`.
        dt_softplus: take the softplus of ``dt``.
        return_state: also return the state after the last step.
        platform, cfg: of recurrent_attention.

    Returns:
        ``[batch, seq, heads, v_dim]`` in the dtype of ``x``; with ``return_state`` also the states
        in float32 (float64 for float64 inputs). Gates are computed in that dtype, ``dt * x`` is
        rounded to the dtype of ``x``.

    Raises:
        InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.

    Differentiable in x, dt, A, B, C, D, dt_bias and initial_state.

    Source: Dao and Gu 2024, "Transformers are SSMs" (arXiv 2405.21060), sections 5 and 7.
    """
    operands: dict[str, Any] = dict(
        x=x, dt=dt, A=A, B=B, C=C, D=D, dt_bias=dt_bias, initial_state=initial_state
    )
    operands |= dict(cu_seqlens=cu_seqlens, dt_softplus=dt_softplus, return_state=return_state)
    with own_errors():
        if env.typecheck():
            _BOUNDARY.check(operands)
        heads, groups = x.shape[2], B.shape[2]
        if heads % groups if groups else heads:
            raise invalid("B", f"groups that divide the {heads} heads of x", B)

    arrays = (a for a in operands.values() if hasattr(a, "dtype"))
    wide = jnp.float64 if any(a.dtype == np.float64 for a in arrays) else jnp.float32
    step, rate, x_wide = (jnp.asarray(a).astype(wide) for a in (dt, A, x))
    if dt_bias is not None:
        step = step + jnp.asarray(dt_bias).astype(wide)[None, None]
    if dt_softplus:
        step = jax.nn.softplus(step)
    out = recurrent_attention(
        *(jnp.repeat(jnp.asarray(a).astype(x.dtype), heads // max(groups, 1), 2) for a in (C, B)),
        (x_wide * step[..., None]).astype(x.dtype),
        step * rate[None, None],
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        softmax_scale=1.0,
        return_state=return_state,
        platform=platform,
        cfg=cfg,
    )
    if D is None:
        return out
    y, state = out if isinstance(out, tuple) else (out, None)
    y = (y.astype(wide) + _skip(x_wide, jnp.asarray(D).astype(wide), cu_seqlens)).astype(x.dtype)
    return y if state is None else (y, state)


def _skip(x: jax.Array, D: jax.Array, cu_seqlens: Any) -> jax.Array:
    """Returns ``D * x``, 0 in rows past the last sequence."""
    skipped = (D if D.ndim == 2 else D[:, None])[None, None] * x
    if cu_seqlens is None:
        return skipped
    is_valid = jnp.arange(x.shape[1]) < jnp.asarray(cu_seqlens)[-1:]
    return jnp.where(is_valid[None, :, None, None], skipped, 0)

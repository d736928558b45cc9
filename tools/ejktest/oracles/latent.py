"""Latent attention in float64 numpy: expand, attend, and the chain rule back to the latent."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ejktest.oracles.attention import Case, Result, attention, gradients


class Latent(NamedTuple):
    """``query [b, q, h, dq]``, ``latent [b, k, r]``, ``w_kc [r, hk, dn]``, ``w_vc [r, hk, dv]``,
    ``b_q [b, q, dr]`` or None, ``b_k [b, k, dr]`` or None."""

    query: Any
    latent: Any
    w_kc: Any
    w_vc: Any
    b_q: Any = None
    b_k: Any = None


def _wide(x: Any) -> Any:
    return None if x is None else np.asarray(x, np.float64)


def expand(x: Latent, **options: Any) -> Case:
    """The dense case: rotary parts appended to every head."""
    q, c, w_kc, w_vc, b_q, b_k = map(_wide, x)
    k, v = np.einsum("bkr,rhn->bkhn", c, w_kc), np.einsum("bkr,rhn->bkhn", c, w_vc)
    if b_k is not None:
        k = np.concatenate([k, np.repeat(b_k[:, :, None], k.shape[2], 2)], -1)
    if b_q is not None:
        q = np.concatenate([q, np.repeat(b_q[:, :, None], q.shape[2], 2)], -1)
    return Case(q, k, v, **options)


def latent_attention(x: Latent, **options: Any) -> Result:
    return attention(expand(x, **options))


def latent_gradients(x: Latent, do: Any, **options: Any) -> Latent:
    """Gradients of sum(do * o) for every array that is given."""
    g = gradients(expand(x, **options), do)
    dn, dq = np.shape(x.w_kc)[2], np.shape(x.query)[3]
    c, dk = _wide(x.latent), g.dk[..., :dn]
    dc = np.einsum("bkhn,rhn->bkr", dk, _wide(x.w_kc))
    dc += np.einsum("bkhn,rhn->bkr", g.dv, _wide(x.w_vc))
    return Latent(
        g.dq[..., :dq],
        dc,
        np.einsum("bkr,bkhn->rhn", c, dk),
        np.einsum("bkr,bkhn->rhn", c, g.dv),
        None if x.b_q is None else g.dq[..., dq:].sum(2),
        None if x.b_k is None else g.dk[..., dn:].sum(2),
    )

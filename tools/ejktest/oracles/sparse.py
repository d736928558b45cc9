"""Native sparse attention from its definition, token by token, in float64.

Differentiable by JAX; call it under ``jax.enable_x64(True)``. One packed or plain row at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def _softmax(x, seen):
    """Probabilities ``[h, t]`` over the seen keys; a row that sees nothing is 0."""
    if not np.asarray(seen).any():
        return jnp.zeros(x.shape)
    return jax.nn.softmax(jnp.where(jnp.asarray(seen), x, -jnp.inf), axis=-1)


def chosen_blocks(p_cmp, t, size, complete, count):
    """Block numbers of one key head: the own block, then by probability, ties to the lower."""
    own = t // size
    rest = sorted((c for c in range(complete) if c != own), key=lambda c: (-float(p_cmp[c]), c))
    return [own, *rest][:count]


def sequence(q, k, v, gates, *, size, count, scale, length, indices=None, window=None):
    """One sequence of ``length`` tokens, padded: q ``[s, h, d]``, k/v ``[s, hk, .]``.

    gates ``(g_cmp, g_slc, g_swa)`` each ``[s, h]`` or None; indices: lists per (t, kv head).
    count: callable (t, kv head) -> number of blocks.
    """
    h, hk = q.shape[1], k.shape[1]
    group = h // hk
    s = length
    blocks = s // size
    kk, vv = jnp.repeat(k, group, 1), jnp.repeat(v, group, 1)
    room = q.shape[0] // size
    mean_k = kk[: room * size].reshape(room, size, h, -1).mean(1)
    mean_v = vv[: room * size].reshape(room, size, h, -1).mean(1)
    g_cmp, g_slc, g_swa = gates
    j = np.arange(q.shape[0])
    rows = []
    for t in range(s):
        complete = min((t + 1) // size, blocks)
        p_cmp = _softmax(scale * jnp.einsum("hd,chd->hc", q[t], mean_k), np.arange(room) < complete)
        out = jnp.zeros((h, v.shape[2]))
        if g_cmp is not None:
            out = out + g_cmp[t][:, None] * jnp.einsum("hc,chd->hd", p_cmp, mean_v)
        seen = np.zeros((h, q.shape[0]), bool)
        summed = np.asarray(jax.lax.stop_gradient(p_cmp)).reshape(hk, group, -1).sum(1)
        for m in range(hk):
            n = count(t, m)
            if indices is None:
                picked = chosen_blocks(summed[m], t, size, complete, n)
            else:
                picked = {c for c in indices[t][m][:n] if 0 <= c <= t // size}
            for c in picked:
                span = (j >= c * size) & (j < (c + 1) * size) & (j <= t)
                seen[m * group : (m + 1) * group] |= span
        x = scale * jnp.einsum("hd,jhd->hj", q[t], kk)
        o_slc = jnp.einsum("hj,jhd->hd", _softmax(x, seen), vv)
        out = out + (o_slc if g_slc is None else g_slc[t][:, None] * o_slc)
        if window is not None:
            near = (j <= t) & (j >= t - window)
            o_swa = jnp.einsum("hj,jhd->hd", _softmax(x, np.broadcast_to(near, x.shape)), vv)
            out = out + (o_swa if g_swa is None else g_swa[t][:, None] * o_swa)
        rows.append(out)
    padding = [jnp.zeros((h, v.shape[2]))] * (q.shape[0] - s)
    return jnp.stack(rows + padding)

"""Native sparse attention from its definition, token by token, in float64.

Differentiable by JAX; call it under ``jax.enable_x64(True)``. One packed or plain row at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


@jax.jit  # one program for all tokens
def _attend(q, k, v, scale, seen):
    """Probabilities ``[h, t]`` over the seen keys ``[h, t]`` and the output ``[h, dv]``."""
    x = scale * jnp.einsum("hd,thd->ht", q, k)
    sees = seen.any(axis=-1, keepdims=True)  # heads of another key head may see nothing
    p = jax.nn.softmax(jnp.where(seen, x, jnp.where(sees, -jnp.inf, 0.0)), axis=-1)
    p = jnp.where(sees, p, 0.0)
    return p, jnp.einsum("ht,thd->hd", p, v)


def attend(q, k, v, scale, seen):
    """Attends as ``_attend``; a row of tokens that sees nothing is 0."""
    h, t = k.shape[1], k.shape[0]
    if not np.asarray(seen).any():
        return jnp.zeros((h, t)), jnp.zeros((h, v.shape[2]))
    return _attend(q, k, v, scale, np.broadcast_to(seen, (h, t)))


def chosen_blocks(p_cmp, t, size, complete, count):
    """Returns block indices of one key head: t's block, then by probability, ties to the lower."""
    first = t // size
    others = sorted((c for c in range(complete) if c != first), key=lambda c: (-float(p_cmp[c]), c))
    return [first, *others][:count]


def scores(q, means, size, scale):
    """Returns the score of every block ``[s, hk, n]``: what the compressed branch gives it, summed
    over a group's heads; -1 where it is not complete, 1e3 for the own block.

    q ``[s, h, d]``, means ``[n, hk, d]``.
    """
    q, means = (np.asarray(x, np.float64) for x in (q, means))
    (s, _, d), (n, hk, _) = q.shape, means.shape
    x = scale * np.einsum("smgd,nmd->smgn", q.reshape(s, hk, -1, d), means)
    t = np.arange(s)
    seen = ((t[:, None] + 1) // size > np.arange(n))[:, None, None]
    p = np.exp(np.where(seen, x - x.max(-1, keepdims=True, where=seen, initial=-1e300), -np.inf))
    score = (p / np.maximum(p.sum(-1, keepdims=True), 1e-300)).sum(2)
    score = np.where(seen[:, :, 0], score, -1.0)
    score[t, :, t // size] = 1e3
    return score


def row(x, t):
    """``x[t]``; its gradient is one program for all ``t``."""
    return jax.lax.dynamic_index_in_dim(x, t, keepdims=False)


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
        p_cmp, o_cmp = attend(row(q, t), mean_k, mean_v, scale, np.arange(room) < complete)
        out = jnp.zeros((h, v.shape[2]))
        if g_cmp is not None:
            out = out + row(g_cmp, t)[:, None] * o_cmp
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
        _, o_slc = attend(row(q, t), kk, vv, scale, seen)
        out = out + (o_slc if g_slc is None else row(g_slc, t)[:, None] * o_slc)
        if window is not None:
            near = (j <= t) & (j >= t - window)
            _, o_swa = attend(row(q, t), kk, vv, scale, near)
            out = out + (o_swa if g_swa is None else row(g_swa, t)[:, None] * o_swa)
        rows.append(out)
    padding = [jnp.zeros((h, v.shape[2]))] * (q.shape[0] - s)
    return jnp.stack(rows + padding)


def over_lists(q, k, v, chosen, size, scale, do):
    """(o, dq, dk, dv) of attention over listed blocks, in float64 numpy, from the formulas.

    q ``[s, h, d]``, k/v ``[s, hk, .]``, do ``[s, h, dv]``; chosen ``[s, hk, slots]``, -1 = none.
    """
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    s, hk, group = q.shape[0], k.shape[1], q.shape[1] // k.shape[1]
    blocks = np.arange(-(-s // size))
    o, dq, dk, dv = np.zeros_like(do), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for m in range(hk):
        listed = (np.asarray(chosen)[:, m, :, None] == blocks).any(1)
        seen = np.repeat(listed, size, axis=1)[:, :s] & np.tri(s, dtype=bool)
        for h in range(m * group, (m + 1) * group):
            x = np.where(seen, scale * q[:, h] @ k[:, m].T, -np.inf)
            p = np.exp(x - x.max(1, keepdims=True, initial=-1e300))
            p /= np.maximum(p.sum(1, keepdims=True), 1e-300)
            o[:, h] = p @ v[:, m]
            dp = do[:, h] @ v[:, m].T
            ds = scale * p * (dp - (do[:, h] * o[:, h]).sum(1, keepdims=True))
            dq[:, h] = ds @ k[:, m]
            dk[:, m] += ds.T @ q[:, h]
            dv[:, m] += p.T @ do[:, h]
    return o, dq, dk, dv

"""Native sparse attention from its definition, in float64.

Differentiable by JAX; call it under ``jax.enable_x64(True)``. One packed or plain row at a time.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np


def attend(q, k, v, scale, seen):
    """Output ``[s, h, dv]`` of queries over the keys they see; a row that sees none is 0.

    q ``[s, h, d]``, k/v ``[t, hk, .]``, seen ``[s, hk, t]``; hk may be 1 there.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, 1) for x in (k, v))
    seen = jnp.repeat(jnp.broadcast_to(seen, (len(q), k.shape[1] // group, len(k))), group, 1)
    x = scale * jnp.einsum("shd,thd->sht", q, k)
    sees = seen.any(axis=-1, keepdims=True)
    p = jax.nn.softmax(jnp.where(seen, x, jnp.where(sees, -jnp.inf, 0.0)), axis=-1)
    return jnp.einsum("sht,thd->shd", jnp.where(sees, p, 0.0), v)


@partial(jax.jit, static_argnames="size")
def _gated_branches(q, k, v, gates, seen, scale, size):
    """Sum of the branches; ``seen`` are the means, keys and near keys of tokens, or None."""
    length, padding = len(seen[1]), len(q) - len(seen[1])
    q, gates = q[:length], [None if g is None else g[:length] for g in gates]
    complete = len(k) // size
    means = [x[: complete * size].reshape(complete, size, *x.shape[1:]).mean(1) for x in (k, v)]
    operands = (means, (k, v), (k, v))
    out = 0.0
    for of_keys, gate, visible in zip(operands, gates, seen, strict=True):
        if visible is not None:
            o = attend(q, *of_keys, scale, visible)
            out += o if gate is None else gate[..., None] * o
    return jnp.pad(out, ((0, padding), (0, 0), (0, 0)))


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


def best_blocks(q, k, size, scale):
    """Returns all blocks of every token, the best first ``[s, hk, n]``, -1 after what it sees.

    The own block comes first, then complete ones by score, ties to the lower.
    """
    q, k = (np.asarray(jax.lax.stop_gradient(x)) for x in (q, k))
    blocks = -(-len(k) // size)
    k = np.pad(k, ((0, blocks * size - len(k)), (0, 0), (0, 0)))
    score = scores(q, k.reshape(blocks, size, *k.shape[1:]).mean(1), size, scale)
    order = np.argsort(-score, axis=-1, kind="stable")
    return np.where(np.take_along_axis(score, order, -1) < 0, -1, order)


def sequence(q, k, v, gates, *, size, count, scale, length, indices=None, window=None):
    """One sequence of ``length`` tokens, padded: q ``[s, h, d]``, k/v ``[s, hk, .]``.

    gates ``(g_cmp, g_slc, g_swa)`` each ``[s, h]`` or None; indices: lists per (t, kv head).
    count: callable (t, kv head) -> number of blocks.
    """
    padded, hk = k.shape[:2]
    lists = best_blocks(q, k, size, scale) if indices is None else indices
    listed = np.zeros((length, hk, -(-padded // size)), bool)
    for t, m in np.ndindex(length, hk):
        listed[t, m, [c for c in lists[t][m][: count(t, m)] if 0 <= c <= t // size]] = True
    t, j = np.arange(length)[:, None, None], np.arange(padded)
    seen = (
        None if gates[0] is None else (t + 1) // size > np.arange(padded // size),
        np.repeat(listed, size, axis=-1)[..., :padded] & (j <= t),
        None if window is None else (j <= t) & (j >= t - window),
    )
    return _gated_branches(q, k, v, gates, seen, scale, size)


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

"""Gated linear attention in float64, one token after the other, with its gradient by hand.

H_t = D_t * H_{t-1} + k_t v_t^T        o_t = scale * q_t H_t
D_t[i, j] = exp(g_t[i] + gk_t[i] + gv_t[j] + g_gamma)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Result(NamedTuple):
    """Output ``[b, s, h, dv]``, final states ``[b or n, h, dk, dv]`` and the gradients by name."""

    o: np.ndarray
    state: np.ndarray
    grads: dict[str, np.ndarray]


def tokens_in_time(b, s, cu_seqlens, reverse):
    """Returns (batch row, state row, token indices in the order of time) of every sequence."""
    if cu_seqlens is None:
        sequences = [(i, i, np.arange(s)) for i in range(b)]
    else:
        cu = np.asarray(cu_seqlens)
        sequences = [(0, m, np.arange(cu[m], cu[m + 1])) for m in range(len(cu) - 1)]
    return [(i, m, t[::-1] if reverse else t) for i, m, t in sequences]


def outer(x, y):
    """``x y^T`` per head."""
    return x[:, :, None] * y[:, None, :]


def left_product(x, matrix):
    """``x^T matrix`` per head."""
    return (x[:, None, :] @ matrix)[:, 0]


def right_product(matrix, x):
    """``matrix x`` per head."""
    return (matrix @ x[:, :, None])[:, :, 0]


def linear_attention(
    query,
    key,
    value,
    g=None,
    g_gamma=None,
    gk=None,
    gv=None,
    initial_state=None,
    cu_seqlens=None,
    *,
    softmax_scale=None,
    reverse=False,
    do=None,
    dstate=None,
) -> Result:
    """``do`` and ``dstate`` are the gradients of the output and of the final states (default 0)."""
    arrays = dict(query=query, key=key, value=value, g=g, g_gamma=g_gamma, gk=gk, gv=gv)
    arrays = {n: np.asarray(x).astype(np.float64) for n, x in arrays.items() if x is not None}
    q, k, v = arrays["query"], arrays["key"], arrays["value"]
    b, s, h, dk = q.shape
    dv, groups = v.shape[-1], h // k.shape[2]
    scale = dk**-0.5 if softmax_scale is None else softmax_scale
    n = b if cu_seqlens is None else len(cu_seqlens) - 1
    zeros = np.zeros((n, h, dk, dv))
    table = zeros if initial_state is None else np.asarray(initial_state).astype(np.float64)
    do = np.zeros((b, s, h, dv)) if do is None else np.asarray(do).astype(np.float64)
    dstate = zeros if dstate is None else np.asarray(dstate).astype(np.float64)

    o, state = np.zeros((b, s, h, dv)), table.copy()
    grads = {name: np.zeros_like(x) for name, x in arrays.items()}
    grads["initial_state"] = np.zeros_like(table)

    def log_decay(i, t):
        total = np.zeros((h, dk, dv))
        if "g" in arrays:
            gate = arrays["g"][i, t]
            total += gate[:, :, None] if gate.ndim == 2 else gate[:, None, None]
        if "g_gamma" in arrays:
            total += arrays["g_gamma"][:, None, None]
        if "gk" in arrays:
            total += arrays["gk"][i, t][:, :, None]
        if "gv" in arrays:
            total += arrays["gv"][i, t][:, None, :]
        return total

    def per_kv_head(x):
        return x.reshape(h // groups, groups, -1).sum(1)

    keys, values = (np.repeat(x, groups, 2) for x in (k, v))
    for i, m, tokens in tokens_in_time(b, s, cu_seqlens, reverse):  # all heads at once: [h, dk, dv]
        states, decays = [table[m]], []
        for t in tokens:
            decays.append(np.exp(log_decay(i, t)))
            states.append(decays[-1] * states[-1] + outer(keys[i, t], values[i, t]))
            o[i, t] = scale * left_product(q[i, t], states[-1])
        state[m] = states[-1]

        later = dstate[m].copy()
        for step in range(len(tokens) - 1, -1, -1):
            t = tokens[step]
            later += scale * outer(q[i, t], do[i, t])
            grads["query"][i, t] = scale * right_product(states[step + 1], do[i, t])
            grads["key"][i, t] = per_kv_head(right_product(later, values[i, t]))
            grads["value"][i, t] = per_kv_head(left_product(keys[i, t], later))
            later = later * decays[step]
            through = later * states[step]
            if "g" in arrays:
                rank = arrays["g"].ndim
                grads["g"][i, t] = through.sum(2) if rank == 4 else through.sum((1, 2))
            if "g_gamma" in arrays:
                grads["g_gamma"] += through.sum((1, 2))
            if "gk" in arrays:
                grads["gk"][i, t] = through.sum(2)
            if "gv" in arrays:
                grads["gv"][i, t] = through.sum(1)
        grads["initial_state"][m] = later
    return Result(o, state, grads)


def slopes(heads: int, layer_idx: int, num_layers: int) -> np.ndarray:
    """Log decay of every head of lightning attention."""
    return np.array([-(8 / heads) * (1 - layer_idx / num_layers) * m for m in range(heads)])

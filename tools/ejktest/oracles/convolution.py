"""The short causal convolution in float64, one token after the other, with its gradient by hand.

z_t[c] = bias[c] + sum_i weight[c, i] x_{t-w+1+i}[c]        y_t = z_t or z_t sigmoid(z_t)
"""

from __future__ import annotations

import numpy as np

from ejktest.oracles.linear import Result, tokens_in_time


def causal_conv1d(
    x,
    weight,
    bias=None,
    initial_state=None,
    cu_seqlens=None,
    *,
    activation=None,
    do=None,
    dstate=None,
) -> Result:
    """``do`` and ``dstate`` are the gradients of the output and of the final states (default 0)."""
    x, weight = (np.asarray(a).astype(np.float64) for a in (x, weight))
    (b, s, c), w = x.shape, weight.shape[1]
    n = b if cu_seqlens is None else len(cu_seqlens) - 1
    shift = np.zeros(c) if bias is None else np.asarray(bias).astype(np.float64)
    zeros = np.zeros((n, c, w - 1))
    table = zeros if initial_state is None else np.asarray(initial_state).astype(np.float64)
    do = np.zeros((b, s, c)) if do is None else np.asarray(do).astype(np.float64)
    dstate = zeros if dstate is None else np.asarray(dstate).astype(np.float64)

    o, state = np.zeros((b, s, c)), table.copy()
    dx, dweight, dbias, dtable = (np.zeros_like(a) for a in (x, weight, shift, table))
    for i, m, tokens in tokens_in_time(b, s, cu_seqlens, False):
        history = np.concatenate([table[m].T, x[i, tokens]])  # [w - 1 + tokens, c]
        dhistory = np.zeros_like(history)
        for j, t in enumerate(tokens):
            window = history[j : j + w]
            z = shift + (weight.T * window).sum(0)
            gate = 1 / (1 + np.exp(-z)) if activation == "silu" else np.ones_like(z)
            o[i, t] = z * gate
            slope = gate + z * gate * (1 - gate) if activation == "silu" else gate
            dz = do[i, t] * slope
            dbias += dz
            dweight += (dz * window).T
            dhistory[j : j + w] += weight.T * dz
        last = len(tokens)
        state[m] = history[last:].T
        dhistory[last:] += dstate[m].T
        dtable[m] = dhistory[: w - 1].T
        dx[i, tokens] = dhistory[w - 1 :]
    grads = dict(x=dx, weight=dweight, bias=dbias, initial_state=dtable)
    return Result(o, state, grads)

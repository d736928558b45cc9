"""The gated delta rule in float64, one token after the other, with its gradient by hand.

S = D_t * S_{t-1}        S_t = S + beta_t k_t (v_t - S^T k_t)^T        o_t = scale * q_t S_t
D_t[i, j] = exp(g_t) or exp(g_t[i])

From the formulas of Yang et al. 2024 (arXiv 2412.06464) and Kimi Linear (arXiv 2510.26692).
"""

from __future__ import annotations

import numpy as np

from ejktest.oracles.linear import Result, left_product, outer, right_product, tokens_in_time

NORM_EPSILON = 1e-6


def _normalized(x):
    """Vectors of unit length, and the lengths they had."""
    length = np.sqrt((x**2).sum(-1, keepdims=True) + NORM_EPSILON)
    return x / length, length


def _normalization_gradient(dy, y, length):
    """Gradient of ``x`` in ``y, length = _normalized(x)``."""
    return (dy - y * (y * dy).sum(-1, keepdims=True)) / length


def gated_delta_rule(
    query,
    key,
    value,
    g=None,
    beta=None,
    initial_state=None,
    cu_seqlens=None,
    *,
    softmax_scale=None,
    normalize_qk=False,
    reverse=False,
    do=None,
    dstate=None,
) -> Result:
    """``do`` and ``dstate`` are the gradients of the output and of the final states (default 0)."""
    operands = dict(query=query, key=key, value=value, g=g, beta=beta)
    operands = {n: np.asarray(x).astype(np.float64) for n, x in operands.items() if x is not None}
    v = operands["value"]
    (b, s, h, dv), (hk, dk) = v.shape, operands["key"].shape[2:]
    groups = h // hk
    scale = dk**-0.5 if softmax_scale is None else softmax_scale
    n = b if cu_seqlens is None else len(cu_seqlens) - 1
    zeros = np.zeros((n, h, dk, dv))
    table = zeros if initial_state is None else np.asarray(initial_state).astype(np.float64)
    do = np.zeros((b, s, h, dv)) if do is None else np.asarray(do).astype(np.float64)
    dstate = zeros if dstate is None else np.asarray(dstate).astype(np.float64)

    unit = {name: (operands[name], 1.0) for name in ("query", "key")}
    if normalize_qk:
        unit = {name: _normalized(x) for name, (x, _) in unit.items()}
    q, k = (np.repeat(unit[name][0], groups, 2) for name in ("query", "key"))
    strength = operands.get("beta", np.ones((b, s, h)))
    gate = operands.get("g", np.zeros((b, s, h)))
    decay = np.exp(gate if gate.ndim == 4 else gate[..., None])[..., None]  # [b, s, h, 1 | dk, 1]

    o, state = np.zeros((b, s, h, dv)), table.copy()
    arrays = (q, k, v, strength, gate, table)
    dq, dk_heads, dv_, dbeta, dgate, dtable = (np.zeros_like(x) for x in arrays)
    for i, m, tokens in tokens_in_time(b, s, cu_seqlens, reverse):  # all heads at once
        states, before, errors = [table[m]], [], []
        for t in tokens:
            before.append(decay[i, t] * states[-1])
            errors.append(v[i, t] - left_product(k[i, t], before[-1]))
            update = strength[i, t][:, None] * errors[-1]
            states.append(before[-1] + outer(k[i, t], update))
            o[i, t] = scale * left_product(q[i, t], states[-1])
        state[m] = states[-1]

        later = dstate[m].copy()
        for step in range(len(tokens) - 1, -1, -1):
            t = tokens[step]
            later += scale * outer(q[i, t], do[i, t])
            dq[i, t] = scale * right_product(states[step + 1], do[i, t])
            dupdate = left_product(k[i, t], later)
            derror = strength[i, t][:, None] * dupdate
            update = strength[i, t][:, None] * errors[step]
            dbeta[i, t] = (dupdate * errors[step]).sum(1)
            dv_[i, t] = derror
            dk_heads[i, t] = right_product(later, update) - right_product(before[step], derror)
            later -= outer(k[i, t], derror)
            through = (later * before[step]).sum(2)
            dgate[i, t] = through if gate.ndim == 4 else through.sum(1)
            later = later * decay[i, t]
        dtable[m] = later

    grads = dict(value=dv_, g=dgate, beta=dbeta, initial_state=dtable)
    for name, dx in (("query", dq), ("key", dk_heads)):
        dx = dx.reshape(b, s, hk, groups, dk).sum(3)
        grads[name] = _normalization_gradient(dx, *unit[name]) if normalize_qk else dx
    return Result(o, state, {n: grads[n] for n in (*operands, "initial_state")})

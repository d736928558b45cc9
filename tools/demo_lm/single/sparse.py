"""Native sparse attention: the blocks each token chose."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from demo_lm.single.common import features, report, text
from ejktest.oracles import sparse as oracle

LENGTH, HEADS, KV_HEADS, DIM, SIZE, COUNT, WINDOW = 48, 4, 2, 16, 4, 3, 3


def native_sparse_attention() -> None:
    data = text(LENGTH)
    q = features(data, HEADS, DIM, 0)
    k, v = features(data, KV_HEADS, DIM, 1), features(data, KV_HEADS, DIM, 2)
    g_cmp, g_slc, g_swa = (jax.nn.sigmoid(features(data, HEADS, 1, s)[..., 0]) for s in (3, 4, 5))
    call = {"g_cmp": g_cmp, "g_slc": g_slc, "g_swa": g_swa, "block_counts": COUNT}
    call |= {"block_size": SIZE, "sliding_window": WINDOW}
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x)[0], jnp.float64) for x in (q, k, v, g_cmp, g_slc, g_swa)]
        exact = oracle.sequence(
            *wide[:3], tuple(wide[3:]), size=SIZE, count=lambda t, m: COUNT, scale=DIM**-0.5,
            window=WINDOW, length=LENGTH,
        )[None]  # fmt: skip
        picks = _choices(wide[0], wide[1])
    print("blocks chosen by key head 0 ('#'), window ('-'), all other blocks compressed ('·')")
    for t in range(0, LENGTH, 3):
        line = ""
        for j in range(t + 1):
            line += "#" if j // SIZE in picks[t] else "-" if j >= t - WINDOW else "·"
        print(f"{chr(data[t])!r:>5} {line}")
    report("native_sparse_attention", np.asarray(exact), q, k, v, **call)


def _choices(q, k) -> list[list[int]]:
    group = HEADS // KV_HEADS
    mean = k[:, 0].reshape(-1, SIZE, DIM).mean(1)
    picks = []
    for t in range(LENGTH):
        complete = (t + 1) // SIZE
        x = np.asarray(q[t, :group] @ mean.T) * DIM**-0.5
        p = np.zeros_like(x)
        if complete:
            e = np.exp(x[:, :complete] - x[:, :complete].max())
            p[:, :complete] = e / e.sum(1, keepdims=True)
        picks.append(oracle.chosen_blocks(p.sum(0), t, SIZE, complete, COUNT))
    return picks

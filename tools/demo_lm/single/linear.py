"""Operations with a state: how much of it is left of every byte."""

from __future__ import annotations

import jax
import numpy as np

from demo_lm.single.common import bars, features, report, text
from ejktest.oracles.linear import linear_attention, slopes

LENGTH, HEADS, DIM = 64, 2, 8


def _show(name: str, gates: dict, **options) -> None:
    data = text(LENGTH)
    q, k, v = (features(data, HEADS, DIM, s) for s in range(3))
    known = {"g_gamma": slopes(HEADS, 1, 4)} if name == "lightning_attention" else gates
    exact = linear_attention(q, k, v, **known)
    print("text      " + data.decode().replace("\n", " "))
    for head in range(HEADS):
        norms = [
            np.linalg.norm(linear_attention(
                *(np.asarray(x)[:, : t + 1] for x in (q, k, v)),
                **{n: g if g.ndim == 1 else np.asarray(g)[:, : t + 1] for n, g in known.items()},
            ).state[0, head])
            for t in range(LENGTH)
        ]  # fmt: skip
        print(f"|state| {head} {bars(norms)}")
    report(name, exact.o, q, k, v, **gates, **options)


def gla_attention() -> None:
    g = -jax.nn.softplus(features(text(LENGTH), HEADS, DIM, 7) - 1)
    _show("gla_attention", {"g": g})


def recurrent_attention() -> None:
    g = -jax.nn.softplus(features(text(LENGTH), HEADS, 1, 7)[..., 0])
    _show("recurrent_attention", {"g": g})


def lightning_attention() -> None:
    _show("lightning_attention", {}, layer_idx=1, num_layers=4)

"""Print the error of 8-bit attention against float64.

It is the table of docs/operations/quantize_attention.md.

Usage: python tools/eight_bit_accuracy.py [--platform xla] [--tokens 2048]
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import flash_attention, quantize_attention

HEADS, DIM = 4, 128
OUTLIERS = {3: 20.0, 40: -12.0, 77: 8.0}
"""Means of the channels of keys that all tokens have in common."""

FORMS: dict[str, dict[str, Any]] = {
    "per head": {},
    "per 128 tokens": {"block": 128},
    "per head, smooth": {"smooth": True},
    "per 128 tokens, smooth": {"block": 128, "smooth": True},
}


def inputs(name: str, tokens: int) -> list[np.ndarray]:
    """Draws q, k and v ``[1, tokens, heads, dim]``: normal, some channels of the keys with a mean,
    or tokens of very different size."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, tokens, HEADS, DIM))
    if name == "outlier channels":
        for channel, mean in OUTLIERS.items():
            k[..., channel] += mean
    if name == "growing tokens":
        growth = np.exp2(np.linspace(-3, 2, tokens))[:, None, None]
        q, k = q * growth, k * growth
    return [x.astype(np.float32) for x in (q, k, v)]


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    """Attention in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    o = np.empty(q.shape)
    hidden = np.triu(np.ones((q.shape[1], k.shape[1]), bool), 1) if causal else False
    for head in range(HEADS):
        x = q[0, :, head] @ k[0, :, head].T * DIM**-0.5
        x = np.where(hidden, -np.inf, x)
        p = np.exp(x - x.max(-1, keepdims=True))
        o[0, :, head] = p / p.sum(-1, keepdims=True) @ v[0, :, head]
    return o


def relative_error(o: jax.Array, reference: np.ndarray) -> float:
    """Returns the RMS error over the RMS of the reference."""
    error = np.asarray(o).astype(np.float64) - reference
    return float(np.sqrt(np.mean(error**2) / np.mean(reference**2)))


def table(platform: str, tokens: int) -> list[list[str]]:
    """Returns the rows of the table: inputs, bfloat16, and every form of scales."""
    rows = []
    for name in ("normal", "outlier channels", "growing tokens"):
        q, k, v = inputs(name, tokens)
        for causal in (False, True):
            reference = exact(q, k, v, causal)
            wide = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
            o = flash_attention(*wide, causal=causal, platform=platform)
            errors = [relative_error(o, reference)]
            for form in FORMS.values():
                *arrays, q_scale, k_scale, v_scale = quantize_attention(q, k, v, **form)
                scales: Any = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
                o = flash_attention(*arrays, **scales, causal=causal, platform=platform)
                errors.append(relative_error(o, reference))
            call = f"{name}, {'causal' if causal else 'full'}"
            rows.append([call, *(f"{error:.2%}" for error in errors)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", default="xla")
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    print("|".join(["", " inputs ", " bfloat16 ", *(f" {name} " for name in FORMS), ""]))
    print("|---" * (2 + len(FORMS)) + "|")
    for row in table(options.platform, options.tokens):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()

"""Large finite logits at the sizes a GPU is for: cases, and a float32 reference that runs there.

In every case rounding cannot choose another key: either the products are lost in a bias that keys
share, or one key of a row stands out by far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejktest.attention_at_size import BF, BOUND, UNTUNED, draw, with_gradients
from ejktest.large_logits import MIN

BIASES = (-1e10, -1e12, -2.3e38, MIN)
SINKS = ((1e10, 1e10), (-1e10, 0.5), (1e5, -1e30), (0.1, 1.0))
BIASED = tuple(f"bias d{d}" for d in (16, 64, 96, 128, 256))
PLAIN = tuple(f"{kind} d{d}" for kind in ("inputs", "scale") for d in (64, 128, 256))
PLAIN += ("inputs causal d64", "inputs causal d128", "inputs causal d256", "sinks d128")
NARROW = ("inputs d16", "inputs d96", "sinks d16")  # head dims of the kernels for every GPU


def inputs(name: str) -> tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, Any]]:
    """(differentiable arrays, cotangents, options) of a case."""
    kind, d = name.split()[0], int(name.split()[-1][1:])
    b, n, h = 4, 300, 4
    q, k, v, do = draw(len(name), b, n, n, h, h, d, d, BF)
    options: dict[str, Any] = {"causal": True} if "causal" in name else {}
    if kind in ("inputs", "scale"):
        # keys of one length: each row's own key stands out
        wide = k.astype(jnp.float32)
        k = wide / jnp.linalg.norm(wide, axis=-1, keepdims=True) * d**0.5
        if kind == "inputs":
            k = 1e5 * k
        else:
            options["softmax_scale"] = 1e10
        q = k = k.astype(BF)
    diff = {"q": q, "k": k, "v": v}
    if kind == "bias":
        bias = jnp.zeros((b, 1, n, n))
        for row, value in enumerate(BIASES):
            bias = bias.at[row, :, :, n // 2 :].set(value).at[row, :, 1::2].set(value)
        diff["bias"] = bias
    if kind == "sinks":
        diff["sinks"] = jnp.asarray(SINKS, jnp.float32)
    dlse = jax.random.normal(jax.random.key(9), (b, n, h), jnp.float32)
    return diff, {"do": do, "dlse": dlse}, options


def _reference(x: dict[str, jax.Array], fixed: Any, options: dict[str, Any]):
    """(o, lse) of whole matrices; the maximum is subtracted before differences are scaled."""
    q, k, v = x["q"], x["k"], x["v"]
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest")
    scale = options.get("softmax_scale", q.shape[-1] ** -0.5)
    if "bias" in x or "sinks" in x:  # products are small, and cannot be rounded in two ways
        s, scale = s * scale, 1.0
    if "bias" in x:
        s = s + x["bias"]
    if options.get("causal"):
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    if "sinks" in x:
        more = x["sinks"][None, :, None]
        s = jnp.concatenate([s, jnp.broadcast_to(more, (*s.shape[:3], more.shape[-1]))], -1)
    top = jax.lax.stop_gradient(s.max(-1, keepdims=True))
    e = jnp.exp((s - top) * scale)
    total = e.sum(-1, keepdims=True)
    p = (e / total)[..., : v.shape[1]]
    o = jnp.einsum("bhqk,bkhd->bqhd", p, v, precision="highest")
    return o, (top * scale + jnp.log(total))[..., 0].swapaxes(1, 2)


def _sizes(diff: dict[str, jax.Array], options: dict[str, Any]) -> dict[str, float]:
    """What an entry of a gradient is made of; below that, differences are rounding."""
    d = diff["q"].shape[-1]
    scale = options.get("softmax_scale", d**-0.5)
    k = float(jnp.sqrt(jnp.mean(diff["k"].astype(jnp.float32) ** 2)))
    return {"q": scale * k * d**0.5, "k": scale * k * d**0.5}


def check(name: str, flash_attention: Callable[..., Any]) -> None:
    diff, fixed, options = inputs(name)

    def ours(x, fixed):
        more = {"bias": x["bias"]} if "bias" in x else {}
        more |= {"softmax_aux": x["sinks"]} if "sinks" in x else {}
        return flash_attention(x["q"], x["k"], x["v"], return_lse=True, **more, **options)

    got = with_gradients(ours)(diff, fixed)
    exact = with_gradients(lambda x, fixed: _reference(x, fixed, options), UNTUNED)
    want = exact({n: x.astype(jnp.float32) for n, x in diff.items()}, fixed)
    sizes = _sizes(diff, options)
    wrong = {}
    for n, expected in want.items():
        a, e = got[n].astype(jnp.float32), expected.astype(jnp.float32)
        axes = tuple(range(1, a.ndim)) if n != "sinks" else ()  # one magnitude a batch row
        error = jnp.sqrt(jnp.mean((a - e) ** 2, axes))
        size = jnp.sqrt(jnp.mean(e**2, axes)) + sizes.get(n, 0.0)
        if n == "sinks":  # sums over all rows
            size = size + (a.shape[0] * 300) ** 0.5
        ratio = jnp.where(error == 0.0, 0.0, error / size)
        print(f"{name} {n}: {[f'{float(r):.1e}' for r in ratio.ravel()]}")
        if not bool((ratio <= BOUND["bfloat16"]).all()):
            wrong[n] = [float(r) for r in ratio.ravel()]
    assert wrong == {}

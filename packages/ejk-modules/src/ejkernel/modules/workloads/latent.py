"""Calls of latent attention."""

from __future__ import annotations

import functools
from typing import Any

from ejkernel.modules.workloads.call import WIDTH
from ejkernel.modules.workloads.families import LatentDecodeShape, LatentShape
from ejkernel.modules.workloads.paged import QUANTISED_SCALE, cached, contexts, normals


def _expanded(shape: LatentShape) -> dict[str, Any]:
    b, s, h, r = shape.batch, shape.length, shape.heads, shape.latent
    drawn = normals(
        shape.dtype, query=(b, s, h, shape.nope + shape.rope), key_value=(b, s, r),
        w_kc=(r, h, shape.nope), w_vc=(r, h, shape.v_dim), b_k=(b, s, shape.rope),
    )  # fmt: skip
    return {name: x * r**-0.5 if name in ("w_kc", "w_vc") else x for name, x in drawn.items()}


def prefill(shape: LatentShape, _: str) -> dict[str, Any]:
    """The fields of a Call."""
    b, s, h = shape.batch, shape.length, shape.heads
    pairs = s * (s + 1) / 2 if shape.causal else s * s
    dims = shape.nope + shape.rope + shape.v_dim
    expand = 2.0 * b * s * h * shape.latent * (shape.nope + shape.v_dim)
    weights = shape.latent * h * (shape.nope + shape.v_dim)
    tokens = h * dims + shape.latent + shape.rope
    return {
        "make": functools.partial(_expanded, shape),
        "options": {"causal": shape.causal},
        "flops": 2.0 * b * h * pairs * dims + expand,
        "moved": float(WIDTH[shape.dtype] * (b * s * tokens + weights)),
        "dtype": shape.dtype,
        "gradients": ("query", "key_value", "w_kc", "w_vc", "b_k"),
    }


def decode(shape: LatentDecodeShape, _: str) -> dict[str, Any]:
    """The fields of a Call."""
    tokens = int(contexts(shape).sum())
    width = shape.latent + shape.rope
    options: dict[str, Any] = {"latent_dim": shape.latent}
    if WIDTH[shape.cache_dtype] == 1:
        options["k_scale"] = QUANTISED_SCALE
    return {
        "make": functools.partial(cached, shape, (shape.heads, width), latent_cache=(width,)),
        "options": options,
        "flops": 2.0 * tokens * shape.heads * (width + shape.latent),
        "moved": float(tokens * width * WIDTH[shape.cache_dtype]),
        "dtype": shape.dtype,
    }

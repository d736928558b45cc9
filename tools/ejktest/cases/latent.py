"""Calls of latent decoding and latent attention, with a float32 reference for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejktest import at_size
from ejktest.abstract import BF16, AbstractCall, abstract_call
from ejktest.at_size import reference_rows, relative
from ejktest.cases.paged import (
    BF,
    E4,
    E5,
    F32,
    HALF,
    I8,
    UNEVEN,
    draw_caches,
    jitted,
    reference_options,
    run_thrice,
)  # fmt: skip
from ejktest.oracles.paged import gather


@dataclass(frozen=True)
class Shape:
    """One call: contexts, query rows of a sequence (None: rank 3), heads, sizes, dtypes."""

    lens: tuple[int, ...] = UNEVEN
    h: int = 128
    rows: int | None = None
    latent: int = 512
    rope: int = 64
    ps: int = 64
    q: Any = BF
    kv: Any = BF


# name: shape, options of the operation; ``sinks`` is their number
CASES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "128 heads": (Shape(), {}),
    "16 heads": (Shape(h=16), {}),
    "page 16, rows": (Shape(ps=16, rows=2, h=64), dict(sliding_window=1000, logits_soft_cap=20.0)),
    "page 3, 40 heads": (Shape(UNEVEN[4:], ps=3, h=40), dict(softmax_scale=-0.05)),
    "float16, rows": (Shape(ps=16, rows=3, q=HALF, kv=HALF), dict(softmax_scale=-0.05)),
    "long single": (Shape((100001,)), {}),
    "short single": (Shape((1001,)), {}),
    "no context": (Shape((0, 0, 0), h=16), {}),
    "many": (Shape(tuple(i % 97 for i in range(1500)), h=8, latent=64, rope=16, ps=16), {}),
    "one split, sinks": (Shape(h=16, ps=16), dict(num_splits=1, sinks=2)),
    "256 and 32, splits": (Shape(latent=256, rope=32, h=40), dict(num_splits=5)),
    "float16, no rotary part": (Shape(q=HALF, kv=HALF, rope=0), {}),
    "float32": (Shape(UNEVEN[4:], q=F32, kv=F32, h=16), {}),
    "int8, 16 heads": (Shape(kv=I8, h=16), dict(k_scale=0.025)),
    "int8, many": (Shape(tuple(i % 97 for i in range(1500)), kv=I8, h=16), dict(k_scale=0.025)),
    "e4m3": (Shape(kv=E4), dict(k_scale=0.5)),
    "e4m3, 16 heads": (Shape(kv=E4, h=16), dict(k_scale=-0.5)),
    "e4m3, 16 heads, splits": (Shape(kv=E4, h=16), dict(k_scale=-0.5, num_splits=5, sinks=2)),
    "int8, float16, cap": (Shape(kv=I8, q=HALF, h=9), dict(k_scale=-0.025, logits_soft_cap=20.0)),
    "int8, page 16, rows": (Shape(kv=I8, ps=16, h=8, rows=2), dict(k_scale=0.025)),
    "int8, 20 heads": (Shape(UNEVEN[4:], kv=I8, h=20), dict(k_scale=0.025, num_splits=3)),
    "float16 and e5m2, page 16": (
        Shape(UNEVEN[4:], q=HALF, kv=E5, ps=16, h=40),
        dict(sliding_window=300),
    ),
    "int8, float16, 128 heads": (Shape(kv=I8, q=HALF), dict(k_scale=0.025)),
    "e4m3, float16, rows": (Shape(kv=E4, q=HALF, h=64, rows=2, ps=16), dict(k_scale=-0.5)),
    "e5m2, page 8": (Shape(UNEVEN[4:], kv=E5, ps=8), {}),
    "scaled, 64 heads": (Shape(UNEVEN[4:], h=64), dict(k_scale=-0.5)),
    "int8, 128 heads": (Shape(kv=I8), dict(k_scale=-0.025, logits_soft_cap=20.0)),
}
# output rounding is 2e-3 in bfloat16; probabilities rounded to it add as much. One TF32 matmul
BOUND = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 2e-3}


def bound(name: str) -> float:
    """Returns the largest relative error that is accepted."""
    return BOUND[jnp.dtype(CASES[name][0].q).name]


def draw(name: str) -> tuple[jax.Array, ...]:
    """Returns the arrays of a case."""
    s = CASES[name][0]
    width, rows = s.latent + s.rope, () if s.rows is None else (s.rows,)
    return draw_caches(name, s, (*rows, s.h, width), (width,))


def runner(name: str, mla_decode: Callable[..., Any]):
    """Returns a case of an implementation, as a jitted function of ``draw(name)``."""
    s, options = CASES[name]
    return jitted(mla_decode, s, options, latent_dim=s.latent, return_lse=True)


def reference(name: str):
    """Returns a case in float32, row by row, as a jitted function of ``draw(name)``."""
    s, o = CASES[name]
    scale = o.get("softmax_scale", (s.latent + s.rope) ** -0.5)
    options = reference_options(s, o) | {"scale": scale}
    rows = s.rows or 1

    def row(c, q, n, table):
        k = gather(c, table)[:, None].astype(F32) * o.get("k_scale", 1.0)
        at = n - rows + jnp.arange(rows)
        return reference_rows(q.reshape(rows, s.h, -1), k, k[..., : s.latent], at, **options)

    def every(q, c, n, t):
        out, lse = jax.lax.map(lambda x: row(c, *x), (q, n, t))
        return out.reshape(*q.shape[:-1], s.latent), lse.reshape(q.shape[:-1])

    return jax.jit(every)


def check(name: str, mla_decode: Callable[..., Any]) -> None:
    """Asserts that a case is within the bound, and ``run_thrice``."""
    q, c, lens, tables = draw(name)
    run = runner(name, mla_decode)
    o, lse = run_thrice(run, CASES[name][0].lens, q, c, n=lens, tables=tables)
    want, want_lse = reference(name)(q, c, lens, tables)
    assert jnp.array_equal(lse == -jnp.inf, want_lse == -jnp.inf)
    finite = want_lse > -jnp.inf
    off = float(jnp.max(jnp.where(finite, jnp.abs(lse - want_lse), 0.0)))
    error = relative(o, want)
    print(f"{name}: {error:.1e}, lse {off:.1e}")
    assert error <= bound(name)
    assert off <= 5e-3


# ---- latent attention, which expands -----------------------------------------------------------

EXPANDED = ("key", "both", "window")


def draw_expanded(form: str) -> dict[str, jax.Array]:
    """Returns arguments of ``mla_attention`` with 8 heads of DeepSeek V3."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return (jax.random.normal(next(keys), shape, F32) * scale).astype(BF)

    q_dim = 128 if form == "both" else 192
    arguments = {
        "query": normal(2, 1037, 8, q_dim),
        "key_value": normal(2, 1037, 512),
        "w_kc": normal(512, 8, 128, scale=512**-0.5),
        "w_vc": normal(512, 8, 128, scale=512**-0.5),
        "b_k": normal(2, 1037, 64),
    }
    return arguments | ({"b_q": normal(2, 1037, 64)} if form == "both" else {})


def _plain(x: dict[str, jax.Array], left: int | None) -> jax.Array:
    from ejkernel.types.attention.latent import expand_rows

    wide = {name: a.astype(F32) for name, a in x.items()}
    q, k, v = expand_rows(wide, "highest")
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
    seen = j <= i if left is None else (j <= i) & (j >= i - left)
    return at_size.reference(q, k, v, mask=seen)[0]


def check_expanded(form: str, mla_attention: Callable[..., Any]) -> None:
    """Asserts that o and all gradients are within the bound; two runs have the same bits."""
    x = draw_expanded(form)
    left = 100 if form == "window" else None
    window = None if left is None else (left, 0)
    do = jax.random.normal(jax.random.key(9), (2, 1037, 8, 128), F32).astype(BF)

    def both(function):
        @jax.jit
        def run(x):
            o, pull = jax.vjp(function, x)
            return o, pull(do.astype(o.dtype))[0]

        return run

    run = both(lambda x: mla_attention(**x, causal=True, sliding_window=window))
    o, grads = run(x)
    for a, b in zip(jax.tree.leaves((o, grads)), jax.tree.leaves(run(x)), strict=True):
        assert jnp.array_equal(a, b)
    want, exact = both(lambda x: _plain(x, left))(x)
    errors = {"o": relative(o, want)} | {n: relative(grads[n], exact[n]) for n in x}
    print(form, {n: f"{e:.1e}" for n, e in errors.items()})
    assert {n: e for n, e in errors.items() if not e <= 1e-2} == {}


# ---- ahead of time -------------------------------------------------------------------------------


def _latent(
    heads: int,
    cache: str = BF16,
    page: int = 64,
    width: int = 576,
    *optional: str,
    q_len: int | None = None,
    **options: Any,
) -> AbstractCall:
    sizes = {"batch": 64, "heads": heads, "cache_dim": width, "pages": 8192, "page_size": page}
    sizes["max_blocks"] = 8192 // page
    form = 0
    if q_len is not None:
        sizes["q_len"], form = q_len, 1
    return abstract_call(
        "mla_decode",
        sizes,
        *optional,
        dtypes={"latent_cache": cache},
        forms={"query": form},
        options=options,
    )


COMPILED = {
    "latent 128 heads": _latent(128),
    "latent 16 heads": _latent(16),
    "latent page 16": _latent(128, page=16, sliding_window=1000, logits_soft_cap=30.0),
    "latent int8": _latent(128, "int8", k_scale=0.05),
    "latent int8 16 heads": _latent(16, "int8", k_scale=0.05),
    "latent e4m3": _latent(128, "float8_e4m3fn", k_scale=0.05),
    "latent e4m3 page 16": _latent(16, "float8_e4m3fn", 16, k_scale=0.05),
}
COMPILED_TPU = {
    "latent 128 heads": _latent(128, width=640),
    "latent 16 heads": _latent(16, width=640, return_lse=True),
    "latent int8": _latent(128, "int8", width=640, k_scale=0.05),
    "latent tree": _latent(16, BF16, 64, 640, "tree_mask", q_len=40),
    "latent tree window": _latent(
        128, BF16, 64, 640, "tree_mask", "positions", q_len=8, sliding_window=1000
    ),
    "latent e4m3 page 256": _latent(64, "float8_e4m3fn", 256, width=640, sliding_window=1000),
    "latent expanded": abstract_call(
        "mla_attention",
        {"batch": 2, "q_len": 4096, "kv_len": 4096, "heads": 16, "kv_heads": 16, "q_dim": 192,
         "latent": 512, "nope_dim": 128, "v_dim": 128, "rope_dim": 64},
        "b_k", trained=True, options={"causal": True},
    ),
}  # fmt: skip

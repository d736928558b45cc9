"""Calls of decoding over pages and over contiguous caches, with a float32 reference for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejktest.abstract import AbstractCall, abstract_call
from ejktest.at_size import reference_rows, relative
from ejktest.drawn import wild_tables
from ejktest.oracles.paged import gather

BF, HALF, F32 = jnp.bfloat16, jnp.float16, jnp.float32
I8, E4, E5 = jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2


@dataclass(frozen=True)
class Shape:
    """One call: contexts, heads, sizes, dtypes."""

    lens: tuple[int, ...]
    h: int = 32
    hk: int = 8
    d: int = 128
    dv: int = 128
    ps: int = 16
    q: Any = BF
    kv: Any = BF


UNEVEN = (4096, 16, 1, 0, 777, 2048, 3000, 65)
SCALES: dict[str, Any] = dict(k_scale=0.5, v_scale=2.0)
SMALL: dict[str, Any] = dict(k_scale=0.025, v_scale=0.03)  # for values up to 127
# name: shape, options of the operation; ``sinks`` is their number
CASES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "page 16": (Shape(UNEVEN), {}),
    "page 64": (Shape(UNEVEN, ps=64), {}),
    "page 1": (Shape(UNEVEN[4:], ps=1), {}),
    "page 3": (Shape(UNEVEN[4:], ps=3), {}),
    "page 256": (Shape(UNEVEN, ps=256), {}),
    "long single": (Shape((100001,)), {}),
    "no context": (Shape((0, 0, 0)), {}),
    "batch 1500": (Shape(tuple(i % 97 for i in range(1500)), h=8, hk=2, d=64, dv=64), {}),
    "splits 1": (Shape(UNEVEN), dict(num_splits=1)),
    "splits 5": (Shape(UNEVEN), dict(num_splits=5)),
    "splits 1 sinks": (Shape(UNEVEN), dict(num_splits=1, sinks=2)),
    "window": (Shape(UNEVEN), dict(sliding_window=300)),
    "cap": (Shape(UNEVEN), dict(logits_soft_cap=5.0)),
    "sinks": (Shape(UNEVEN), dict(sinks=3)),
    "window cap sinks": (
        Shape(UNEVEN, ps=64),
        dict(sliding_window=1000, logits_soft_cap=20.0, sinks=1),
    ),
    "mha": (Shape(UNEVEN, h=8, hk=8), {}),
    "mqa 8": (Shape(UNEVEN, h=8, hk=1), {}),
    "mqa 32": (Shape(UNEVEN, h=32, hk=1), {}),
    "mqa 64": (Shape(UNEVEN, h=64, hk=1), {}),
    "mqa 128": (Shape(UNEVEN, h=128, hk=1), {}),
    "group 5": (Shape(UNEVEN, h=10, hk=2), {}),
    **{f"d{d}": (Shape(UNEVEN, d=d, dv=d), {}) for d in (16, 64, 80, 96, 112, 256)},
    "d192/128": (Shape(UNEVEN, d=192), {}),
    "d256 mqa 64": (Shape(UNEVEN, h=64, hk=1, d=256, dv=256), {}),
    "float16": (Shape(UNEVEN, q=HALF, kv=HALF), {}),
    "float32": (Shape(UNEVEN, q=F32, kv=F32), {}),
    "float32 d256": (Shape(UNEVEN, q=F32, kv=F32, d=256, dv=256), {}),
    "int8": (Shape(UNEVEN, kv=I8), SMALL),
    "int8 page 1": (Shape(UNEVEN[4:], kv=I8, ps=1, d=72, dv=40), SMALL),
    "int8 mqa 64": (Shape(UNEVEN, kv=I8, h=64, hk=1), SMALL),
    "float32 q, int8": (Shape(UNEVEN, q=F32, kv=I8), SMALL),
    "e4m3": (Shape(UNEVEN, kv=E4), SCALES),
    "e5m2": (Shape(UNEVEN, kv=E5), SCALES),
    "e4m3 d64 window": (Shape(UNEVEN, kv=E4, d=64, dv=64), dict(sliding_window=77)),
    "e4m3 d80": (Shape(UNEVEN, kv=E4, d=80, dv=80), SCALES),
    "e5m2 d256 page 64": (Shape(UNEVEN, kv=E5, d=256, dv=256, ps=64), SCALES),
    "float16 q, e4m3": (Shape(UNEVEN, q=HALF, kv=E4), dict(num_splits=1)),
}
# output rounding is 2e-3 in bfloat16; probabilities rounded to it add as much
BOUND = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 2e-5}


def bound(name: str) -> float:
    """Returns the largest relative error that is accepted."""
    s = CASES[name][0]
    if s.q is F32 and s.d > 128:
        return 2e-3  # one TF32 matmul instead of three
    return BOUND[jnp.dtype(s.q).name]


def draw_caches(name: str, s: Any, query: tuple[int, ...], *rows: tuple[int, ...]) -> tuple:
    """Returns q, a cache for each shape of a token's row, lengths and tables.

    A cache has the pages that are needed and three more.
    """
    tables, pages = wild_tables(np.random.default_rng(len(name)), s.lens, s.ps)

    @jax.jit
    def make():
        key, *keys = jax.random.split(jax.random.key(len(name)), 1 + len(rows))
        q = jax.random.normal(key, (len(s.lens), *query), F32).astype(s.q)
        caches = [
            jax.random.normal(k, (pages, s.ps, *row), BF) for k, row in zip(keys, rows, strict=True)
        ]
        if s.kv is I8:
            caches = [jnp.clip(jnp.round(x * 40), -128, 127) for x in caches]
        return q, *(x.astype(s.kv) for x in caches)

    return (*make(), jnp.asarray(s.lens, jnp.int32), jnp.asarray(tables))


def draw(name: str) -> tuple[jax.Array, ...]:
    """Returns the arrays of a case."""
    s = CASES[name][0]
    return draw_caches(name, s, (s.h, s.d), (s.hk, s.d), (s.hk, s.dv))


def _draw_sinks(heads: int, options: Mapping[str, Any]) -> jax.Array | None:
    """Returns the sinks of a case whose options give their number."""
    shape = (heads, options.get("sinks", 0))
    return jax.random.normal(jax.random.key(3), shape, F32) if shape[1] else None


def in_context(lens: Sequence[int], tables: Any, pages: int, page_size: int) -> np.ndarray:
    """Returns which tokens of a cache are in a context, bool ``[pages, page_size]``."""
    seen = np.zeros((pages, page_size), bool)
    for n, row in zip(lens, np.asarray(tables), strict=True):
        j = np.arange(n)
        seen[row[j // page_size], j % page_size] = True
    return seen


def jitted(function: Callable[..., Any], s: Any, options: Mapping[str, Any], **others: Any):
    """Returns a jitted function of the arrays of a case with these options."""
    aux = _draw_sinks(s.h, options)
    arguments = {n: x for n, x in options.items() if n != "sinks"} | others
    return jax.jit(lambda *x: function(*x, softmax_aux=aux, **arguments))


def reference_options(s: Any, o: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a case's window, cap and sinks as ``reference_rows`` takes them."""
    sinks = _draw_sinks(s.h, o)
    return {"window": o.get("sliding_window"), "cap": o.get("logits_soft_cap"), "sinks": sinks}


def runner(name: str, page_attention: Callable[..., Any]):
    """Returns a case of an implementation, as a jitted function of ``draw(name)``."""
    return jitted(page_attention, *CASES[name])


def reference(name: str):
    """Returns a case in float32, row by row, as a jitted function of ``draw(name)``."""
    s, o = CASES[name]
    options = reference_options(s, o) | {"scale": s.d**-0.5 * o.get("k_scale", 1.0)}

    def row(k, v, q, n, table):
        out, _ = reference_rows(q[None], gather(k, table), gather(v, table), n[None] - 1, **options)
        return out[0] * o.get("v_scale", 1.0)

    return jax.jit(lambda q, k, v, n, t: jax.lax.map(lambda x: row(k, v, *x), (q, n, t)))


def run_thrice(run: Callable[..., Any], lens: Sequence[int], q, *caches, n, tables):
    """Returns the results of a call, of which two more have the same bits.

    One of them has NaN in memory that no context covers.
    """
    results = run(q, *caches, n, tables)
    seen = in_context(lens, tables, *caches[0].shape[:2])
    hidden = caches
    if jnp.issubdtype(caches[0].dtype, jnp.floating):
        nan = jnp.asarray(jnp.nan, caches[0].dtype)
        hidden = [jnp.where(seen.reshape(*seen.shape, *[1] * (c.ndim - 2)), c, nan) for c in caches]
    for again in (caches, hidden):
        jax.tree.map(np.testing.assert_array_equal, results, run(q, *again, n, tables))
    return results


def check(name: str, page_attention: Callable[..., Any]) -> None:
    """Asserts that a case is within the bound, and ``run_thrice``."""
    *arrays, lens, tables = draw(name)
    run = runner(name, page_attention)
    first = run_thrice(run, CASES[name][0].lens, *arrays, n=lens, tables=tables)
    error = relative(first, reference(name)(*arrays, lens, tables))
    print(f"{name}: {error:.1e}")
    assert error <= bound(name)


def every_code(kind: Any, page_attention: Callable[..., Any]) -> int:
    """Returns how many 8-bit values are read inexactly; each is the only key of its row."""
    codes = np.arange(256, dtype=np.uint8).view(np.dtype(kind))
    v = jnp.asarray(codes.reshape(16, 1, 1, 16))
    q, k = jnp.ones((16, 1, 16), BF), jnp.zeros_like(v)
    lens, tables = jnp.ones(16, jnp.int32), jnp.arange(16)[:, None]
    got = jax.jit(lambda *x: page_attention(*x, num_splits=1))(q, k, v, lens, tables)
    got, want = np.asarray(got, np.float32).ravel(), codes.astype(np.float32)
    # a value that is not finite spoils only itself in the row of 16
    return int((~((got == want) | (np.isnan(got) & ~np.isfinite(want)))).sum())


# ---- ahead of time -------------------------------------------------------------------------------

SERVER = {"heads": 32, "kv_heads": 8, "head_dim": 128, "pages": 4096, "page_size": 16}


def _paged(cache: str = "bfloat16", *optional: str, **sizes: int) -> AbstractCall:
    sizes = SERVER | {"batch": 64, "max_blocks": 512} | sizes
    dtypes = {"key_cache": cache, "value_cache": cache}
    return abstract_call("page_attention", sizes, *optional, dtypes=dtypes, forms={"query": 1})


PAGED = {
    "paged": _paged(),
    "paged int8": _paged("int8"),
    "paged e4m3": _paged("float8_e4m3fn"),
}
CONTIGUOUS = {
    "contiguous": abstract_call(
        "ragged_decode_attention",
        {"batch": 64, "heads": 32, "kv_heads": 8, "kv_len": 8192, "head_dim": 128},
        forms={"query": 1},
    ),
}
COMPILED_TPU = {
    **PAGED,
    **CONTIGUOUS,
    "paged e5m2 scales": _paged("float8_e5m2", "k_scale", "v_scale"),
    "paged mqa": _paged(heads=64, kv_heads=1, page_size=64),
    "paged heads 5": _paged("bfloat16", "softmax_aux", heads=10, kv_heads=2, sinks=1),
    "paged d256": _paged(head_dim=256, kv_heads=8),
    "paged long tables": _paged(batch=256, max_blocks=8192),
    "paged large pages": _paged(heads=64, page_size=256, max_blocks=64),
}

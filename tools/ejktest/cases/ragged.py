"""Calls of ragged attention over pages: mixes of prefill and decoding, and their reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejktest.abstract import AbstractCall, abstract_call
from ejktest.at_size import reference_rows
from ejktest.cases.paged import SERVER
from ejktest.drawn import wild_tables
from ejktest.oracles.paged import gather

SAMPLED = 96  # query rows that are compared


@dataclass(frozen=True)
class Mix:
    """Sequences of ``rows`` new tokens, ``lens`` tokens in all; sizes, dtypes, options."""

    rows: tuple[int, ...]
    lens: tuple[int, ...]
    h: int = 32
    hk: int = 8
    d: int = 128
    ps: int = 16
    q: str = "bfloat16"
    kv: str = "bfloat16"
    window: int | None = None
    cap: float | None = None
    sinks: int = 0
    packed: bool = False

    @property
    def scale(self) -> float | None:
        return 0.025 if self.kv == "int8" else 0.5 if self.kv.startswith("float8") else None

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"sliding_window": self.window, "logits_soft_cap": self.cap}
        if self.scale is not None:
            options |= {"k_scale": self.scale, "v_scale": self.scale}
        if self.sinks:
            options["softmax_aux"] = jax.random.normal(jax.random.key(3), (self.h, self.sinks))
        return {name: x for name, x in options.items() if x is not None}


def draw(m: Mix, seed: int = 0) -> dict[str, jax.Array]:
    """Draws q, new keys and values, a cache, lens, tables and starts; 5 rows are of no sequence."""
    rng = np.random.default_rng(seed)
    tables, pages = wild_tables(rng, m.lens, m.ps)
    t = sum(m.rows) + 5
    width = jnp.dtype(m.kv).itemsize
    shape = (pages, m.ps, 2 * m.hk, m.d)
    if m.packed:
        per = 4 // width
        shape = (pages, m.ps, -(-2 * m.hk // per), per, -(-m.d // 128) * 128)

    @jax.jit
    def make(keys):
        q = jax.random.normal(keys[0], (t, m.h, m.d), m.q)
        k, v = (jax.random.normal(x, (t, m.hk, m.d), m.q) for x in keys[1:3])
        cache = jax.random.normal(keys[3], shape, jnp.bfloat16 if width < 4 else m.q)
        cache = jnp.clip(jnp.round(cache * 40), -128, 127) if m.kv == "int8" else cache
        return q, k, v, cache.astype(m.kv)

    q, k, v, cache = make(jax.random.split(jax.random.key(seed), 4))
    starts = np.cumsum([0, *m.rows]).astype(np.int32)
    return {
        "q": q,
        "keys": k,
        "values": v,
        "cache": cache,
        "lens": jnp.asarray(m.lens, jnp.int32),
        "tables": jnp.asarray(tables),
        "starts": jnp.asarray(starts),
        "count": jnp.asarray(len(m.lens), jnp.int32),
    }


def reading(fn: Callable[..., Any], m: Mix, x: dict[str, jax.Array]) -> tuple[Any, tuple]:
    """Returns ``ragged_page_attention`` as a function of arrays, and the arrays."""
    names = ("q", "cache", "lens", "tables", "starts", "count")
    return partial(fn, **m.options), tuple(x[name] for name in names)


def writing(fn: Callable[..., Any], m: Mix, x: dict[str, jax.Array]) -> tuple[Any, tuple]:
    """Returns ``ragged_page_attention_v3`` as a function of arrays, and the arrays."""
    names = ("q", "keys", "values", "cache", "lens", "tables", "starts")
    ends = jnp.stack([x["count"] * 0, x["count"] * 0, x["count"]])
    return partial(fn, **m.options), (*(x[name] for name in names), ends)


def sample(m: Mix) -> np.ndarray:
    """Returns packed rows to compare: the ends of every sequence, and others."""
    rng, starts = np.random.default_rng(1), np.cumsum([0, *m.rows])
    ends = {int(r) for s, n in zip(starts, m.rows, strict=False) if n for r in (s, s + n - 1)}
    ends = set(sorted(ends)[: SAMPLED // 2])
    others = rng.permutation(int(starts[-1]))[: SAMPLED - len(ends)]
    return np.asarray(sorted(ends | {int(r) for r in others}), np.int32)


def reference(m: Mix, x: dict[str, jax.Array], cache: jax.Array) -> tuple[np.ndarray, jax.Array]:
    """Returns sampled rows and their output in float32."""
    rows = sample(m)
    r = np.searchsorted(np.cumsum(m.rows), rows, side="right")
    starts = np.cumsum([0, *m.rows])
    position = np.asarray(m.lens)[r] - np.asarray(m.rows)[r] + rows - starts[r]
    plain = cache.reshape(*cache.shape[:2], -1, cache.shape[-1])
    scale = m.scale or 1.0
    options = {"window": m.window, "cap": m.cap, "sinks": m.options.get("softmax_aux")}

    def row(args):
        q, position, table = args
        both = gather(plain, table)[:, : 2 * m.hk, : m.d]
        o, _ = reference_rows(
            q[None], both[:, 0::2], both[:, 1::2], position[None], scale=m.d**-0.5 * scale,
            **options,
        )  # fmt: skip
        return o[0] * scale

    operands = x["q"][rows], jnp.asarray(position), x["tables"][jnp.asarray(r)]
    return rows, jax.jit(lambda args: jax.lax.map(row, args))(operands)


def error(m: Mix, x: dict[str, jax.Array], cache: jax.Array, out: jax.Array) -> float:
    """Returns the RMS error of sampled rows over their RMS; inf where other rows are not 0."""
    rows, want = reference(m, x, cache)
    got = out[rows].astype(jnp.float32)
    if bool(jnp.any(out[sum(m.rows) :] != 0)) or not bool(jnp.all(jnp.isfinite(out))):
        return float("inf")
    return float(jnp.sqrt(jnp.mean((got - want) ** 2) / jnp.mean(want**2)))


# rounding of outputs and probabilities; a float32 matmul is three of TF32
BOUND = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 2e-5}

UNEVEN = Mix((1, 0, 700, 1, 3, 130, 1, 64), (4096, 5, 3000, 16, 777, 130, 1, 6000))
# with the rows of no sequence 15 rows of 16 sequences, and 25 of 30
FEW = Mix((1, 3, 0, 1, 4, 1, *[0] * 10), (4096, 777, 5, 1, 2000, 9000, *[3] * 10))
DECODING = Mix((*[1] * 12, 8, *[0] * 17), (*[4096, 1, 777, 50] * 3, 6000, *[3] * 17))
CASES = {
    "few rows": FEW,
    "few rows window e4m3": replace(FEW, kv="float8_e4m3fn", window=1000, packed=True),
    "decoding": DECODING,
    "page 16": UNEVEN,
    "page 64": replace(UNEVEN, ps=64),
    "page 256 packed": replace(UNEVEN, ps=256, packed=True),
    "page 3 window group 5": replace(UNEVEN, ps=3, h=10, hk=2, window=300),
    "window cap sinks": replace(UNEVEN, ps=64, window=1000, cap=20.0, sinks=2),
    "page 1 mqa 64": replace(UNEVEN, ps=1, h=64, hk=1),
    "float16 mha d64 page 128": replace(UNEVEN, q="float16", kv="float16", h=8, d=64, ps=128),
    "d80": replace(UNEVEN, d=80),
    "d256": replace(UNEVEN, h=16, d=256),
    "few long": Mix((96, 40), (20001, 10000)),
    "1500 sequences": Mix((1, 6, 0, 40) * 375, (97, 30, 5, 77) * 375, h=8, hk=2, d=64),
    "float32": replace(UNEVEN, q="float32", kv="float32", h=8, hk=2),
    "int8 packed d72": replace(UNEVEN, kv="int8", d=72, packed=True),
    "e4m3": replace(UNEVEN, kv="float8_e4m3fn"),
    "e5m2 d256 page 64": replace(UNEVEN, kv="float8_e5m2", h=16, d=256, ps=64),
}
# also without writing: all else is the same
READ = ("few rows", "page 16", "float16 mha d64 page 128")
# for Hopper: single rows among others that the same launch has, and single rows that Triton's has
HOPPER = {
    "singles": Mix((1, 1, 2000, 1, 104), (500, 70, 2100, 129, 1000), h=16, hk=4),
    "rows": Mix((1130, 0, 3, 974), (1130, 5, 777, 1200), h=16, hk=2, ps=64, cap=20.0),
    "e4m3": Mix((1, 1130, 3, 974), (300, 1130, 77, 1200), h=16, hk=2, kv="float8_e4m3fn"),
    "int8, float16": Mix(
        (1130, 3, 974), (1130, 77, 1200), h=16, hk=4, d=64, ps=64, q="float16", kv="int8", cap=20.0
    ),
}
SMALL = {
    "singles": Mix((1, 1, 137), (100, 70, 200), h=8, hk=2, ps=32),
    "rows": Mix((259, 0, 3, 133), (259, 5, 77, 300), h=4, hk=2, ps=64, cap=20.0),
    "e4m3": Mix((1, 259, 3, 133), (100, 259, 77, 300), h=4, hk=2, kv="float8_e4m3fn"),
    "int8, float16": Mix(
        (259, 3, 133), (259, 77, 300), h=4, hk=2, d=64, ps=64, q="float16", kv="int8", cap=20.0
    ),
}


# ---- ahead of time -------------------------------------------------------------------------------


def _ragged(
    cache: str = "bfloat16",
    page: int = 16,
    *optional: str,
    writes: bool = True,
    window: int | None = None,
    **sizes: int,
) -> AbstractCall:
    sizes = {"tokens": 16440, "sequences": 64, "max_blocks": 8192 // page} | sizes
    sizes["page_size"] = page
    operation, pool = "ragged_page_attention", "kv_pages"
    if writes:
        operation, pool = "ragged_page_attention_v3", "kv_cache"
    scales = {} if cache == "bfloat16" else {"k_scale": 0.05, "v_scale": 0.05}
    options: dict[str, Any] = scales if window is None else scales | {"sliding_window": window}
    sizes = SERVER | sizes
    return abstract_call(operation, sizes, *optional, dtypes={pool: cache}, options=options)


def reading_ahead(rows: int) -> AbstractCall:
    """Returns a call without writing, with this number of packed rows."""
    return _ragged(writes=False, tokens=rows)


def writing_ahead(rows: int) -> AbstractCall:
    """Returns a call that writes its keys and values, with this number of packed rows."""
    return _ragged(tokens=rows)


COMPILED = {
    "ragged": _ragged(),
    "ragged page 64": _ragged(page=64),
    "ragged int8": _ragged("int8"),
}
# contexts of 128k tokens in pages of 16
_LONG: dict[str, Any] = {"tokens": 1024, "sequences": 256, "max_blocks": 8192}
COMPILED_TPU = {
    "ragged": COMPILED["ragged"],
    "ragged int8": COMPILED["ragged int8"],
    "ragged read": _ragged(writes=False, **_LONG),
    "ragged read e4m3": _ragged("float8_e4m3fn", writes=False, **_LONG),
    "ragged read mqa": _ragged(writes=False, heads=8, kv_heads=1),
    "ragged tree": _ragged("bfloat16", 16, "tree_mask", writes=False, max_new=64, **_LONG),
    "ragged tree window": _ragged(
        "int8", 16, "tree_mask", "positions", window=1000, max_new=300, **_LONG
    ),
}

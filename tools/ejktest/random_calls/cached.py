"""Random calls of attention over caches."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ejktest.drawn import grow_tree, wild_tables
from ejktest.random_calls.draw import EIGHT_BIT, HEADS, Draw, RandomCall, hide


def contexts(d: Draw, count: int) -> list[int]:
    return [d.pick((0, 1, 7, 16, 65, 129, 300, 333, 1000)) for _ in range(count)]


def cache_options(
    d: Draw, h: int, hk: int, cache: str, *, value_scale: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draws scales, a window, a cap and sinks."""
    arrays: dict[str, Any] = {}
    static: dict[str, Any] = {}
    for name in ("k_scale", "v_scale") if value_scale else ("k_scale",):
        if cache in EIGHT_BIT or d.option(0.1):
            usual = 0.01 if cache == "int8" else 0.5
            forms = [usual, np.float32(usual)]
            if value_scale:
                forms.append((usual * (0.5 + d.rng.random(hk))).astype(np.float32))
            form = d.pick(forms)
            (static if isinstance(form, float) and not hasattr(form, "dtype") else arrays)[name] = (
                form
            )
    if d.option(0.25):
        static["sliding_window"] = d.window()
    if d.option(0.2):
        static["logits_soft_cap"] = d.pick((3.0, 20.0))
    if d.option(0.2):
        static["softmax_scale"] = d.pick((0.05, -0.1))
    if d.option(0.25):
        arrays["softmax_aux"] = d.sinks(h)
    if d.option(0.4):
        static["return_lse"] = True
    return arrays, static


def cache_dtype(d: Draw) -> str:
    return d.pick(EIGHT_BIT) if d.option(0.45) else d.dtype


def paged(d: Draw, operation: str) -> RandomCall:
    (h, hk), dim, kind = d.pick(HEADS), d.dim(), cache_dtype(d)
    dv = dim if d.chance(0.7) else 128 if dim == 192 else d.dim()
    lens, size = contexts(d, d.integer(1, 6)), d.page_size()
    tables, pages = wild_tables(d.rng, lens, size)
    arrays, static = cache_options(d, h, hk, kind)
    caches = [d.pages(pages, size, hk, x, dtype=kind) for x in (dim, dv)]
    for cache in caches:
        hide(d, cache, lens, tables)
    shape = (len(lens), 1, h, dim) if d.chance(0.3) else (len(lens), h, dim)
    operands = {
        "query": d.normal(*shape),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "context_lens": np.array(lens, np.int32),
        "block_tables": tables,
    }
    if d.option(0.3):
        static["num_splits"] = d.integer(1, 7)
    return RandomCall(operation, operands | arrays, static, ("query",), d.dtype)


def latent_decoding(d: Draw, operation: str) -> RandomCall:
    h, latent = d.pick((1, 3, 5, 8, 16, 40, 64, 128)), d.pick((32, 64, 128, 256, 512, 512))
    width, kind = latent + d.pick((0, 16, 32, 64, 64)), cache_dtype(d)
    if d.plain:
        h, latent, width = d.pick((16, 64, 128)), 512, 576
    lens, size = contexts(d, d.integer(1, 5)), d.page_size()
    tables, pages = wild_tables(d.rng, lens, size)
    arrays, static = cache_options(d, h, 1, kind, value_scale=False)
    cache = d.pages(pages, size, width, dtype=kind)
    hide(d, cache, lens, tables)
    rows = 0 if d.chance(0.4) else d.integer(1, 9)
    operands = {
        "query": d.normal(len(lens), *([rows] if rows else []), h, width),
        "latent_cache": cache,
        "context_lens": np.array(lens, np.int32),
        "block_tables": tables,
    }
    static["latent_dim"] = latent
    if rows and d.chance(0.3):
        trees = [grow_tree(d.rng, rows) for _ in lens]
        arrays["tree_mask"] = np.stack([mask for mask, _ in trees])
        if d.option(0.5):
            before = np.array(lens)[:, None] - rows
            arrays["positions"] = (before + np.stack([x for _, x in trees])).astype(np.int32)
    elif d.option(0.3):
        static["num_splits"] = d.integer(1, 7)
    return RandomCall(operation, operands | arrays, static, ("query",), d.dtype)


def contiguous(d: Draw, operation: str) -> RandomCall:
    b, (h, hk), dim, k = d.integer(1, 6), d.pick(HEADS), d.dim(), max(d.length(), 7)
    arrays, static = cache_options(d, h, hk, d.dtype)
    arrays = {n: x for n, x in arrays.items() if "_scale" not in n}
    static = {n: x for n, x in static.items() if n not in ("k_scale", "v_scale")}
    start, end = d.rng.integers(-3, k + 3, (2, b)).astype(np.int32)
    keys = d.normal(b, k, hk, dim), d.normal(b, k, hk, dim if d.chance(0.7) else d.dim())
    j = np.arange(k)
    hidden = (j < start[:, None]) | (j >= end[:, None])
    if d.option(0.5):
        for x in keys:
            x[hidden] = np.nan
    shape = (b, 1, h, dim) if d.chance(0.3) else (b, h, dim)
    operands = {
        "query": d.normal(*shape),
        "key": keys[0],
        "value": keys[1],
        "sequence_start": start,
        "sequence_end": end,
    }
    return RandomCall(operation, operands | arrays, static, ("query",), d.dtype)


def ragged(d: Draw, operation: str) -> RandomCall:
    from ejkernel.types.serving.plan import make_plan

    writes = operation.endswith("v3")
    (h, hk), dim, kind, size = d.pick(HEADS), d.dim(), cache_dtype(d), d.page_size()
    n = d.integer(1, 6)
    new = [d.pick((1, 1, 1, 0, 3, 7, 64, 129)) for _ in range(n)]
    decoding = d.integer(0, n) if d.chance(0.4) else 0
    new[:decoding] = [1] * decoding
    lens = [x + d.pick((0, 0, 5, 16, 200, 333)) for x in new]
    count = n if d.chance(0.7) else d.integer(min(1, n // 3), n)
    tables, pages = wild_tables(d.rng, lens, size)
    arrays, static = cache_options(d, h, hk, kind)
    tokens = sum(new) + d.pick((0, 0, 1, 5))
    tokens = d.rows(max(tokens, 1))
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    packing = 32 // (8 * jnp.dtype(kind).itemsize)
    row = (2 * hk, dim)
    if writes and d.chance(0.3):
        row = (-(-2 * hk // packing), packing, -(-dim // 128) * 128)
    cache = d.pages(pages, size, *row, dtype=kind)
    used = lens[:count]
    hide(d, cache, used, tables[:count])
    operands: dict[str, Any] = {
        "queries": d.normal(tokens, h, dim),
        "block_tables": tables,
        "query_start_loc": starts,
    }
    if writes:
        operands |= {
            "keys": d.normal(tokens, hk, dim),
            "values": d.normal(tokens, hk, dim),
            "kv_cache": cache,
            "kv_lens": np.array(lens, np.int32),
            "distribution": np.array([min(decoding, count), min(decoding, count), count], np.int32),
        }
        if kind in EIGHT_BIT and d.chance(0.2):
            static["q_scale"] = 0.02 if kind == "int8" else 0.5
    else:
        operands |= {
            "kv_pages": cache,
            "context_lens": np.array(lens, np.int32),
            "num_seqs": np.array([count], np.int32),
        }
    if d.option(0.2):
        columns = max(1, max(new))
        arrays["tree_mask"] = np.zeros((tokens, columns), bool)
        positions = np.zeros(tokens, np.int32)
        for r, length in enumerate(new):
            if length:
                mask, depths = grow_tree(d.rng, length)
                rows = slice(starts[r], starts[r + 1])
                arrays["tree_mask"][rows, :length] = mask
                positions[rows] = lens[r] - length + depths
        if d.option(0.5):
            arrays["positions"] = positions
    if d.option(0.2):
        longest = max(1, max(new)) if d.chance(0.5) else None
        length = operands["kv_lens" if writes else "context_lens"]
        arrays["plan"] = make_plan(length, starts, count, tokens, longest)
    smooth: tuple[str, ...] = ("queries", "keys", "values") if writes else ("queries",)
    if len(row) == 3:  # whose reference has another form
        smooth = ()
    return RandomCall(operation, operands | arrays, static, smooth, d.dtype)

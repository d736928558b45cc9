"""Sequences in batches of any composition, to compare the bits of their results.

A composition is a list of indices of five sequences. A function of a composition returns
outputs and gradients, each with an axis of the members of the batch first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel.modules as modules
from ejkernel.ops import batch_invariant

Composition = Sequence[int]
COMPOSITIONS: tuple[Composition, ...] = (
    [0], [2, 1], [4, 0, 3, 1, 2], [1, 3, 0], [2], [3, 4, 0, 1, 2, 0, 1],
)  # fmt: skip
FEW: tuple[Composition, ...] = ([1], [4, 0, 1], [2, 1], [2])
"""Alone, in other places of batches of other sizes: for kernels that take long to compile."""
LENGTHS = (3, 40, 17, 90, 64)
NEW = (1, 5, 12, 1, 2)  # tokens of a ragged call


@dataclass(frozen=True)
class Sizes:
    """Sizes of all sequences; ``rows`` of dense ones, ``page`` tokens of a page."""

    rows: int = 48
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    channels: int = 32
    page: int = 8


SMALL = Sizes()


def draw(*shape: int, seed: int = 0) -> jax.Array:
    """Returns normal values."""
    return jax.random.normal(jax.random.key(seed), shape)


def stacked(name: str, s: Sizes = SMALL) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments by name, an entry of the first axis for each of five sequences, and the rest."""
    n = s.rows
    q, k, v = (draw(5, n, h, s.dim, seed=h) for h in (s.heads, s.kv_heads, s.kv_heads))
    qkv, gate = {"query": q, "key": k, "value": v}, {"g": -jnp.abs(draw(5, n, s.heads, seed=2))}
    # heads of values share heads of queries and keys
    delta = {"query": k[:, ::-1], "key": k, "value": q}
    latent = {"query": q, "key_value": draw(5, n, 2 * s.dim, seed=1)}
    rotary = {"b_q": draw(5, n, 8, seed=2), "b_k": draw(5, n, 8, seed=3)}
    weights = {
        name: draw(2 * s.dim, s.kv_heads, s.dim, seed=seed) / s.dim**0.5
        for name, seed in (("w_kc", 4), ("w_vc", 5))
    }
    x = {"x": draw(5, n, s.channels)}
    return {
        "flash_attention": (qkv, {"causal": True, "sliding_window": 20}),
        "mla_attention": (latent | rotary, weights | {"causal": True}),
        "recurrent_attention": (qkv | gate, {}),
        "gated_delta_rule": (delta | gate, {"normalize_qk": True}),
        "causal_conv1d": (x, {"weight": draw(s.channels, 4, seed=3)}),
        "mean_pooling": (x, {}),
    }[name]


DENSE = (
    "flash_attention",
    "recurrent_attention",
    "gated_delta_rule",
    "causal_conv1d",
    "mean_pooling",
)


def dense_results(
    name: str, platform: str, composition: Composition, s: Sizes = SMALL, **options: Any
) -> list[Any]:
    """Returns the output of an operation with a batch axis, and its gradients."""
    arrays, others = stacked(name, s)
    rows = {n: x[np.array(composition)] for n, x in arrays.items()}
    operation = partial(getattr(modules, name), platform=platform, **others, **options)
    out, pull = jax.vjp(lambda rows: operation(**rows), rows)
    gradients = pull(jnp.cos(out))[0]
    return [out, *gradients.values()]


def paged_arguments(count: int, extra: int, page: int) -> tuple[np.random.Generator, int, Any]:
    """Pages of these sequences at random places of a cache, behind tables of random width."""
    rng = np.random.default_rng(count)
    width = -(-max(LENGTHS) // page) + extra
    pages = count * width + int(rng.integers(0, 9))
    places = rng.permutation(pages)[: count * width].reshape(-1, width)
    return rng, pages, places


def place_tokens(
    composition: Composition, tables: Any, pages: int, s: Sizes, lengths: Composition
) -> list[Any]:
    """Returns caches of keys and of values; what no sequence has is NaN."""
    keys_and_values = draw(5, 96, s.kv_heads, s.dim, seed=4), draw(5, 96, s.kv_heads, s.dim, seed=5)
    caches = [np.full((pages, s.page, s.kv_heads, s.dim), np.nan, np.float32) for _ in range(2)]
    for table, i in zip(tables, composition, strict=True):
        for cache, x in zip(caches, keys_and_values, strict=True):
            tokens = np.arange(lengths[i])
            cache[table[tokens // s.page], tokens % s.page] = np.asarray(x[i, : lengths[i]])
    return caches


def paged_results(
    name: str, platform: str, composition: Composition, s: Sizes = SMALL
) -> list[Any]:
    """Returns the outputs of one of the operations over pages."""
    if name.startswith("ragged"):
        return ragged_results(name, platform, composition, s)
    count = len(composition)
    _, pages, places = paged_arguments(count, count % 3, s.page)
    caches = place_tokens(composition, places, pages, s, LENGTHS)
    lens = np.array([LENGTHS[i] for i in composition], np.int32)
    tables = places.astype(np.int32)
    members = np.array(composition)
    if name == "page_attention":
        query = draw(5, s.heads, s.dim)[members]
        operation = partial(modules.page_attention, platform=platform, return_lse=True)
        return list(operation(query, *caches, lens, tables))
    query = draw(5, s.heads, 2 * s.dim)[members]
    cache = np.concatenate([caches[0][:, :, 0], caches[1][:, :, 0]], -1)
    return [modules.mla_decode(query, cache, lens, tables, latent_dim=s.dim, platform=platform)]


def ragged_results(
    name: str, platform: str, composition: Composition, s: Sizes = SMALL, *,
    gradients: bool = False, **options: Any,
) -> list[Any]:  # fmt: skip
    """Returns outputs of a ragged operation, the cache of v3, and the gradients of packed arrays.

    Some calls have rows behind the last sequence, and a row of the table that no sequence has.
    """
    count, writes = len(composition), name.endswith("v3")
    rng, pages, places = paged_arguments(count, count % 3, s.page)
    cached = [n - new for n, new in zip(LENGTHS, NEW, strict=True)] if writes else LENGTHS
    caches = place_tokens(composition, places, pages, s, cached)
    cache = np.stack(caches, 3).reshape(pages, s.page, 2 * s.kv_heads, s.dim)
    new = np.array([NEW[i] for i in composition])
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    unused, tail = count % 2, int(rng.integers(0, 4))

    def packed(heads: int, rows_of: Callable[[int], Any]) -> Any:
        parts = [*(rows_of(i)[-NEW[i] :] for i in composition), np.zeros((tail, heads, s.dim))]
        return jnp.asarray(np.concatenate(parts), jnp.float32)

    tables = np.pad(places, ((0, unused), (0, 0)), constant_values=-7).astype(np.int32)
    lens = np.array([*(LENGTHS[i] for i in composition), *[9] * unused], np.int32)
    floats = {"queries": packed(s.heads, lambda i: draw(12, s.heads, s.dim, seed=i))}
    others: dict[str, Any] = {"block_tables": tables}
    others["query_start_loc"] = np.pad(starts, (0, unused), mode="edge")
    if writes:
        for key, seed in (("keys", 4), ("values", 5)):
            x = np.asarray(draw(5, 96, s.kv_heads, s.dim, seed=seed))
            floats[key] = packed(s.kv_heads, lambda i, x=x: x[i, : LENGTHS[i]])
        ends = np.array([0, 0, count], np.int32)
        others |= {"kv_cache": cache, "kv_lens": lens, "distribution": ends}
    else:
        others |= {"kv_pages": cache, "context_lens": lens, "num_seqs": np.array([count], np.int32)}
    operation = partial(getattr(modules, name), platform=platform, **others, **options)

    def run(floats: dict[str, Any]) -> tuple[Any, Any]:
        outputs = operation(**floats)
        return outputs if writes else (outputs, None)

    def by_sequence(x: Any) -> Any:
        rows = [np.asarray(x)[a:b] for a, b in itertools.pairwise(starts)]
        return np.stack([np.pad(r, ((0, max(NEW) - len(r)), (0, 0), (0, 0))) for r in rows])

    if gradients:
        out, pull, written = jax.vjp(run, floats, has_aux=True)
        outputs = [out, *pull(jnp.cos(out))[0].values()]
    else:
        out, written = run(floats)
        outputs = [out]
    results = [by_sequence(x) for x in outputs]
    if writes:
        pages_of = np.asarray(written)[places].reshape(count, -1, 2 * s.kv_heads, s.dim)
        seen = np.arange(pages_of.shape[1]) < lens[:count, None]
        # tables of all widths hold the longest sequence
        results.append(np.where(seen[..., None, None], pages_of, 0)[:, : max(LENGTHS)])
    return results


def grouped_results(
    platform: str,
    composition: Composition,
    *,
    inner: int = 64,
    columns: int = 48,
    narrow: bool = False,
    **options: Any,
) -> list[Any]:
    """Rows of five groups; a composition says how many of them stand in a call, and where.

    ``narrow``: matrices are int8, with a scale for every column.
    """
    counts = np.bincount(composition, minlength=5)
    order = np.repeat(np.arange(5), counts)
    lhs, rhs = draw(5, inner)[order], draw(5, inner, columns, seed=1)
    if narrow:
        options["rhs_scale"] = jnp.abs(rhs).max(1) / 127
        rhs = jnp.round(rhs / options["rhs_scale"][:, None]).astype(jnp.int8)
    operation = partial(modules.grouped_matmul, platform=platform, **options)
    sizes = counts.astype(np.int32)
    out, pull = jax.vjp(lambda lhs: operation(lhs, rhs, sizes), lhs)
    first = np.concatenate([[0], np.cumsum(counts)])[np.array(composition)]
    return [out[first], pull(jnp.cos(out))[0][first]]


def expected_paged(name: str, s: Sizes = SMALL) -> Any:
    """Returns the outputs of each sequence as ``paged_results`` has them, in float64."""
    keys, values = (
        np.asarray(draw(5, 96, s.kv_heads, s.dim, seed=seed), np.float64) for seed in (4, 5)
    )
    rows = []
    for i, length in enumerate(LENGTHS):
        k, v = keys[i, :length], values[i, :length]
        if name == "mla_decode":
            q = np.asarray(draw(5, s.heads, 2 * s.dim)[i : i + 1], np.float64)
            k, v = np.concatenate([k[:, :1], v[:, :1]], -1), k[:, :1]
        elif name == "page_attention":
            q = np.asarray(draw(5, s.heads, s.dim)[i : i + 1], np.float64)
        else:
            q = np.asarray(draw(12, s.heads, s.dim, seed=i)[-NEW[i] :], np.float64)
        k, v = (np.repeat(x, s.heads // x.shape[1], axis=1) for x in (k, v))
        x = np.einsum("qhd,khd->qhk", q, k) * q.shape[-1] ** -0.5
        hidden = np.arange(length) > length - len(q) + np.arange(len(q))[:, None]
        p = np.exp(np.where(hidden[:, None], -np.inf, x))
        rows.append(np.einsum("qhk,khd->qhd", p / p.sum(-1, keepdims=True), v))
    longest = max(map(len, rows))
    return np.stack([np.pad(r, ((0, longest - len(r)), (0, 0), (0, 0))) for r in rows])


def check_bits(
    results: Callable[[Composition], list[Any]],
    compositions: Sequence[Composition] = COMPOSITIONS,
) -> None:
    """Fails where a sequence has other bits in another batch."""
    alone: dict[int, list[bytes]] = {}
    for composition in compositions:
        with batch_invariant():
            outputs = [np.asarray(x) for x in results(composition)]
        for x in outputs:
            assert np.isfinite(x).all()
        for row, i in enumerate(composition):
            bits = [x[row].tobytes() for x in outputs]
            assert alone.setdefault(i, bits) == bits, (composition, row)

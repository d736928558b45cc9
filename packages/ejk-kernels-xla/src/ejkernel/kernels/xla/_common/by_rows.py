"""Batch-invariant calls: a loop over batch rows, whose body has the shapes of one row.

What XLA makes of a matmul or a sum follows from all of its shapes, the batch included. A row that
is computed alone, by a program that no other row changes, has the same bits in every batch. The
batch has two rows at least, as XLA turns a loop of one pass into no loop and fuses its body with
what surrounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.batch_invariance import batch_invariant

MIN_CACHE = 1024  # tokens of a cache: steps are no longer than it, so none is shorter than a step


def run_by_rows(call: Any, a: Mapping[str, Any], run: Callable[..., Any]) -> Any:
    """Returns ``run(**a)`` of canonical arguments, computed one batch row after the other."""
    a = dict(a)
    _lengthen(a)
    axes = call.array_axes(a)
    size = next(iter(a.values())).shape[0]
    leaves: dict[str, list[Any]] = {}
    rows: dict[str, list[bool]] = {}
    for name, words in axes.items():
        leaves[name] = [jnp.asarray(x) for x in jax.tree.leaves(a[name])]
        rows[name] = [
            bool(w) and w[0].lstrip("#") == "batch" and x.shape[0] == size
            for w, x in zip(words, leaves[name], strict=True)
        ]
    mapped = {n: [x for x, on in zip(leaves[n], rows[n], strict=True) if on] for n in leaves}
    shared = {
        n: [x if on else _to_float32(x) for x, on in zip(leaves[n], rows[n], strict=True)]
        for n in leaves
    }
    loops = max(size, 2)

    def extend(x: jax.Array) -> jax.Array:
        x = x[:, None]
        # a row of zeros, and not x again: gradients of both would be added, and -0 + 0 is 0
        return x if loops == size else jnp.concatenate([x, jnp.zeros_like(x)])

    def run_row(row: Mapping[str, Any]) -> Any:
        arguments = dict(a)
        for name, flags in rows.items():
            row_leaves = iter(row[name])
            values = [
                next(row_leaves) if on else _convert_for_row(x, original.dtype)
                for on, x, original in zip(flags, shared[name], leaves[name], strict=True)
            ]
            arguments[name] = jax.tree.unflatten(jax.tree.structure(a[name]), values)
        with batch_invariant(False):
            return run(**arguments)

    outputs = jax.lax.map(run_row, jax.tree.map(extend, mapped))
    return jax.tree.map(lambda x: x[:size, 0], outputs)


def _to_float32(x: jax.Array) -> jax.Array:
    """Returns an array that all rows share, in the dtype in which the loop adds its gradients."""
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


def _convert_for_row(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns a shared array as the computation of a row reads it.

    Weights of heads and channels stay float32, so that their gradients are rounded once; operands
    of matmuls and caches have their original dtype.
    """
    return x if x.ndim <= 2 else x.astype(dtype)


def lengthen(
    lens: jax.Array, tables: jax.Array, page_size: int, pages: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the lengths, within their tables, and the tables, long enough for a full step.

    ``pages``: the pages of a step, None where steps are no longer than ``MIN_CACHE``.
    """
    page_size, width = max(page_size, 1), tables.shape[1]
    missing = max(0, -(-MIN_CACHE // page_size) - width, (pages or 0) - width)
    tables = jnp.pad(tables, ((0, 0), (0, missing)), constant_values=-1)
    return jnp.clip(lens, 0, width * page_size), tables


def _lengthen(a: dict[str, Any]) -> None:
    """Makes caches long enough for full steps, whatever the width of tables; lengths stay."""
    if "block_tables" in a:
        cache = a["latent_cache"] if "latent_cache" in a else a["key_cache"]
        names = ("context_lens", "block_tables")
        a |= zip(names, lengthen(*(a[name] for name in names), cache.shape[1]), strict=True)
    elif "sequence_end" in a:
        length = a["key"].shape[1]
        a["sequence_end"] = jnp.clip(a["sequence_end"], 0, length)
        missing = ((0, 0), (0, max(0, MIN_CACHE - length)), (0, 0), (0, 0))
        a["key"], a["value"] = jnp.pad(a["key"], missing), jnp.pad(a["value"], missing)

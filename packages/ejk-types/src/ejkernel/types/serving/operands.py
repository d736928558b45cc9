"""Operands of kernels over a cache: their names, and calls mapped by ``jax.vmap`` as one call.

The stages of every backend know the arrays of a call by these names, those that are given::

    q               [b, rows, d] or, packed, [T, h, d]: the queries
    k, v            the caches [pages, page_size, ...]; k alone if they are one array
    lens            [b]: context lengths
    tables          [b, columns]: pages of each sequence
    begins          [b]: first visible keys
    starts, valid   [b + 1], [1 or 3]: rows of packed sequences, the last number of valid ones
    packed_rows     [4, T]: of every packed row its sequence (``plan.PackedRow``)
    tree            [T, words] or [b, q, words]: which new tokens a row sees (``serving.tree``)
    positions       [T] or [b, q]: of every row, as a window counts
    sink            [1, h, sinks]: sinks
    k_scale, v_scale  [1, 1 or hk]: scales of a cache in 8 bits
    keys, values    [T, hk, d]: new keys and values, to be written to the cache
    logit_scale     [1, 1 or hk]: factor of the logits after the cache is written
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.serving.problem import PagedProblem
from ejkernel.types.serving.tree import pack_marks

NAMES = (
    "q",
    "k",
    "v",
    "lens",
    "tables",
    "begins",
    "starts",
    "valid",
    "packed_rows",
    "tree",
    "positions",
    "sink",
    "k_scale",
    "v_scale",
    "keys",
    "values",
    "logit_scale",
)
POOLS = ("k", "v")
"""Operands whose leading axis are pages."""
SHARED = ("sink", "k_scale", "v_scale")
"""Operands whose leading axis is 1 or the batch."""


def in_order(operands: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given operands in the order of ``NAMES``."""
    return {name: operands[name] for name in NAMES if operands.get(name) is not None}


def broadcast_operands(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sinks ``[1, h, sinks]`` and scales ``[1, 1 or hk]``, those that a call gives."""
    operands = {
        name: arrays[name].reshape(1, *(arrays[name].shape or (1,)))
        for name in ("k_scale", "v_scale")
        if name in arrays
    }
    if "softmax_aux" in arrays:
        operands["sink"] = arrays["softmax_aux"][None]
    return operands


def tree_operands(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the mask of the new tokens, a bit each, and the positions that a call gives."""
    names = {"tree": "tree_mask", "positions": "positions"}
    operands = {ours: arrays[name] for ours, name in names.items() if name in arrays}
    if "tree" in operands:
        operands["tree"] = pack_marks(operands["tree"])
    return operands


def fold_decode(
    problem: PagedProblem, size: int, operands: Mapping[str, Any], is_batched: Mapping[str, bool]
) -> tuple[PagedProblem, dict[str, Any]]:
    """Returns the problem and the operands of ``size`` calls at once, as more sequences.

    Batched operands have the mapped axis in front. Caches of several calls become one cache, and
    the tables name its pages.
    """
    p, folded = problem, dict(operands)
    pages = p.pages
    if any(is_batched.get(name) for name in POOLS):
        for name in POOLS:
            if name in folded:
                folded[name] = _fold(size, folded[name], is_batched[name], p.pages)
        tables = folded["tables"]
        tables = tables.reshape(size if is_batched["tables"] else 1, *tables.shape[-2:])
        offsets = jnp.arange(size, dtype=jnp.int32)[:, None, None] * p.pages
        folded["tables"] = jnp.clip(tables, 0, p.pages - 1) + offsets
        is_batched, pages = {**is_batched, "tables": True}, size * p.pages
    for name, x in folded.items():
        batched = is_batched[name]
        if name in SHARED:
            if batched or x.shape[0] > 1:
                folded[name] = _fold(size, x, batched, p.batch)
        elif name not in POOLS:
            folded[name] = _fold(size, x, batched, p.batch)
    return p.folded(size, pages), folded


def _fold(size: int, x: jax.Array, is_batched: bool, count: int) -> jax.Array:
    """Returns ``x`` for ``size`` calls, whose leading axis ``count`` or 1 becomes all of theirs."""
    x = x if is_batched else jnp.broadcast_to(x[None], (size, *x.shape))
    if x.shape[1] != count:
        x = jnp.broadcast_to(x, (size, count, *x.shape[2:]))
    return x.reshape(size * count, *x.shape[2:])

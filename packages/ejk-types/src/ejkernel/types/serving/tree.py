"""Visibility of the new tokens of a sequence, where they are nodes of a tree.

A model that verifies a draft sees several continuations at once: row m of a sequence sees the
tokens before the new ones, itself, and those new tokens that its line of ``tree_mask`` marks, its
ancestors. A window is measured by positions: siblings have one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class NewRows(NamedTuple):
    """Places of rows among the new tokens of their sequences.

    Attributes:
        first: the row of the first new token of its sequence.
        before: tokens of the sequence before its new ones.
        number: its number among the new ones.
    """

    first: jax.Array
    before: jax.Array
    number: jax.Array


def new_rows(starts: Any, lens: Any, sequence: jax.Array, capacity: int) -> NewRows:
    """Returns ``NewRows`` of packed rows that belong to ``sequence``."""
    count = sequence.shape[0]
    starts = jnp.clip(starts.astype(jnp.int32), 0, count)
    first = starts[:-1][sequence]
    length = jnp.clip(lens.astype(jnp.int32), 0, capacity)[sequence]
    number = jnp.arange(count, dtype=jnp.int32) - first
    return NewRows(first, length - (starts[1:][sequence] - first), number)


def prepare_tree(
    tree_mask: jax.Array | None,
    positions: jax.Array | None,
    window: tuple[int, int] | None,
    rows: NewRows,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the mask with the window among the new tokens, and positions if it needs them.

    tree_mask ``[T, columns]``, None: all rows up to the own one; positions ``[T]``, None: of the
    order in the sequence. A position is at least that of the first new token. Kernels apply the
    window to the tokens before the new ones alone.
    """
    if window is None:
        positions = None
    if tree_mask is None:
        if positions is None:
            return None, None
        columns = jnp.arange(positions.shape[0], dtype=jnp.int32)
        tree_mask = columns[None] <= rows.number[:, None]
    if not tree_mask.shape[1]:
        tree_mask = jnp.zeros((tree_mask.shape[0], 1), bool)
    if window is None:
        return tree_mask, None
    at = rows.before + rows.number
    if positions is not None:
        at = positions = jnp.maximum(positions.astype(jnp.int32), rows.before)
    columns = jnp.arange(tree_mask.shape[1], dtype=jnp.int32)
    keys = jnp.take(at, rows.first[:, None] + columns[None], mode="clip")
    left, right = (min(side, 2**30) for side in window)
    distance = at[:, None] - keys
    return tree_mask & (distance <= left) & (distance >= -right), positions


def pack_marks(mask: jax.Array) -> jax.Array:
    """Returns marks ``[..., columns]`` as bits of int32 ``[..., words]``, the first one lowest."""
    columns = mask.shape[-1]
    widths = [(0, 0)] * (mask.ndim - 1) + [(0, -columns % 32)]
    marks = jnp.pad(mask, widths).reshape(*mask.shape[:-1], -1, 32).astype(jnp.uint32)
    places = jax.lax.broadcasted_iota(jnp.uint32, marks.shape, marks.ndim - 1)
    bits = jnp.left_shift(marks, places)
    return jax.lax.bitcast_convert_type(jnp.sum(bits, axis=-1, dtype=jnp.uint32), jnp.int32)

"""Tree masks: which tokens of a block of keys the new rows of a sequence see.

A row sees the tokens before the new ones, itself, and the new tokens that its marks name
(``ejkernel.types.serving.tree``). Marks lie in lanes, eight a lane. Where a block of keys begins
among the new tokens is known on the device alone, so that lanes would have to be moved by any
distance: a matmul with zeros and ones brings the eight marks to each token instead, exactly, since
a byte is exact in bfloat16.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.pallas.tpu.common.chip import LANES
from ejkernel.types.serving.problem import PagedProblem

WORD_BYTES = 4


def node_lanes(p: PagedProblem) -> int:
    """Returns the lanes of a row of ``encode_nodes``."""
    return -(-(_mark_lanes(p) + 1) // LANES) * LANES


def _mark_lanes(p: PagedProblem) -> int:
    return -(-p.tree_columns // 32) * WORD_BYTES


def encode_nodes(p: PagedProblem, words: jax.Array, positions: jax.Array | None) -> jax.Array:
    """Returns int32 ``[..., lanes]`` for rows with such marks: eight marks a lane, and in the last
    lane the position of a row, where positions are given."""
    count = words.shape[-1] * WORD_BYTES
    marks = lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], count)
    widths = [(0, 0)] * (words.ndim - 1)
    lanes = node_lanes(p)
    if positions is None:
        return jnp.pad(marks.astype(jnp.int32), [*widths, (0, lanes - count)])
    marks = jnp.pad(marks.astype(jnp.int32), [*widths, (0, lanes - 1 - count)])
    return jnp.concatenate([marks, positions.astype(jnp.int32)[..., None]], axis=-1)


def sees_all(
    p: PagedProblem, nodes: jax.Array, before: Any, last: Any, start: Any, stop: Any
) -> Any:
    """Returns whether every row sees all tokens from ``start`` to ``stop``.

    ``before``: tokens before the new ones. ``last``: place of the last row in the sequence.
    """
    sees = stop <= before
    if p.window_left is not None:
        last = jnp.max(nodes[:, -1:]) if p.positioned else last
        sees &= start >= last - p.window_left
    return sees


def visible_keys(
    p: PagedProblem, nodes: jax.Array, number: Any, before: Any, count: Any, start: Any, tokens: int
) -> jax.Array:
    """Returns which of ``tokens`` keys from ``start`` on each row sees, ``[rows, tokens]``.

    ``nodes``: of ``encode_nodes``. ``number``: of the first row among the new tokens. ``before``,
    ``count``: tokens before the new ones, and new ones.
    """
    rows, lanes = nodes.shape
    first = start - before
    row = number + lax.broadcasted_iota(jnp.int32, (rows, tokens), 0)
    key = first + lax.broadcasted_iota(jnp.int32, (rows, tokens), 1)
    lane = lax.broadcasted_iota(jnp.int32, (lanes, tokens), 0)
    key_lane = (first + lax.broadcasted_iota(jnp.int32, (lanes, tokens), 1)) >> 3
    is_source = (lane == key_lane) & (key_lane < _mark_lanes(p))
    source = jnp.where(is_source, 1.0, 0.0).astype(jnp.bfloat16)
    marks = jnp.dot(
        nodes.astype(jnp.float32).astype(jnp.bfloat16), source, preferred_element_type=jnp.float32
    )
    is_marked = ((marks.astype(jnp.int32) >> (key & 7)) & 1) > 0
    is_before = key < 0
    if p.window_left is not None:
        at = nodes[:, lanes - 1 :] - before if p.positioned else row
        is_before &= key >= at - p.window_left
    seen = is_before | ((key >= 0) & (is_marked | (key == row)))
    return seen & (key < count) & (row + before >= 0)

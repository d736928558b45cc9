"""AttentionPlan: which sequence each packed row belongs to, found once for all layers of a step.

Every layer of a model calls ragged attention with the same starts and lengths. What follows from
them alone is here: starts that never decrease, lengths of the sequences that count, and of every
row its sequence. A kernel that reads ``rows`` compares no row with any sequence.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
from jax import export, lax


class PackedRow(NamedTuple):
    """Rows of ``AttentionPlan.rows``; a column is a packed row.

    Attributes:
        sequence: its sequence.
        first: first row of that sequence.
        end: the row past the sequence's last; 0 for a row of no sequence.
        length: context length of the sequence.
    """

    sequence: Any
    first: Any
    end: Any
    length: Any


@jtu.register_pytree_with_keys_class
class AttentionPlan:
    """The sequences of packed rows: a pytree, made by ``plan_ragged_attention``.

    Attributes:
        lens: int32 ``[n]``, context lengths; 0 of sequences that do not count.
        starts: int32 ``[n + 1]``, first rows, which never decrease. Sequences that do not count
            have no rows.
        rows: int32 ``[4, T]``, see ``PackedRow``.
        max_query_len: rows that a sequence has at most, as the caller promises; None: any number.
    """

    __slots__ = ("lens", "max_query_len", "rows", "starts")

    AXES = (("sequences",), ("sequences_plus_1",), ("_", "tokens"))
    """Words of the axes of ``lens``, ``starts`` and ``rows``."""

    def __init__(self, lens: Any, starts: Any, rows: Any, max_query_len: int | None = None) -> None:
        self.lens, self.starts, self.rows = lens, starts, rows
        self.max_query_len = max_query_len

    def __repr__(self) -> str:
        names = ("lens", "starts", "rows", "max_query_len")
        return f"AttentionPlan({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def form(self) -> Hashable:
        """Everything but the values of its arrays."""
        return ("plan", self.rows.shape, self.lens.shape, self.max_query_len)

    def tree_flatten_with_keys(self) -> tuple[tuple, tuple]:
        names = ("lens", "starts", "rows")
        children = ((jtu.GetAttrKey(name), getattr(self, name)) for name in names)
        return tuple(children), (self.max_query_len,)

    @classmethod
    def tree_unflatten(cls, static: tuple, children: Any) -> AttentionPlan:
        return cls(*children, *static)


export.register_pytree_node_serialization(
    AttentionPlan,
    serialized_name="ejkernel.types.AttentionPlan",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)


def make_plan(
    lens: Any, starts: Any, count: Any, tokens: int, max_query_len: int | None = None
) -> AttentionPlan:
    """Returns the plan of ``lens [n]``, ``starts [n + 1]`` and ``count`` valid sequences.

    Starts are clipped to the rows there are and to no less than the starts before them, as in
    ``schedule``.
    """
    n, count = lens.shape[0], jnp.clip(jnp.asarray(count, jnp.int32), 0, lens.shape[0])
    starts = lax.cummax(jnp.clip(jnp.asarray(starts, jnp.int32), 0, tokens))
    last = jnp.where(count > 0, starts[count], 0)
    starts = jnp.where(jnp.arange(n + 1) <= count, starts, last)
    valid = jnp.arange(n) < count
    lens = jnp.where(valid, jnp.maximum(jnp.asarray(lens, jnp.int32), 0), 0)
    if n == 0:
        return AttentionPlan(lens, starts, jnp.zeros((4, tokens), jnp.int32), max_query_len)
    row = jnp.arange(tokens, dtype=jnp.int32)
    ended = (starts[None, 1:] <= row[:, None]).astype(jnp.int32)
    sequence = jnp.minimum(jnp.sum(ended, axis=1, dtype=jnp.int32), n - 1)
    first, end = starts[sequence], starts[sequence + 1]
    inside = (row >= first) & (row < end)
    columns = PackedRow(sequence, first, end, lens[sequence])
    rows = jnp.stack([jnp.where(inside, x, 0) for x in columns])
    return AttentionPlan(lens, starts, rows, max_query_len)

"""The delta rule inside a chunk: the triangular inverse, and what both forms of gates share.

With k of unit length where keys are normalized, d(t, s) the decay from row s to row t and D_t that
from the chunk start to row t, each one number or one for each key channel c,

    gram    = [s before t: sum of k_tc k_sc d_c(t, s)]
    scores  = [s up to t: scale * sum of q_tc k_sc d_c(t, s)]
    inverse = (I + beta gram)^-1
    u       = inverse (beta (v - (D k) S))        the updates, S the state before the chunk

The inverse of a block of 2 m rows has the inverses x of its halves on the diagonal, and -x n x
below. Seven doublings make that of 128 rows, each two matmuls of whole matrices in float32, or of
16 bits of them. Powers of the system are never formed: where keys repeat they overflow. The chunks
of a block are inverted side by side, because each matmul waits for the one before it.

Lengths of queries and keys are factors of accumulators: a bfloat16 key keeps its exact length
where no channel has a decay of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.pallas.tpu.gated_delta_rule.problem import Problem
from ejkernel.kernels.pallas.tpu.linear_attention.chunk import Order, dot, split_bfloat16
from ejkernel.kernels.pallas.tpu.linear_attention.problem import CHUNK

NORM_EPSILON = 1e-6


def rows_and_columns(size: int = CHUNK) -> tuple[jax.Array, jax.Array]:
    """Returns the indices of the rows and of the columns of a square matrix."""
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return row, column


def as_row(x: jax.Array) -> jax.Array:
    """Returns a column ``[n, 1]`` as ``[1, n]``."""
    row, column = rows_and_columns(x.shape[0])
    return jnp.sum(jnp.where(row == column, x, 0.0), axis=0, keepdims=True)


def as_column(x: jax.Array) -> jax.Array:
    """Returns a row ``[1, n]`` as ``[n, 1]``."""
    row, column = rows_and_columns(x.shape[1])
    return jnp.sum(jnp.where(row == column, x, 0.0), axis=1, keepdims=True)


def row_dots(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the dots ``[CHUNK, 1]`` of rows of x and of y, float32."""
    return jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32), axis=1, keepdims=True)


def is_pair(level: int, reverse: bool) -> jax.Array:
    """Returns which pairs have the row in the later and the column in the earlier half of a block.

    A bool ``[CHUNK, CHUNK]``. Halves have ``2 ** level`` rows. Every pair of a row and an earlier
    one belongs to exactly one level.
    """
    row, column = (x >> level for x in rows_and_columns())
    later, earlier = (column, row) if reverse else (row, column)
    return (earlier % 2 == 0) & (later == earlier + 1)


LEVELS = range(CHUNK.bit_length() - 1)  # of ``is_pair``


def invert(p: Problem, systems: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the inverses ``[CHUNK, CHUNK]`` of ``I + system``.

    Only pairs of a row and an earlier one are read.

    A matmul waits for the one before it. Matmuls of other chunks run meanwhile, since they are next
    to it in the code.
    """
    row, column = rows_and_columns()
    inverses = [jnp.where(row == column, 1.0, 0.0)] * len(systems)
    for level in LEVELS:
        pairs = is_pair(level, p.reverse)
        below = [jnp.where(pairs, system, 0.0) for system in systems]
        if level:
            below = [_dot_float32(p, x, y) for x, y in zip(inverses, below, strict=True)]
            below = [_dot_float32(p, y, x) for x, y in zip(inverses, below, strict=True)]
        inverses = [x - y for x, y in zip(inverses, below, strict=True)]
    return inverses


def _dot_float32(p: Problem, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the matmul of float32 matrices; of a bfloat16 call to 16 bits, three passes for six.

    There the inverse is rounded to 8 bits before it is used: the matmuls of the smaller parts
    change it by less than a tenth of that, with keys that are all the same too.
    """

    def dot_of(a: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
        return jnp.dot(a, b, preferred_element_type=jnp.float32, **options)

    if p.dtype != "bfloat16":
        return dot_of(a, b, precision=lax.Precision.HIGHEST)
    (a, a_tail), (b, b_tail) = split_bfloat16(a, 2), split_bfloat16(b, 2)
    return dot_of(a, b) + (dot_of(a, b_tail) + dot_of(a_tail, b))


def reciprocal_length(p: Problem, x: jax.Array) -> Any:
    """Returns 1 / sqrt(sum of squares + epsilon) of every row ``[CHUNK, 1]``, or 1."""
    if not p.normalize:
        return 1.0
    x = x.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + NORM_EPSILON)


@dataclass(frozen=True)
class ChunkRows:
    """Queries and keys of a chunk.

    Attributes:
        q, k: as the call gives them.
        q_factor, k_factor: their reciprocal lengths ``[CHUNK, 1]``, or 1.
    """

    q: jax.Array
    k: jax.Array
    q_factor: Any
    k_factor: Any

    @property
    def unit_q(self) -> jax.Array:
        """Returns queries of unit length in float32."""
        return self.q.astype(jnp.float32) * self.q_factor

    @property
    def unit_k(self) -> jax.Array:
        """Returns keys of unit length in float32."""
        return self.k.astype(jnp.float32) * self.k_factor

    def normalize_dots(
        self, p: Problem, qk: jax.Array, kk: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the dots ``[t, s]`` of unit rows from the dots of the rows."""
        if not p.normalize:
            return qk, kk
        column_factor = as_row(self.k_factor)
        return qk * self.q_factor * column_factor, kk * self.k_factor * column_factor


def chunk_rows(p: Problem, q: jax.Array, k: jax.Array) -> ChunkRows:
    """Returns queries and keys with their lengths."""
    return ChunkRows(q, k, reciprocal_length(p, q), reciprocal_length(p, k))


@dataclass(frozen=True)
class PairGradients:
    """Gradients of a chunk that depend on the form of its gates.

    Attributes:
        dq, dk: of unit queries and keys ``[CHUNK, dk]``.
        dgate: of log decays, ``[1, CHUNK]`` of heads or ``[CHUNK, dk]`` of channels, or None.
    """

    dq: jax.Array
    dk: jax.Array
    dgate: Any


@dataclass(frozen=True)
class Gates(ABC):
    """Everything in a chunk that decays; the module's docstring has the names.

    Attributes:
        p, order: of the call. rows: queries and keys.
        scores, gram: matrices ``[t, s]`` of the chunk.
    """

    p: Problem
    order: Order
    rows: ChunkRows
    scores: jax.Array
    gram: jax.Array

    @abstractmethod
    def read_queries(self, state: jax.Array) -> jax.Array:
        """Returns scale (D q) S ``[CHUNK, dv]``."""

    @abstractmethod
    def read_keys(self, state: jax.Array) -> jax.Array:
        """Returns (D k) S ``[CHUNK, dv]``."""

    @abstractmethod
    def next_state(self, update: jax.Array, state: jax.Array) -> jax.Array:
        """Returns the state after the chunk."""

    @abstractmethod
    def update_gradient(self, dstate: jax.Array) -> jax.Array:
        """Returns the gradient of the updates through the state after the chunk."""

    @abstractmethod
    def state_gradient(self, do: jax.Array, dv: jax.Array, dstate: jax.Array) -> jax.Array:
        """Returns the gradient of the state before the chunk, from that of the state after."""

    @abstractmethod
    def gradients(
        self,
        do: jax.Array,
        dv: jax.Array,
        update: jax.Array,
        state: jax.Array,
        dstate: jax.Array,
    ) -> PairGradients:
        """Returns the gradients of queries, keys and log decays.

        ``do``, ``dv``, ``update`` ``[CHUNK, dv]``: dv is the gradient of the values. ``state``,
        ``dstate`` ``[dk, dv]``: the state before the chunk, the gradient of that after it.
        """


@dataclass(frozen=True)
class System:
    """The triangular system of a chunk.

    Attributes:
        inverse: its inverse. beta: ``[CHUNK, 1]``.
    """

    inverse: jax.Array
    beta: jax.Array


def systems_of(p: Problem, gates: Sequence[Gates], betas: Sequence[jax.Array]) -> list[System]:
    """Returns the systems of chunks; ``betas`` are ``[1, CHUNK]``."""
    columns = [as_column(beta) for beta in betas]
    pairs = zip(gates, columns, strict=True)
    inverses = invert(p, [beta * chunk.gram for chunk, beta in pairs])
    return [System(*x) for x in zip(inverses, columns, strict=True)]


def updates_of(
    p: Problem, gates: Gates, system: System, v: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the updates u and the errors v - (D k) S, ``[CHUNK, dv]`` each."""
    error = v.astype(jnp.float32) - gates.read_keys(state)
    return dot(p, system.inverse, system.beta * error), error


def pull_back_normalization(
    p: Problem, rows: ChunkRows, dq: jax.Array, dk: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of queries and keys from the gradients of unit rows.

    The length of a row has no influence: a gradient has no component along its row.
    """
    if not p.normalize:
        return dq, dk
    unit_q, unit_k = rows.unit_q, rows.unit_k
    dq = (dq - unit_q * row_dots(dq, unit_q)) * rows.q_factor
    return dq, (dk - unit_k * row_dots(dk, unit_k)) * rows.k_factor

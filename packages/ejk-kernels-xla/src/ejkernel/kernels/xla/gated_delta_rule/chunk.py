"""The gated delta rule inside one chunk (the WY form of arXiv 2406.06484).

With D_t the decay from the chunk start through row t and S the state before the chunk,

    u_t = beta_t (v_t - (D_t k_t) S - sum_{s<t} (k_t D_t/D_s k_s) u_s)
    o_t = (D_t q_t) S + sum_{s<=t} (q_t D_t/D_s k_s) u_s
    end = D_c S + sum_s (D_c/D_s k_s)^T u_s

The first line is a unit lower triangular system in u. Its solution depends linearly on S, so end
and o are ``end = transition S + addition`` and ``o = read S + local``. These maps are computed for
all chunks in parallel.

Decays between rows come from ``linear_attention.chunk``: no exponent is a difference of cumulative
decays, so log decays from 0 to -inf are exact. Where ``beta |k|^2`` is between 0 and 2 no
transition enlarges a state. Beyond, states grow from token to token, as in the recurrence.

Shapes: rows ``[..., c, d]`` with c a power of two.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla.gated_delta_rule.solve import PRECISION, matmul, solve
from ejkernel.kernels.xla.linear_attention.chunk import partial_sums, scores, times_exp


class Rows(NamedTuple):
    """A call in canonical form, ``[batch, seq, head, channel]`` or in chunks.

    ``beta`` has one channel. ``gate`` holds log decays, in one channel or in as many as the keys
    have, or is None.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    gate: jax.Array | None


class ChunkMaps(NamedTuple):
    """``end = transition @ start + addition`` and ``o = read @ start + local`` of every chunk."""

    transition: jax.Array
    addition: jax.Array
    read: jax.Array
    local: jax.Array


class _Terms(NamedTuple):
    """Matrices of a chunk that do not depend on its values.

    ``system`` [c, c] is strictly lower, ``seen`` [c, c] lower triangular; ``q_since`` and
    ``k_since`` are decayed from the chunk start, ``k_until`` to its end. ``total`` [1 or dk, 1] is
    the log decay of the chunk, None without a gate.
    """

    system: jax.Array
    seen: jax.Array
    q_since: jax.Array
    k_since: jax.Array
    k_until: jax.Array
    total: jax.Array | None


def _terms(rows: Rows) -> _Terms:
    q, k, gate = rows.q, rows.k, rows.gate
    sums = None if gate is None else partial_sums(gate)
    key, scalar = (None, sums) if gate is None or gate.shape[-1] == 1 else (sums, None)
    seen, gram = (scores(x, k, key, scalar, PRECISION) for x in (q, k))
    since = until = total = None
    if sums is not None:
        since, until, total = sums.since, sums.until, jnp.swapaxes(sums.total, -1, -2)
    return _Terms(
        system=jnp.tril(rows.beta * gram, -1),
        seen=seen,
        q_since=times_exp(q, since),
        k_since=times_exp(k, since),
        k_until=times_exp(k, until),
        total=total,
    )


def _respond(t: _Terms, beta: jax.Array, errors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what ``errors`` [c, n] add to the end of the chunk [dk, n] and to its outputs [c, n].

    Errors are the values minus what the state before the chunk returns for their keys.
    """
    update = solve(t.system, beta * errors)
    return matmul(jnp.swapaxes(t.k_until, -1, -2), update), matmul(t.seen, update)


def _start_maps(t: _Terms, end: jax.Array, o: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns ``transition`` and ``read`` from the response to ``k_since``."""
    identity = jnp.broadcast_to(jnp.eye(end.shape[-1], dtype=end.dtype), end.shape)
    return times_exp(identity, t.total) - end, t.q_since - o


def start_maps(rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Returns ``transition`` and ``read`` of ``chunk_maps`` alone."""
    t = _terms(rows)
    return _start_maps(t, *_respond(t, rows.beta, t.k_since))


def chunk_maps(rows: Rows) -> ChunkMaps:
    """Returns how the end and the outputs of every chunk depend on the state before it."""
    t, dk = _terms(rows), rows.k.shape[-1]
    # one system with more columns is faster than two
    end, o = _respond(t, rows.beta, jnp.concatenate([t.k_since, rows.v], axis=-1))
    transition, read = _start_maps(t, end[..., :dk], o[..., :dk])
    return ChunkMaps(transition, end[..., dk:], read, o[..., dk:])


def apply_chunk(rows: Rows, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs ``[..., c, dv]`` and the state ``[..., dk, dv]`` after the chunk."""
    t = _terms(rows)
    end, o = _respond(t, rows.beta, rows.v - matmul(t.k_since, start))
    return matmul(t.q_since, start) + o, times_exp(start, t.total) + end

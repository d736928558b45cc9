"""Linear attention inside one chunk, by halving.

Row t sees row s < t through the sum of the log decays of rows s+1..t. A block of 2m rows is cut
in the middle: a row of the second half reaches back to the cut through its own prefix sum, a row
of the first half reaches up to the cut through its own suffix sum, and the two meet as a matmul
of exp(prefix) q with exp(suffix) k. log2(chunk) halvings cover every pair once.

No exponent is ever the difference of two cumulative sums, so nothing overflows unless the gates do,
decays of -20 or -inf per step lose no digits, and the gradients need no cancellation either. This
is the secondary tiling of gated linear attention (arXiv 2312.06635, section 4.3) carried down to
single rows.

Shapes: rows ``[..., c, d]`` with c a power of two, the last two axes of every array.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.ops.varying import zeros


class Rows(NamedTuple):
    """One call in canonical form, cut into chunks: ``[chunk, batch, head, row, channel]``.

    ``key``, ``value`` and ``scalar`` are log decays (``scalar`` has one channel) or None;
    ``key`` and ``scalar`` exclude each other.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    key: jax.Array | None
    value: jax.Array | None
    scalar: jax.Array | None


class Decay(NamedTuple):
    """Partial sums of the log decays of a chunk.

    ``halves[i]`` belongs to blocks of 2m = 2**(i+1) rows: the suffix sums of the first halves and
    the prefix sums of the second halves, each ``[..., c/2m, m, d]``.
    ``since`` [..., c, d] sums from the chunk start through each row, ``until`` from after each row
    to the chunk end, ``total`` [..., 1, d] all rows.
    """

    halves: tuple[tuple[jax.Array, jax.Array], ...]
    since: jax.Array
    until: jax.Array
    total: jax.Array


def partial_sums(gate: jax.Array) -> Decay:
    since = gate[..., None, :]
    until = jnp.zeros_like(since)
    halves = []
    while since.shape[-3] > 1:
        since0, since1 = since[..., 0::2, :, :], since[..., 1::2, :, :]
        until0, until1 = until[..., 0::2, :, :], until[..., 1::2, :, :]
        halves.append((until0, since1))
        since = jnp.concatenate([since0, since1 + since0[..., -1:, :]], axis=-2)
        until = jnp.concatenate([until0 + since1[..., -1:, :], until1], axis=-2)
    since, until = since[..., 0, :, :], until[..., 0, :, :]
    return Decay(tuple(halves), since, until, since[..., -1:, :])


def _halves(x: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """First and second halves of the blocks of 2m rows: ``[..., c/2m, m, d]`` each."""
    blocks = x.reshape(*x.shape[:-2], -1, 2, m, x.shape[-1])
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def join_blocks(diagonal: jax.Array, lower: jax.Array, upper) -> jax.Array:
    """Blocks of m rows to blocks of 2m: ``diagonal`` [..., 2n, m, m], ``lower`` [..., n, m, m]."""
    above = jnp.full_like(lower, upper)
    top = jnp.concatenate([diagonal[..., 0::2, :, :], above], axis=-1)
    bottom = jnp.concatenate([lower, diagonal[..., 1::2, :, :]], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)


def lower_quarters(x: jax.Array, m: int) -> jax.Array:
    """Lower left quarters of the diagonal blocks of 2m rows: ``[..., c/2m, m, m]``."""
    count = x.shape[-1] // (2 * m)
    blocks = x.reshape(*x.shape[:-2], count, 2 * m, count, 2 * m)
    return jnp.einsum("...iaib->...iab", blocks)[..., m:, :m]


def _dot_rows(x: jax.Array, y: jax.Array, precision: jax.lax.PrecisionLike) -> jax.Array:
    """``x @ y^T`` over the last two axes."""
    return jnp.einsum("...td,...sd->...ts", x, y, precision=precision)


def scores(
    q: jax.Array,
    k: jax.Array,
    key: Decay | None,
    scalar: Decay | None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """Decayed dot products ``[..., c, c]``, zero above the diagonal."""
    if key is None:
        c = q.shape[-2]
        products = _dot_rows(q, k, precision)
        if scalar is None:
            return jnp.where(jnp.tri(c, dtype=bool), products, 0)
        return products * jnp.exp(_pairwise(scalar))
    grid = jnp.sum(q * k, axis=-1)[..., None, None]
    for until, since in key.halves:
        m = until.shape[-2]
        q_since, k_until = _halves(q, m)[1] * jnp.exp(since), _halves(k, m)[0] * jnp.exp(until)
        below = _dot_rows(q_since, k_until, precision)
        grid = join_blocks(grid, below, 0)
    return grid[..., 0, :, :]


def _pairwise(scalar: Decay) -> jax.Array:
    """Log decay between every two rows ``[..., c, c]``; -inf above the diagonal."""
    grid = jnp.zeros_like(scalar.since)[..., None]
    for until, since in scalar.halves:
        grid = join_blocks(grid, since + jnp.swapaxes(until, -1, -2), -jnp.inf)
    return grid[..., 0, :, :]


def combine(weights: jax.Array, v: jax.Array, value: Decay | None) -> jax.Array:
    """``weights @ v`` with the value decay between the rows applied: ``[..., c, dv]``."""
    if value is None:
        return weights @ v
    o = jnp.diagonal(weights, axis1=-2, axis2=-1)[..., None, None] * v[..., None, :]
    for until, since in value.halves:
        m = until.shape[-2]
        below = lower_quarters(weights, m)
        crossed = jnp.exp(since) * (below @ (_halves(v, m)[0] * jnp.exp(until)))
        o = jnp.concatenate([o[..., 0::2, :, :], o[..., 1::2, :, :] + crossed], axis=-2)
    return o[..., 0, :, :]


def _sums(rows: Rows) -> tuple[Decay | None, Decay | None, Decay | None]:
    key, value, scalar = (
        None if g is None else partial_sums(g) for g in (rows.key, rows.value, rows.scalar)
    )
    return key, value, scalar


def times_exp(x: jax.Array, *exponents: jax.Array | None) -> jax.Array:
    for e in exponents:
        if e is not None:
            x = x * jnp.exp(e)
    return x


def outputs(rows: Rows, start: jax.Array) -> jax.Array:
    """Outputs ``[..., c, dv]`` of every row, given the state ``[..., dk, dv]`` before the chunk."""
    key, value, scalar = _sums(rows)
    o = combine(scores(rows.q, rows.k, key, scalar), rows.v, value)
    q = times_exp(rows.q, key and key.since, scalar and scalar.since)
    return o + times_exp(q @ start, value and value.since)


def additions(rows: Rows) -> jax.Array:
    """Returns the term that every chunk adds to the state: ``[..., dk, dv]``."""
    key, value, scalar = _sums(rows)
    k = times_exp(rows.k, key and key.until, scalar and scalar.until)
    v = times_exp(rows.v, value and value.until)
    return jnp.einsum("...td,...te->...de", k, v)


def decays(rows: Rows) -> jax.Array:
    """The factor every chunk puts on the state; axes it does not depend on have size 1."""
    totals = [
        jnp.sum(gate, axis=-2, keepdims=True) if gate is not None else None
        for gate in (rows.key, rows.value, rows.scalar)
    ]
    key, value, scalar = totals
    decay = 1 + zeros((*rows.q.shape[:-4], 1, 1, 1, 1), rows.q.dtype, rows.q)
    return times_exp(decay, None if key is None else jnp.swapaxes(key, -1, -2), scalar, value)

"""The scan over chunk states, and its gradient.

    start_c = table[sequence_c] if chunk c opens a sequence, else end_{c-1}
    end_c   = decay_c * start_c + added_c                                   [dk, dv] per head

Everything inside the chunks runs for all of them at once; only the line above is sequential. The
forward pass keeps its inputs and the chunk ends, ``s + (s / c) dk dv`` values per head; the
backward pass runs the line above in reverse and recomputes the rest.

Bound per head at s rows, chunk c, dk = dv = d: matmuls 2 s d (c + 2 d) flops forward; on a CPU
the chunk of 64 balances them against the s log2(c) d exponentials.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla.linear_attention.chunk import Rows, additions, decays, outputs
from ejkernel.types.arrays import is_symbolic, size_of
from ejkernel.types.attention.softmax import name_lse

# elements of a row array treated together: 1 MiB of float32
GROUP_SIZE = 2**18


class Links(NamedTuple):
    """``sequence`` of every chunk and whether it ``opens`` one: int32 and bool ``[chunks]``."""

    sequence: jax.Array
    opens: jax.Array


def chunk_starts(table: jax.Array, links: Links, ends: jax.Array) -> jax.Array:
    """States before every chunk, from the states after them."""
    previous = jnp.concatenate([ends[:1], ends[:-1]])
    opens = links.opens[:, None, None, None, None]
    return jnp.where(opens, table[links.sequence], previous)


def by_groups(f: Callable, rows: Any, *others: jax.Array) -> Any:
    """``f(rows, *others)`` for a few chunks at a time; ``rows`` has arrays ``q`` and ``v``.

    The halvings make log2(c) copies of the rows: groups keep them in the cache, and out of the
    memory that grows with the length.
    """
    chunks = rows.q.shape[0]
    if is_symbolic(chunks):
        group = 1  # divides any number
    else:
        # a chunk of an exported program may hold any number of batch rows: assume many
        largest = max(math.prod(map(size_of, x.shape[1:])) for x in (rows.q, rows.v))
        fit = max(GROUP_SIZE // max(largest, 1), 1)
        group = max(n for n in range(1, min(fit, chunks) + 1) if chunks % n == 0)
    if group == chunks:
        return f(rows, *others)
    split = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), (rows, *others))
    out = jax.lax.map(lambda part: f(*part), split)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)


@jax.custom_vjp
def chunked(rows: Rows, table: jax.Array, links: Links) -> tuple[jax.Array, jax.Array]:
    """Outputs ``[chunk, batch, head, row, dv]`` and the states after every chunk.

    ``table`` [m, batch, head, dk, dv] holds the initial states. The first chunk must open a
    sequence.
    """

    def link(end, chunk):
        added, decay, sequence, opens = chunk
        end = decay * jnp.where(opens, table[sequence], end) + added
        return end, end

    added = by_groups(additions, rows)
    # the first chunk opens a sequence, so the carry it receives is never read
    _, ends = jax.lax.scan(link, added[0], (added, decays(rows), *links))
    return by_groups(outputs, rows, chunk_starts(table, links, ends)), ends


def _forward(rows: Rows, table: jax.Array, links: Links):
    o, ends = chunked(rows, table, links)
    ends = name_lse(ends)  # the gradient needs them as softmax's needs the lse
    return (o, ends), (rows, table, links, ends)


def pullback(f: Callable) -> Callable:
    """``(*inputs, cotangent) -> gradients of the inputs`` of ``f``."""
    return lambda *inputs: jax.vjp(f, *inputs[:-1])[1](inputs[-1])


def _backward(saved, cotangents):
    rows, table, links, ends = saved
    do, dends = cotangents
    starts = chunk_starts(table, links, ends)
    drows, dstarts = by_groups(pullback(outputs), rows, starts, do)
    decay, pull_decays = jax.vjp(decays, rows)

    def unlink(later, chunk):
        dend, dstart, decay, opens = chunk
        dend = dend + later
        dstart = dstart + decay * dend
        return jnp.where(opens, 0, dstart), (dend, dstart)

    _, (dends, dstarts) = jax.lax.scan(
        unlink, jnp.zeros_like(dends[0]), (dends, dstarts, decay, links.opens), reverse=True
    )
    (through_added,) = by_groups(pullback(additions), rows, dends)
    (through_decay,) = pull_decays(_unbroadcast(dends * starts, decay))
    drows = jax.tree.map(lambda *parts: sum(parts), drows, through_added, through_decay)
    opened = jnp.where(links.opens[:, None, None, None, None], dstarts, 0)
    dtable = jax.ops.segment_sum(opened, links.sequence, table.shape[0])
    return drows, dtable, None


def _unbroadcast(x: jax.Array, like: jax.Array) -> jax.Array:
    """Sum of ``x`` over the axes along which ``like`` (same rank) has size 1."""
    axes = tuple(i for i in range(x.ndim) if like.shape[i] == 1 and x.shape[i] != 1)
    return jnp.sum(x, axis=axes, keepdims=True)


chunked.defvjp(_forward, _backward)

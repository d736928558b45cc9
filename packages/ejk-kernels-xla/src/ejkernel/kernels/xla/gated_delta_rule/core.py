"""The scan over chunk states of the gated delta rule, and its gradient.

    start_c = table[sequence_c] if chunk c opens a sequence, else end_{c-1}
    end_c   = transition_c @ start_c + addition_c                           [dk, dv] per head

Only the second line is sequential. The forward pass saves its inputs and the chunk ends,
``s + (s / c) dk dv`` values per head. The backward pass runs the scan in reverse and recomputes the
rest.

Bound per head at s rows, chunk c, dk = dv = d: matmuls of about s d (10 c + 8 d) flops forward.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla.gated_delta_rule.chunk import (
    ChunkMaps,
    Rows,
    apply_chunk,
    chunk_maps,
    start_maps,
)
from ejkernel.kernels.xla.gated_delta_rule.solve import matmul
from ejkernel.kernels.xla.linear_attention.core import Links, by_groups, chunk_starts, pullback
from ejkernel.types.attention.softmax import name_lse


@jax.custom_vjp
def chunked(rows: Rows, table: jax.Array, links: Links) -> tuple[jax.Array, jax.Array]:
    """Returns outputs ``[chunk, batch, head, row, dv]`` and the states after every chunk.

    ``table`` [m, batch, head, dk, dv] holds the initial states. The first chunk must open a
    sequence.
    """

    def link(end, chunk):
        transition, addition, sequence, opens = chunk
        end = matmul(transition, jnp.where(opens, table[sequence], end)) + addition
        return end, end

    maps: ChunkMaps = by_groups(chunk_maps, rows)
    # the first chunk opens a sequence, so the carry it receives is never read
    _, ends = jax.lax.scan(link, maps.addition[0], (maps.transition, maps.addition, *links))
    return matmul(maps.read, chunk_starts(table, links, ends)) + maps.local, ends


def _forward(rows: Rows, table: jax.Array, links: Links):
    o, ends = chunked(rows, table, links)
    ends = name_lse(ends)  # the gradient needs them as softmax's needs the lse
    return (o, ends), (rows, table, links, ends)


def _transposed_start_maps(rows: Rows) -> tuple[jax.Array, jax.Array]:
    transition, read = start_maps(rows)
    return jnp.swapaxes(transition, -1, -2), jnp.swapaxes(read, -1, -2)


def _row_gradients(rows: Rows, start: jax.Array, do: jax.Array, dend: jax.Array) -> Rows:
    """Returns the gradients of the rows of every chunk."""
    return pullback(apply_chunk)(rows, start, (do, dend))[0]


def _backward(saved, cotangents):
    rows, table, links, ends = saved
    do, dends = cotangents
    transition, read = by_groups(_transposed_start_maps, rows)

    def unlink(later, chunk):
        dend, dstart, transition, opens = chunk
        dend = dend + later
        dstart = dstart + matmul(transition, dend)
        return jnp.where(opens, 0, dstart), (dend, dstart)

    _, (dends, dstarts) = jax.lax.scan(
        unlink,
        jnp.zeros_like(dends[0]),
        (dends, matmul(read, do), transition, links.opens),
        reverse=True,
    )
    drows = by_groups(_row_gradients, rows, chunk_starts(table, links, ends), do, dends)
    opened = jnp.where(links.opens[:, None, None, None, None], dstarts, 0)
    dtable = jax.ops.segment_sum(opened, links.sequence, table.shape[0])
    return drows, dtable, None


chunked.defvjp(_forward, _backward)

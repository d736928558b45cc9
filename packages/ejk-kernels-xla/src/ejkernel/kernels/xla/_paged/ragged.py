"""Packed queries of several sequences, cut into tiles of one sequence each."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from ejkernel.kernels.xla._paged.core import Tiles

# query rows of a group of tiles: enough for a dot to be worth its launch
GROUP_ROWS = 256


@dataclass(frozen=True)
class Shape:
    """``tokens`` packed rows of ``sequences``; ``rows`` a tile, ``group`` tiles walked together."""

    tokens: int
    sequences: int
    rows: int
    group: int

    @property
    def tiles(self) -> int:
        """Never fewer than the tiles needed: each sequence wastes at most one."""
        if self.rows == 1:
            return self.tokens
        return self.tokens // self.rows + min(self.sequences, self.tokens)


def choose_shape(tokens: int, sequences: int, rows: int | None = None) -> Shape:
    """Tiles of one row when only decoding, else of about the mean number of new tokens."""
    if rows is None:
        mean = -(-tokens // max(sequences, 1))
        rows = min(64, 1 << max(mean - 1, 0).bit_length())
    rows = max(1, min(rows, max(tokens, 1)))
    shape = Shape(tokens, sequences, rows, 1)
    return Shape(tokens, sequences, rows, max(1, min(shape.tiles, GROUP_ROWS // rows)))


def tile_queries(shape: Shape, query_start_loc, context_lens, num_seqs, capacity: int):
    """``Tiles`` and, per tile row, its index in the packed queries (``tokens`` = none).

    Row m of sequence r stands at ``context_lens[r] - q_len[r] + m``. Sequences from ``num_seqs``
    on, rows past the last sequence and rows whose start is out of order have no tile.
    """
    t, n = shape.tokens, shape.sequences
    starts = jnp.clip(jnp.asarray(query_start_loc, jnp.int32), 0, t)
    count = jnp.asarray(num_seqs, jnp.int32).reshape(())
    valid = jnp.arange(n, dtype=jnp.int32) < count
    lens = jnp.where(valid, jnp.maximum(starts[1:] - starts[:-1], 0), 0)
    context = jnp.where(valid, jnp.clip(jnp.asarray(context_lens, jnp.int32), 0, capacity), 0)
    per = -(-lens // shape.rows)
    ends = jnp.cumsum(per)
    tile = jnp.arange(shape.tiles, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(ends, tile, side="right"), n - 1)
    offset = (tile - (ends - per)[sequence]) * shape.rows
    m = offset[:, None] + jnp.arange(shape.rows, dtype=jnp.int32)[None]
    here = (tile < ends[-1])[:, None] & (m < lens[sequence][:, None])
    position = (context - lens)[sequence][:, None] + m
    row = jnp.where(here, starts[sequence][:, None] + m, t)
    stop = context[sequence]
    return Tiles(sequence, jnp.where(here, position, -1), jnp.zeros_like(stop), stop), row

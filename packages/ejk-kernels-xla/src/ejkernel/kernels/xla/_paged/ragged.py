"""Packed queries of several sequences, cut into tiles of one sequence each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.by_rows import lengthen
from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._paged.core import NEG_INF, Tiles, Tree
from ejkernel.kernels.xla._paged.decode import attend_call, step_tokens
from ejkernel.kernels.xla._paged.kernel import Groups
from ejkernel.kernels.xla._paged.layouts import CombinedPages, Tables
from ejkernel.types.arrays import at_most, is_symbolic, size_of

# query rows of a group of tiles: enough for a dot to be worth its launch
GROUP_ROWS = 256
# of a tile of a batch-invariant call, whatever the rows of the call
SEQUENCE_ROWS = 16


@dataclass(frozen=True)
class Shape:
    """``tokens`` packed rows of ``sequences``; ``rows`` per tile, ``group`` tiles per loop, and
    ``unused`` tiles more."""

    tokens: int
    sequences: int
    rows: int
    group: int
    unused: int = 0

    @property
    def tiles(self) -> int:
        """Upper bound of the number of tiles: each sequence has at most one partial tile."""
        if self.rows == 1:
            return self.tokens + self.unused
        return self.tokens // self.rows + at_most(self.sequences, self.tokens) + self.unused


def choose_shape(tokens: int, sequences: int, rows: int | None = None) -> Shape:
    """Tiles of one row when only decoding, else of about the mean number of new tokens."""
    if rows is None:
        mean = -(-size_of(tokens) // max(sequences, 1))
        rows = min(64, 1 << max(mean - 1, 0).bit_length())
    rows = max(1, at_most(rows, tokens))
    shape = Shape(tokens, sequences, rows, 1)
    # a symbolic number of tiles is a multiple of 1 alone
    group = 1 if is_symbolic(tokens) else max(1, min(GROUP_ROWS // rows, shape.tiles))
    return Shape(tokens, sequences, rows, group)


def shape_of_sequences(tokens: int, sequences: int, rows: int | None = None) -> Shape:
    """Tiles of a fixed number of rows, one to a loop: no sequence is computed with another one."""
    # one more than needed: XLA turns a loop of one pass into no loop, and fuses its body otherwise
    return Shape(tokens, sequences, max(1, rows or SEQUENCE_ROWS), 1, unused=1)


def tile_queries(
    shape: Shape, query_start_loc, context_lens, num_seqs, capacity: int, tree_mask=None,
    positions=None,
):  # fmt: skip
    """``Tiles`` and, per tile row, its index in the packed queries (``tokens`` = none).

    Row m of sequence r stands at ``context_lens[r] - q_len[r] + m``. Sequences past
    ``num_seqs``, rows past the last sequence and rows with starts out of order have no tile.
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
    is_valid = (tile < ends[-1])[:, None] & (m < lens[sequence][:, None])
    position = (context - lens)[sequence][:, None] + m
    row = jnp.where(is_valid, starts[sequence][:, None] + m, t)
    stop = context[sequence]
    tree = None
    if tree_mask is not None:
        marked = jnp.take(tree_mask, row, axis=0, mode="fill", fill_value=False)
        at = position if positions is None else jnp.take(positions, row, mode="clip")
        tree = Tree(marked, (context - lens)[sequence], at)
    return Tiles(sequence, jnp.where(is_valid, position, -1), jnp.zeros_like(stop), stop, tree), row


@dataclass(frozen=True)
class Sequences:
    """Keys of packed queries: combined pages and the sequences that own them, and which new tokens
    rows see (``types.serving.tree``)."""

    pages: jax.Array
    lens: jax.Array
    tables: jax.Array
    starts: jax.Array
    count: jax.Array
    kv_heads: int
    tree_mask: jax.Array | None = None
    positions: jax.Array | None = None


def attend_ragged(
    problem: Any,
    groups: Groups,
    queries: jax.Array,
    sequences: Sequences,
    *,
    sinks: jax.Array | None,
    logit_scales: tuple[Any, ...],
    v_scale: jax.Array | None,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Read-only attention over either form of combined pages; ``logit_scales`` are multiplied.

    Returns the output in the queries' dtype, and lse ``[tokens, heads]``, -inf for padding.
    """
    (t, h, d), kv_heads = queries.shape, sequences.kv_heads
    if batch_invariant:
        lens, tables = lengthen(
            sequences.lens,
            sequences.tables,
            sequences.pages.shape[1],
            groups.num_kv_pages_per_block,
        )
        sequences = replace(sequences, lens=lens, tables=tables)
    pages, tables = sequences.pages, sequences.tables
    table = Tables(pages.shape[1], pages.shape[0], tables.shape[1])
    choose = shape_of_sequences if batch_invariant else choose_shape
    shape = choose(t, tables.shape[0], groups.num_queries_per_block)
    row_bytes = shape.group * 2 * kv_heads * d * queries.dtype.itemsize
    tokens = step_tokens(table, table.capacity, row_bytes, groups.num_kv_pages_per_block)
    if t == 0 or tables.shape[0] == 0:
        lse = jnp.full((t, h), NEG_INF, accumulation_dtype(queries, pages))
        return jnp.zeros(queries.shape, queries.dtype), lse
    tiles, row = tile_queries(
        shape, sequences.starts, sequences.lens, sequences.count, table.capacity,
        sequences.tree_mask, sequences.positions,
    )  # fmt: skip
    q = queries.reshape(t, kv_heads, h // max(kv_heads, 1), d)
    o, lse = attend_call(
        problem,
        CombinedPages(table, kv_heads, d),
        (pages, tables),
        jnp.take(q, row, axis=0, mode="fill", fill_value=0),
        tiles,
        tokens,
        sinks=sinks,
        scales=logit_scales,
        v_scale=v_scale,
        group=shape.group,
    )
    o, lse = o.reshape(row.size, h, d).astype(queries.dtype), lse.reshape(row.size, h)
    row = row.reshape(-1)
    o = jnp.zeros(queries.shape, queries.dtype).at[row].set(o, mode="drop")
    return o, jnp.full((t, h), NEG_INF, lse.dtype).at[row].set(lse, mode="drop")

"""Copies of ragged attention: block tables, queries, keys, outputs and new keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.ragged_page_attention.tiles import Layout

CHUNK = 16  # tokens of a copy of zeros, and tokens cleared at once


class QuerySpan(NamedTuple):
    """A block of queries of a sequence, and the keys that its rows see.

    Attributes:
        sequence: its number. row: its first packed row. tokens: its rows.
        number: index of its first row among the new rows of the sequence.
        position: position of its first row in the sequence, negative where the context is short.
        low, high: first token that any row sees, and the end of them.
        first, stop: blocks of keys; at least one, which may have no visible token.
    """

    sequence: Any
    row: Any
    tokens: Any
    number: Any
    position: Any
    low: Any
    high: Any
    first: Any
    stop: Any

    @property
    def before(self) -> Any:
        """Tokens of the sequence before its new ones."""
        return self.position - self.number


class Memories(NamedTuple):
    """Arrays in device memory, and the scalars that describe sequences.

    Attributes:
        starts, lens: first row of each sequence and the end of the last; context lengths.
        tables: ``[sequences, 1, columns]``. q, o: ``[T, heads, width]``.
        lse: ``[T, 1, lanes]``, a lane for each head, or None.
        pool: ``[pages, page_size, rows of a token, width]``; the output where the call writes it.
        new: rows of the new tokens as the cache has them, ``[T, rows of a token, width]``, or None.
        nodes: ``[T, 1, lanes]``, which new tokens a row sees (``common.trees``), or None.
    """

    starts: Any
    lens: Any
    tables: Any
    q: Any
    o: Any
    lse: Any
    pool: Any
    new: Any
    nodes: Any = None


class Buffers(NamedTuple):
    """Two buffers each of tables (scalar memory), queries, keys with values, and outputs.

    Attributes:
        lse: two buffers of log-sum-exp, or None.
        zeros: ``[CHUNK, heads, width]``. hidden: ``[CHUNK, 1, lanes]`` of -inf, or None.
        pending: tokens of the copies that have not been waited for: of each output buffer, and of
            the new keys.
        semaphores: two for each kind of copy.
        nodes: two buffers of rows of ``Memories.nodes``, or None.
    """

    table: Any
    q: Any
    kv: Any
    o: Any
    lse: Any
    zeros: Any
    hidden: Any
    pending: Any
    semaphores: Any
    nodes: Any = None


TABLE, QUERIES, KEYS, OUTPUTS, LSE, WRITES, GAPS, LSE_GAPS, NODES = range(9)
PENDING_WRITES = 2  # entry of ``Buffers.pending`` after the two of the output buffers


@dataclass(frozen=True)
class Copies:
    """The copies of a launch."""

    layout: Layout
    hbm: Memories
    vmem: Buffers

    def _copy(self, kind: int, slot: Any, source: Any, target: Any) -> Any:
        return pltpu.make_async_copy(source, target, self.vmem.semaphores.at[kind, slot])

    def span(self, sequence: Any, index: Any) -> QuerySpan:
        """Returns block ``index`` of the queries of a sequence."""
        p, size, starts = self.layout.paged, self.layout.tiles.queries, self.hbm.starts
        row = starts[sequence] + index * size
        remaining_rows = starts[sequence + 1] - row
        tokens, length = jnp.minimum(remaining_rows, size), self.hbm.lens[sequence]
        # new rows are the last tokens of the sequence
        number, position = index * size, length - remaining_rows
        high, oldest = jnp.clip(position + tokens, 0, length), position
        if p.tree_columns:
            # any row may see any new token, and the window of a branch begins with the new ones
            high, oldest = length, position - number
        low = 0 if p.window_left is None else jnp.clip(oldest - p.window_left, 0, high)
        first = low // self.layout.block
        stop = jnp.maximum(pl.cdiv(high, self.layout.block), first + 1)
        return QuerySpan(sequence, row, tokens, number, position, low, high, first, stop)

    def visible_tokens(self, span: QuerySpan, block: Any) -> tuple[Any, Any]:
        """Returns the first token of a block of keys that any row sees, and the end of them."""
        size = self.layout.block
        first = jnp.maximum(span.low, block * size)
        return first, jnp.maximum(jnp.minimum(span.high, (block + 1) * size), first)

    def _cached_tokens(self, sequence: Any) -> Any:
        """Returns the tokens that the cache holds when the call begins."""
        length = self.hbm.lens[sequence]
        if not self.layout.writes:
            return length
        return jnp.maximum(length - self._new_rows(sequence), 0)

    def _new_rows(self, sequence: Any) -> Any:
        return self.hbm.starts[sequence + 1] - self.hbm.starts[sequence]

    def _for_pages(self, first: Any, stop: Any, do: Callable[[Any, Any, Any], None]) -> None:
        """Runs ``do(page, first token, count)`` on the pages of a sequence with tokens of a range;
        ``page`` is its place in the block table."""
        size = self.layout.paged.page_size

        def visit(page: Any, carry: None) -> None:
            token = jnp.maximum(first, page * size)
            do(page, token, jnp.minimum(stop, (page + 1) * size) - token)

        lax.fori_loop(first // size, jnp.where(stop > first, pl.cdiv(stop, size), 0), visit, None)

    def fetch_table(self, sequence: Any, slot: Any) -> None:
        self._copy(TABLE, slot, self.hbm.tables.at[sequence], self.vmem.table.at[slot]).start()

    def wait_table(self, slot: Any) -> None:
        self._copy(TABLE, slot, self.hbm.tables.at[0], self.vmem.table.at[slot]).wait()

    def fetch_queries(self, span: QuerySpan, slot: Any) -> None:
        rows = pl.ds(0, span.tokens)
        source = self.hbm.q.at[pl.ds(span.row, span.tokens)]
        self._copy(QUERIES, slot, source, self.vmem.q.at[slot, rows]).start()
        if self.hbm.nodes is not None:
            source = self.hbm.nodes.at[pl.ds(span.row, span.tokens)]
            self._copy(NODES, slot, source, self.vmem.nodes.at[slot, rows]).start()

    def wait_queries(self, span: QuerySpan, slot: Any) -> None:
        rows = self.vmem.q.at[slot, pl.ds(0, span.tokens)]
        self._copy(QUERIES, slot, rows, rows).wait()
        if self.hbm.nodes is not None:
            rows = self.vmem.nodes.at[slot, pl.ds(0, span.tokens)]
            self._copy(NODES, slot, rows, rows).wait()

    def fetch_keys(self, span: QuerySpan, block: Any, table_slot: Any, slot: Any) -> None:
        """Starts the copies of the visible tokens of a block: from pages, and of the new ones from
        the array of the call, because their pages may not have been written yet."""
        p, hbm, kv = self.layout.paged, self.hbm, self.vmem.kv
        first, stop = self.visible_tokens(span, block)
        base, cached = block * self.layout.block, self._cached_tokens(span.sequence)

        def copy_page(page: Any, token: Any, count: Any) -> None:
            entry = jnp.clip(self.vmem.table[table_slot, 0, page], 0, p.pages - 1)
            source = hbm.pool.at[entry, pl.ds(token - page * p.page_size, count)]
            self._copy(KEYS, slot, source, kv.at[slot, pl.ds(token - base, count)]).start()

        self._for_pages(first, jnp.minimum(stop, cached), copy_page)
        if not self.layout.writes:
            return
        token = jnp.maximum(first, cached)

        @pl.when(stop > token)
        def _new_tokens() -> None:
            row = self._new_row(span.sequence, token)
            source = hbm.new.at[pl.ds(row, stop - token)]
            self._copy(KEYS, slot, source, kv.at[slot, pl.ds(token - base, stop - token)]).start()

    def wait_keys(self, span: QuerySpan, block: Any, slot: Any) -> None:
        first, stop = self.visible_tokens(span, block)

        @pl.when(stop > first)
        def _wait() -> None:
            tokens = self.vmem.kv.at[slot, pl.ds(0, stop - first)]
            self._copy(KEYS, slot, tokens, tokens).wait()

    def clear_hidden(self, span: QuerySpan, block: Any, slot: Any) -> None:
        """Sets tokens of a buffer that no row sees to zero: 0 * NaN is NaN, and what an earlier
        block left may be NaN."""
        kv, base = self.vmem.kv, block * self.layout.block
        if jnp.issubdtype(kv.dtype, jnp.integer):
            return
        first, stop = (x - base for x in self.visible_tokens(span, block))
        stop = jnp.where(stop > first, stop, first)

        def clear(size: int) -> Callable[[Any, None], None]:
            zeros = jnp.zeros((size, *kv.shape[2:]), kv.dtype)

            def store(index: Any, carry: None) -> None:
                kv[slot, pl.ds(index * size, size)] = zeros

            return store

        # whole chunks, and token by token in the chunks that visible tokens begin and end in
        first_chunk, stop_chunk = first // CHUNK, pl.cdiv(stop, CHUNK)
        lax.fori_loop(0, first_chunk, clear(CHUNK), None)
        lax.fori_loop(first_chunk * CHUNK, first, clear(1), None)
        lax.fori_loop(stop, stop_chunk * CHUNK, clear(1), None)
        lax.fori_loop(stop_chunk, self.layout.block // CHUNK, clear(CHUNK), None)

    def store_output(self, span: QuerySpan, slot: Any) -> None:
        """Starts the copy of the rows of a block of queries."""
        rows = self.vmem.o.at[slot, pl.ds(0, span.tokens)]
        self._copy(OUTPUTS, slot, rows, self.hbm.o.at[pl.ds(span.row, span.tokens)]).start()
        if self.hbm.lse is not None:
            rows = self.vmem.lse.at[slot, pl.ds(0, span.tokens)]
            self._copy(LSE, slot, rows, self.hbm.lse.at[pl.ds(span.row, span.tokens)]).start()
        self.vmem.pending[slot] = span.tokens

    def wait_output(self, slot: Any) -> None:
        """Waits until the output buffer may be written again."""
        count = self.vmem.pending[slot]

        @pl.when(count > 0)
        def _wait() -> None:
            rows = self.vmem.o.at[slot, pl.ds(0, count)]
            self._copy(OUTPUTS, slot, rows, rows).wait()
            if self.hbm.lse is not None:
                rows = self.vmem.lse.at[slot, pl.ds(0, count)]
                self._copy(LSE, slot, rows, rows).wait()
            self.vmem.pending[slot] = 0

    def _new_row(self, sequence: Any, token: Any) -> Any:
        """Returns the packed row of a new token of a sequence."""
        return token - self.hbm.lens[sequence] + self.hbm.starts[sequence + 1]

    def write_pages(self, sequence: Any, table_slot: Any) -> None:
        """Starts the copies of the new tokens of a sequence to their pages."""
        p, hbm, pending = self.layout.paged, self.hbm, self.vmem.pending
        self.wait_writes()

        def copy_page(page: Any, token: Any, count: Any) -> None:
            entry = self.vmem.table[table_slot, 0, page]

            @pl.when((entry >= 0) & (entry < p.pages))
            def _write() -> None:
                source = hbm.new.at[pl.ds(self._new_row(sequence, token), count)]
                target = hbm.pool.at[entry, pl.ds(token - page * p.page_size, count)]
                self._copy(WRITES, 0, source, target).start()
                pending[PENDING_WRITES] += count

        self._for_pages(self._cached_tokens(sequence), hbm.lens[sequence], copy_page)

    def wait_writes(self) -> None:
        """Waits for the new tokens of the sequence that was written last."""
        count = self.vmem.pending[PENDING_WRITES]

        @pl.when(count > 0)
        def _wait() -> None:
            rows = self.hbm.new.at[pl.ds(0, count)]
            self._copy(WRITES, 0, rows, rows).wait()
            self.vmem.pending[PENDING_WRITES] = 0

    def fill_gap(self, first: Any, stop: Any, *, wait: bool) -> None:
        """Starts the copies of zeros, and of -inf to lse, to rows of no sequence, or waits."""
        kinds = [(GAPS, self.vmem.zeros, self.hbm.o)]
        if self.hbm.lse is not None:
            kinds.append((LSE_GAPS, self.vmem.hidden, self.hbm.lse))

        def copy_chunk(index: Any, carry: None) -> None:
            row = first + index * CHUNK
            count = jnp.minimum(stop - row, CHUNK)
            for kind, source, target in kinds:
                chunk = source.at[pl.ds(0, count)]
                copy = self._copy(kind, 0, chunk, target.at[pl.ds(row, count)])
                copy.wait() if wait else copy.start()

        lax.fori_loop(0, pl.cdiv(stop - first, CHUNK), copy_chunk, None)

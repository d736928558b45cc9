"""Attention of packed query rows over a paged cache on a TPU, prefill and decoding in one kernel.

    o_i = sum_j softmax(x_i)_j v_j,  x_ij = scale * q_i k_j for the keys j <= i of the sequence

One program loops over steps: a step is a block of keys of a block of queries of a sequence. While
a step is computed its successor's keys arrive, and its queries and its sequence's block table where
these differ, so that copies never pause at the end of a sequence. New keys of the call, if it
writes them, are read from the call's own array and copied to their pages meanwhile.

Blocks hold all heads of each token, as pages do. A step has one of three forms, chosen on the
device: a single query row, whose tiles are the query heads of a kv head; a block of queries of
which all see all keys; and one with a mask. The last two take the heads apart first, once a block
of keys, and then loop over kv heads, whose tiles are as in flash attention: the matmuls of a strip
of rows are issued before the exponentials of the strip above it.

Where new tokens are nodes of a tree, blocks of keys that hold some of them have a mask of their
marks, and those that no row of the block of queries sees are not multiplied.

Bound: decoding is limited by memory (2 hk d elements a token for 4 h d FLOPs), prefill by the
matrix units: a key that is fetched meets 1024 rows of its kv head where there are as many.

Sources: Kwon et al. 2023 (paged caches); Milakov and Gimelshein 2018 (online softmax);
Ragged Paged Attention (arXiv 2604.15464).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.compat import result
from ejkernel.kernels.pallas.tpu.common.chip import LANES, SUBLANES
from ejkernel.kernels.pallas.tpu.common.masks import fit
from ejkernel.kernels.pallas.tpu.common.trees import encode_nodes, sees_all, visible_keys
from ejkernel.kernels.pallas.tpu.flash_attention.steps import overlap_scores
from ejkernel.kernels.pallas.tpu.page_attention.decode import (
    FLOOR,
    HIDDEN,
    LOGITS,
    SINKS,
    VALUES,
    dot,
)
from ejkernel.kernels.pallas.tpu.ragged_page_attention.copies import (
    CHUNK,
    NODES,
    PENDING_WRITES,
    Buffers,
    Copies,
    Memories,
    QuerySpan,
)
from ejkernel.kernels.pallas.tpu.ragged_page_attention.heads import gather_heads, load_head
from ejkernel.kernels.pallas.tpu.ragged_page_attention.tiles import Layout
from ejkernel.ops.differentiate import Arrays
from ejkernel.types.attention.problem import LOG2E


class Scratch(NamedTuple):
    """Vector memory that steps share.

    Attributes:
        q_rows, o_rows: float32 ``[tokens * heads, width]`` of a block of queries.
        q, k, v: heads apart, ``[kv heads, rows or tokens, width]``.
        wide: an 8-bit block of keys and values in bfloat16.
        m, total, acc: maximum (equal in all lanes), sum (by lane) and output of each row.
        nodes: ``[tokens, lanes]``, which new tokens each row sees, or None.
    """

    q_rows: Any
    o_rows: Any
    q: Any
    k: Any
    v: Any
    wide: Any
    m: Any
    total: Any
    acc: Any
    nodes: Any = None


class Position(NamedTuple):
    """The step of the loop: which blocks it multiplies, and which buffers it uses.

    Attributes:
        sequence, after: its sequence, and the next one that has rows.
        queries, keys: indices of its blocks.
        table_slot, q_slot, kv_slot: buffers.
    """

    sequence: Any
    after: Any
    queries: Any
    keys: Any
    table_slot: Any
    q_slot: Any
    kv_slot: Any


def _add_tile(
    layout: Layout, x: jax.Array, v: jax.Array, scratch: Scratch, at: tuple[Any, ...]
) -> None:
    """Adds a tile of base-2 logits ``[rows, tokens]`` to the state of the rows ``at``."""
    m_old = scratch.m[at]
    m = jnp.maximum(m_old, jnp.max(x, axis=1, keepdims=True))
    alpha = jnp.exp2(m_old - m)
    parts = [jnp.exp2(x[:, n : n + LANES] - m) for n in range(0, x.shape[1], LANES)]
    total = functools.reduce(jnp.add, parts)
    p = jnp.concatenate([part.astype(v.dtype) for part in parts], axis=1)
    scratch.m[at] = m
    scratch.total[at] = scratch.total[at] * alpha + total
    acc = scratch.acc[at]
    scratch.acc[at] = acc * fit(alpha, acc.shape[1]) + dot(layout.paged, p, v, (1, 0))


def _logits(layout: Layout, scores: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns base-2 logits; ``factor`` as ``row_factors`` has it."""
    cap = layout.paged.soft_cap
    return scores * factor if cap is None else (cap * LOG2E) * jnp.tanh(scores * factor)


def _results(
    scratch: Scratch, at: tuple[Any, ...], sinks: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the output of the rows ``at`` and their log-sum-exp ``[rows, 1]``; zeros and -inf
    where they have seen nothing."""
    m, total = scratch.m[at][:, :1], jnp.sum(scratch.total[at], axis=1, keepdims=True)
    seen, top = total != 0.0, jnp.maximum(m, sinks)  # NaN has seen something
    shrink = jnp.exp2(m - top)
    total = jnp.where(seen, total * shrink + jnp.exp2(sinks - top), 1.0)
    o = jnp.where(seen, scratch.acc[at] * (shrink * values / total), 0.0)
    return o, jnp.where(seen, (top + jnp.log2(total)) * (1.0 / LOG2E), -jnp.inf)


class Steps(NamedTuple):
    """The computations of a step."""

    layout: Layout
    scratch: Scratch
    factors: Any

    def _forms(self, span: QuerySpan) -> tuple[Any, Any]:
        """Returns whether a block has one row, which sees all keys before it, and the reverse."""
        p = self.layout.paged
        if not p.tree_columns:
            return span.tokens == 1, span.tokens > 1
        # a row of a longer sequence has marks, and its window begins at its position
        is_single = (span.high - span.before == 1) & (not p.positioned)
        return is_single, ~is_single

    def begin(self, span: QuerySpan, q: Any, nodes: Any) -> None:
        """Takes the heads of a block of queries apart and resets the states of its rows."""
        layout, s = self.layout, self.scratch
        heads = layout.heads

        def reset(rows: int) -> None:
            for ref, value in ((s.m, FLOOR), (s.total, 0.0), (s.acc, 0.0)):
                ref[:, :rows] = jnp.full((ref.shape[0], rows, ref.shape[2]), value, jnp.float32)

        is_single, is_block = self._forms(span)

        @pl.when(is_single)
        def _one_row() -> None:
            s.q_rows[:heads] = q[0].astype(jnp.float32)
            reset(layout.decode_rows)

        @pl.when(is_block)
        def _many_rows() -> None:
            size = layout.tiles.queries
            if nodes is not None:
                s.nodes[...] = nodes[...].reshape(s.nodes.shape)
            s.q_rows[: size * heads] = q[...].astype(jnp.float32).reshape(size * heads, -1)

            def gather(kv_head: Any, carry: None) -> None:
                for n in range(layout.group):
                    head = kv_head * layout.group + n
                    s.q[kv_head, pl.ds(n * size, size)] = gather_heads(layout, s.q_rows, head)

            lax.fori_loop(0, layout.paged.kv_heads, gather, None)
            reset(layout.rows)

    def add(self, span: QuerySpan, block: Any, kv: Any, first: Any, stop: Any) -> None:
        """Adds a block of keys, visible from ``first`` to ``stop``, to the states."""
        start = block * self.layout.block
        is_single, is_block = self._forms(span)
        if self.scratch.wide is not None:
            self.scratch.wide[...] = kv[...].astype(jnp.bfloat16)
            kv = self.scratch.wide

        @pl.when(is_single)
        def _one_row() -> None:
            self._add_to_one_row(kv, first - start, stop - start)

        @pl.when(is_block)
        def _many_rows() -> None:
            for head in range(self.layout.paged.kv_heads):
                self.scratch.k[head], self.scratch.v[head] = load_head(self.layout, kv, head)
            is_visible = self._sees_all(span, start)
            pl.when(is_visible)(lambda: self._add_to_rows(None))
            pl.when(~is_visible)(lambda: self._add_visible(span, start))

    def _sees_all(self, span: QuerySpan, start: Any) -> Any:
        """Returns whether all rows of a block of queries see all keys of a block."""
        p, stop = self.layout.paged, start + self.layout.block
        last = span.position + span.tokens - 1
        if self.scratch.nodes is not None:
            return sees_all(p, self.scratch.nodes[...], span.before, last, start, stop)
        sees = stop <= span.position + 1
        if p.window_left is not None:
            sees &= start >= last - p.window_left
        return sees

    def _add_visible(self, span: QuerySpan, start: Any) -> None:
        """Adds a block to rows of which each sees some of its tokens."""
        layout = self.layout
        p, size, tokens = layout.paged, layout.tiles.queries, layout.block
        if self.scratch.nodes is not None:
            count = span.high - span.before
            nodes = self.scratch.nodes[...]
            seen = visible_keys(p, nodes, span.number, span.before, count, start, tokens)
            # long prefills have blocks of which no row has a mark
            pl.when(jnp.max(seen.astype(jnp.float32)) > 0)(lambda: self._add_to_rows(seen))
            return
        query, key = (lax.broadcasted_iota(jnp.int32, (size, tokens), n) for n in (0, 1))
        distance, offset = key - query, span.position - start
        seen = distance <= offset
        if p.window_left is not None:
            seen &= distance >= offset - p.window_left
        self._add_to_rows(seen)

    def _add_to_one_row(self, kv: Any, first: Any, stop: Any) -> None:
        """Adds a block to the heads of a single row, which sees the tokens of a range."""
        layout, s = self.layout, self.scratch
        rows = layout.decode_rows
        token = lax.broadcasted_iota(jnp.int32, (rows, layout.block), 1)
        seen = (token >= first) & (token < stop)

        def scores(head: int) -> tuple[jax.Array, jax.Array]:
            k, v = load_head(layout, kv, head)
            q = s.q_rows[pl.ds(head * layout.group, rows)]
            return dot(layout.paged, q, k, (1, 1)), v

        def add(head: int, ready: tuple[jax.Array, jax.Array]) -> None:
            factor = self.factors[head, :, LOGITS : LOGITS + 1]
            x = jnp.where(seen, _logits(layout, ready[0], factor), HIDDEN)
            _add_tile(layout, x, ready[1], s, (head, pl.ds(0, rows)))

        overlap_scores(range(layout.paged.kv_heads), scores, add)

    def _add_to_rows(self, visible: jax.Array | None) -> None:
        """Adds a block to all rows of a block of queries, its ``visible`` tokens or all."""
        layout, s = self.layout, self.scratch
        p, size, strip, seen = layout.paged, layout.tiles.queries, layout.strip, visible
        if seen is not None:
            # rows of a strip are the queries, once for each of its heads
            seen = jnp.concatenate([seen.astype(jnp.int32)] * (strip // size), axis=0) > 0

        def add_head(head: Any, carry: None) -> None:
            k, v, factor = s.k[head], s.v[head], self.factors[head][:1, LOGITS : LOGITS + 1]

            def scores(first: int) -> jax.Array:
                return dot(p, s.q[head, pl.ds(first, strip)], k, (1, 1))

            def add(first: int, ready: jax.Array) -> None:
                x = _logits(layout, ready, factor)
                x = x if seen is None else jnp.where(seen, x, HIDDEN)
                _add_tile(layout, x, v, s, (head, pl.ds(first, strip)))

            overlap_scores(range(0, layout.rows, strip), scores, add)

        lax.fori_loop(0, p.kv_heads, add_head, None)

    def finish(self, span: QuerySpan, o_ref: Any, lse_ref: Any) -> None:
        """Stores the results of a block of queries, all heads of a token together.

        ``o_ref``: ``[tokens, heads, width]``. ``lse_ref``: ``[tokens, 1, lanes]``, or None.
        """
        is_single, is_block = self._forms(span)
        pl.when(is_single)(lambda: self._finish_one_row(o_ref, lse_ref))
        pl.when(is_block)(lambda: self._finish_rows(o_ref, lse_ref))

    def _row_factors(self, kv_head: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the sinks and the factors of outputs of a kv head's rows, ``[rows, 1]``."""
        factors = self.factors[kv_head]
        return factors[:, SINKS : SINKS + 1], factors[:, VALUES : VALUES + 1]

    def _finish_one_row(self, o_ref: Any, lse_ref: Any) -> None:
        layout, s = self.layout, self.scratch
        group = layout.group
        shape = (layout.decode_rows, layout.lse_lanes)
        row, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        all_lse = jnp.zeros((1, layout.lse_lanes), jnp.float32)
        for kv_head in range(layout.paged.kv_heads):
            at = (kv_head, pl.ds(0, layout.decode_rows))
            o, lse = _results(s, at, *self._row_factors(kv_head))
            s.o_rows[pl.ds(kv_head * group, group)] = o[:group]
            # a head is a row here and a lane of the result
            is_lane_of_row = (lane == kv_head * group + row) & (row < group)
            all_lse += jnp.sum(jnp.where(is_lane_of_row, lse, 0.0), axis=0, keepdims=True)
        o_ref[0] = s.o_rows[: layout.heads].astype(o_ref.dtype)
        if lse_ref is not None:
            lse_ref[0] = all_lse

    def _finish_rows(self, o_ref: Any, lse_ref: Any) -> None:
        layout, s = self.layout, self.scratch
        group, size = layout.group, layout.tiles.queries
        lane = lax.broadcasted_iota(jnp.int32, (size, layout.lse_lanes), 1)

        def store(kv_head: Any, all_lse: jax.Array) -> jax.Array:
            factors = self._row_factors(kv_head)
            for n in range(group):
                head, at = kv_head * group + n, (kv_head, pl.ds(n * size, size))
                o, lse = _results(s, at, *(x[n : n + 1] for x in factors))
                s.o_rows[pl.ds(head, size, stride=layout.heads)] = o
                if lse_ref is not None:
                    all_lse = jnp.where(lane == head, lse, all_lse)
            return all_lse

        all_lse = jnp.zeros(lane.shape, jnp.float32)
        all_lse = lax.fori_loop(0, layout.paged.kv_heads, store, all_lse)
        o_ref[...] = s.o_rows[...].reshape(o_ref.shape).astype(o_ref.dtype)
        if lse_ref is not None:
            lse_ref[...] = all_lse[:, None]


class Ranges(NamedTuple):
    """Scalar memory of ``canonicalize_ranges``: ``[sequences + 1]`` and ``[sequences]``."""

    starts: Any
    lens: Any


def canonicalize_ranges(
    layout: Layout, call_starts: Any, call_lens: Any, valid: Any, ranges: Ranges
) -> None:
    """Writes starts that never decrease, without rows of sequences past the valid ones, and context
    lengths that the table can hold; here, because a chain of small operations of XLA takes longer.

    ``valid``: the number of valid sequences is its last entry.
    """
    count, rows = layout.problem.sequences, layout.problem.rows
    last = jnp.clip(valid[valid.shape[0] - 1], 0, count)

    def write(sequence: Any, start: Any) -> Any:
        start = jnp.clip(call_starts[jnp.minimum(sequence, last)], start, rows)
        ranges.starts[sequence] = start
        entry = jnp.minimum(sequence, count - 1)
        ranges.lens[entry] = jnp.clip(call_lens[entry], 0, layout.paged.capacity)
        return start

    lax.fori_loop(0, count + 1, write, jnp.int32(0))


class Transition(NamedTuple):
    """The way from a step to the next one.

    Attributes:
        next: position of the next step. next_span: its block of queries.
        exists: whether there is a next step.
        ends_queries, ends_sequence: whether the step is the last of its queries, of its sequence.
    """

    next: Position
    next_span: QuerySpan
    exists: Any
    ends_queries: Any
    ends_sequence: Any


@dataclass(frozen=True)
class Mainloop:
    """The loop over the steps of all sequences."""

    layout: Layout
    copies: Copies
    steps: Steps

    @property
    def sequences(self) -> int:
        return self.layout.problem.sequences

    def next_sequence(self, sequence: Any) -> Any:
        """Returns the next sequence that has rows, or the number of sequences."""
        starts, count = self.copies.hbm.starts, self.sequences

        def is_empty(sequence: Any) -> Any:
            entry = jnp.minimum(sequence, count - 1)
            return (sequence < count) & ~(starts[entry + 1] > starts[entry])

        return lax.while_loop(is_empty, lambda sequence: sequence + 1, sequence + 1)

    def begin(self) -> Position:
        """Starts the copies of the first step and returns its position."""
        copies, zero = self.copies, jnp.int32(0)
        sequence = self.next_sequence(zero - 1)
        after = self.next_sequence(sequence)

        @pl.when(sequence < self.sequences)
        def _first() -> None:
            copies.fetch_table(sequence, 0)
            pl.when(after < self.sequences)(lambda: copies.fetch_table(after, 1))
            span = copies.span(sequence, zero)
            copies.fetch_queries(span, 0)
            copies.wait_table(0)
            copies.fetch_keys(span, span.first, 0, 0)

        first = copies.span(jnp.minimum(sequence, self.sequences - 1), zero).first
        return Position(sequence, after, zero, first, zero, zero, zero)

    def transition(self, at: Position, span: QuerySpan) -> Transition:
        """Returns what follows a step of a block of queries."""
        size, starts, count = self.layout.tiles.queries, self.copies.hbm.starts, self.sequences
        ends_queries = at.keys + 1 >= span.stop
        ends = ends_queries & (span.row + size >= starts[at.sequence + 1])
        sequence = jnp.where(ends, at.after, at.sequence)
        exists = sequence < count
        queries = jnp.where(ends, 0, at.queries + ends_queries.astype(jnp.int32))
        next_span = self.copies.span(jnp.minimum(sequence, count - 1), queries)
        keys = jnp.where(ends_queries, next_span.first, at.keys + 1)
        after = lax.cond(ends & exists, lambda: self.next_sequence(at.after), lambda: at.after)
        table_slot = jnp.where(ends, 1 - at.table_slot, at.table_slot)
        q_slot = jnp.where(ends_queries, 1 - at.q_slot, at.q_slot)
        position = Position(sequence, after, queries, keys, table_slot, q_slot, 1 - at.kv_slot)
        return Transition(position, next_span, exists, ends_queries, ends)

    def prefetch(self, at: Position, transition: Transition) -> None:
        """Starts the copies of the next step; the table of the sequence after it, too."""
        copies, following = self.copies, transition.next

        @pl.when(transition.ends_sequence & transition.exists)
        def _table() -> None:
            copies.wait_table(following.table_slot)
            has_table = following.after < self.sequences
            pl.when(has_table)(lambda: copies.fetch_table(following.after, at.table_slot))

        @pl.when(transition.exists)
        def _keys() -> None:
            copies.fetch_keys(
                transition.next_span, following.keys, following.table_slot, following.kv_slot
            )

        @pl.when(transition.ends_queries & transition.exists)
        def _queries() -> None:
            copies.fetch_queries(transition.next_span, following.q_slot)

    def step(self, at: Position) -> Position:
        """Runs a step and returns the position of the next one."""
        copies, steps, buffers = self.copies, self.steps, self.copies.vmem
        span = copies.span(at.sequence, at.queries)
        transition = self.transition(at, span)
        begins_queries = at.keys == span.first
        if self.layout.writes:

            @pl.when(begins_queries & (at.queries == 0))
            def _write() -> None:
                copies.write_pages(at.sequence, at.table_slot)

        self.prefetch(at, transition)

        @pl.when(begins_queries)
        def _begin() -> None:
            copies.wait_queries(span, at.q_slot)
            nodes = None if buffers.nodes is None else buffers.nodes.at[at.q_slot]
            steps.begin(span, buffers.q.at[at.q_slot], nodes)

        copies.wait_keys(span, at.keys, at.kv_slot)
        copies.clear_hidden(span, at.keys, at.kv_slot)
        first, stop = copies.visible_tokens(span, at.keys)
        steps.add(span, at.keys, buffers.kv.at[at.kv_slot], first, stop)

        @pl.when(transition.ends_queries)
        def _finish() -> None:
            copies.wait_output(at.q_slot)
            lse = None if buffers.lse is None else buffers.lse.at[at.q_slot]
            steps.finish(span, buffers.o.at[at.q_slot], lse)
            copies.store_output(span, at.q_slot)

        return transition.next


def _kernel(
    layout: Layout,
    starts: Any,
    lens: Any,
    valid: Any,
    tables: Any,
    q: Any,
    factors: Any,
    pool: Any,
    new: Any | None,
    nodes: Any | None,
    o: Any,
    lse: Any | None,
    written_pool: Any | None,
    buffers: Buffers,
    ranges: Ranges,
    scratch: Scratch,
) -> None:
    """Runs all steps; arrays are in device memory, ``factors`` in vector memory."""
    canonicalize_ranges(layout, starts, lens, valid, ranges)
    pool = written_pool if layout.writes else pool
    memories = Memories(*ranges, tables, q, o, lse, pool, new, nodes)
    copies = Copies(layout, memories, buffers)
    loop = Mainloop(layout, copies, Steps(layout, scratch, factors))
    for kind in range(PENDING_WRITES + 1):
        buffers.pending[kind] = 0
    buffers.zeros[...] = jnp.zeros_like(buffers.zeros)
    if buffers.hidden is not None:
        buffers.hidden[...] = jnp.full(buffers.hidden.shape, -jnp.inf, jnp.float32)
    # rows before the first sequence and after the last one
    gaps = ((0, ranges.starts[0]), (ranges.starts[loop.sequences], layout.problem.rows))
    for gap in gaps:
        copies.fill_gap(*gap, wait=False)
    lax.while_loop(lambda at: at.sequence < loop.sequences, loop.step, loop.begin())
    for slot in range(2):
        copies.wait_output(slot)
    if layout.writes:
        copies.wait_writes()
    for gap in gaps:
        copies.fill_gap(*gap, wait=True)


def row_factors(layout: Layout, arrays: Arrays) -> Any:
    """Returns float32 ``[kv heads, decode rows, 128]``: in lane LOGITS the factor of scores, to
    base 2 or to the soft cap; in VALUES that of outputs; in SINKS the base-2 log of the sum of the
    exponentials of the sinks."""
    p = layout.paged

    names = {"logit_scale", "k_scale", "v_scale", "sink"}
    xp: Any = jnp if names & arrays.keys() else np  # a constant, which no operation makes

    def per_head(x: jax.Array | float) -> Any:
        """``[1, 1 or heads or kv heads]`` for all query heads of a kv head."""
        x = xp.asarray(x, np.float32).reshape(-1)
        x = xp.repeat(x, p.heads // x.shape[0]).reshape(p.kv_heads, p.group)
        return xp.pad(x, ((0, 0), (0, layout.decode_rows - p.group)))

    scale = p.scale * (LOG2E if p.soft_cap is None else 1.0 / p.soft_cap)
    logits = per_head(arrays.get("logit_scale", arrays.get("k_scale", 1.0))) * scale
    sinks: Any = HIDDEN
    if "sink" in arrays:
        sinks = jax.nn.logsumexp(arrays["sink"].astype(jnp.float32), axis=-1) * LOG2E
    factors = [logits, per_head(arrays.get("v_scale", 1.0)), per_head(xp.maximum(sinks, HIDDEN))]
    return xp.pad(xp.stack(factors, axis=2), ((0, 0), (0, 0), (0, LANES - len(factors))))


def scratch_shapes(layout: Layout, dtype: Any, pool_dtype: Any, columns: int) -> list[Any]:
    """Returns types of the ``Buffers``, ``Ranges`` and ``Scratch`` of a call.

    ``columns``: of a block table.
    """
    p, t, width = layout.paged, layout.tiles, layout.width
    queries = (t.queries, layout.heads, width)
    block = (layout.block, layout.token_rows, width)
    sums = (1, layout.lse_lanes)
    state = max(layout.rows, layout.decode_rows)
    f32 = functools.partial(pltpu.VMEM, dtype=jnp.dtype(jnp.float32))
    i32 = functools.partial(pltpu.VMEM, dtype=jnp.dtype(jnp.int32))
    buffers = Buffers(
        table=pltpu.SMEM((2, 1, columns), jnp.int32),
        q=pltpu.VMEM((2, *queries), dtype),
        kv=pltpu.VMEM((2, *block), pool_dtype),
        o=pltpu.VMEM((2, *queries), dtype),
        lse=f32((2, t.queries, *sums)) if p.return_lse else None,
        zeros=pltpu.VMEM((CHUNK, *queries[1:]), dtype),
        hidden=f32((CHUNK, *sums)) if p.return_lse else None,
        pending=pltpu.SMEM((PENDING_WRITES + 1,), jnp.int32),
        semaphores=pltpu.SemaphoreType.DMA((NODES + 1 if p.tree_columns else NODES, 2)),
        nodes=i32((2, t.queries, 1, layout.node_lanes)) if p.tree_columns else None,
    )
    ranges = Ranges(pltpu.SMEM((p.batch + 1,), jnp.int32), pltpu.SMEM((p.batch,), jnp.int32))
    heads = pltpu.VMEM((p.kv_heads, layout.block, width), dtype)
    scratch = Scratch(
        # rows of a score tile of one token may reach past its heads
        q_rows=f32((t.queries * layout.heads + SUBLANES, width)),
        o_rows=f32((t.queries * layout.heads, width)),
        q=pltpu.VMEM((p.kv_heads, layout.rows, width), dtype),
        k=heads,
        v=heads,
        wide=pltpu.VMEM(block, jnp.bfloat16) if p.is_eight_bit else None,
        m=f32((p.kv_heads, state, LANES)),
        total=f32((p.kv_heads, state, LANES)),
        acc=f32((p.kv_heads, state, width)),
        nodes=i32((t.queries, layout.node_lanes)) if p.tree_columns else None,
    )
    return [buffers, ranges, scratch]


def attend(
    layout: Layout, arrays: Arrays, pool: jax.Array, new: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns o ``[T, heads, width]``; lse ``[T, 1, lanes]``, a lane for each head, or None; and
    the pool where the call writes it, or None.

    ``arrays`` are the operands of ``ejkernel.types.serving.operands`` with q ``[T, heads, width]``;
    ``pool`` and ``new`` are as in ``copies.Memories``.
    """
    p, chip, rows = layout.paged, layout.chip, layout.problem.rows
    columns = -(-p.max_pages // LANES) * LANES
    tables = jnp.asarray(arrays["tables"], jnp.int32)[:, None]
    tables = jnp.pad(tables, ((0, 0), (0, 0), (0, columns - p.max_pages)))
    factors = row_factors(layout, arrays)
    scalars = [arrays[name].astype(jnp.int32) for name in ("starts", "lens", "valid")]
    nodes = None
    if p.tree_columns:
        nodes = encode_nodes(p, arrays["tree"], arrays.get("positions"))[:, None]
    operands = [*scalars, tables, arrays["q"], factors, pool, new, nodes]
    present = jax.tree.leaves(operands)
    o = result(arrays["q"].shape, p.query_dtype, *present)
    lse = written_pool = None
    if p.return_lse:
        lse = result((rows, 1, layout.lse_lanes), "float32", *present)
    if layout.writes:
        written_pool = result(pool.shape, pool.dtype, *present)
    # positions of pool and written_pool among the arrays that there are
    pool_alias = {len(scalars) + 3: 2 if p.return_lse else 1} if layout.writes else {}

    def in_memory(x: Any, space: Any = pltpu.HBM) -> pl.BlockSpec | None:
        return None if x is None else pl.BlockSpec(memory_space=space)

    return pl.pallas_call(
        functools.partial(_kernel, layout),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[
                in_memory(tables),
                in_memory(arrays["q"]),
                in_memory(factors, pltpu.VMEM),
                in_memory(pool),
                in_memory(new),
                in_memory(nodes),
            ],
            out_specs=[in_memory(x) for x in (o, lse, written_pool)],
            scratch_shapes=scratch_shapes(layout, arrays["q"].dtype, pool.dtype, columns),
        ),
        out_shape=[o, lse, written_pool],
        input_output_aliases=pool_alias,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=chip.vmem_limit(layout.vmem() * 3 // 2),
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * rows * p.capacity * p.heads * p.dim,
            transcendentals=rows * p.capacity * p.heads,
            bytes_accessed=p.batch * p.capacity * p.kv_heads * p.token_bytes,
        ),
        # the plain interpreter has no copies of a traced length
        interpret=pltpu.InterpretParams() if chip.interpret is True else chip.interpret,
        name="ejkernel_ragged_attention",
    )(*operands)

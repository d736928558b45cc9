"""Ragged attention of few packed rows, in one launch: schedule, decoding and merge.

Math, per row at position i of its sequence and query head, over the keys j <= i in the window:

    x_ij = scale * k_scale * q_i . k_j, soft-capped;  lse_i = log(sum_j exp x_ij + exp sink)
    o_i  = v_scale * sum_j exp(x_ij - lse_i) v_j

Work split: up to TOKENS rows of a sequence are a chunk, which is decoded like a sequence of
``decode``: the key tiles of all chunks, laid end to end, are split into equal work ranges, one
program per (range, kv head, block of query heads). Every program finds the chunks from starts and
lengths (``packed_rows``). A chunk has the number of its first row; what range r holds of chunk b
goes to slot r + b of the partial results.

The last program of a chunk and head to finish merges its partial results, in the order of the
ranges, so that two runs give the same bits. ``counters`` holds how many have finished, 0 before the
launch. A chunk in one range needs neither. Rows that see no key are shared out among the ranges.

Bound: reading keys and values once for each chunk. One sequence of 1,024 tokens, 8 kv heads, D128
in bfloat16: 4.2 MB, 1 us at 4.3 TB/s, so that waits for memory and between launches decide.

Sources: as for ``decode``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import power_of_two, struct
from ejkernel.kernels.triton.serving.attend_block import tree_rows
from ejkernel.kernels.triton.serving.decode import attend_tiles
from ejkernel.kernels.triton.serving.decode_tiles import query_rows
from ejkernel.kernels.triton.serving.epilogue import (
    load_head_scale,
    store_output,
    store_partial,
    store_rows,
)
from ejkernel.kernels.triton.serving.finished import count_finished
from ejkernel.kernels.triton.serving.groups import RowLayout
from ejkernel.kernels.triton.serving.in_place import copy_if_elsewhere
from ejkernel.kernels.triton.serving.launch import (
    RaggedLaunch,
    cache_group,
    dot_options,
    logits_group,
    sequential,
)
from ejkernel.kernels.triton.serving.merge import LOADED_ELEMENTS, find_range, merge_block
from ejkernel.kernels.triton.serving.packed_rows import find_packed_rows, packed_sequences
from ejkernel.kernels.triton.serving.pages import load_block_pages
from ejkernel.kernels.triton.serving.ragged_tiles import (
    count_counters,
    decode_problem,
    few_row_ranges,
)
from ejkernel.kernels.triton.targets import ptx_level
from ejkernel.types.serving.problem import ITEMSIZE

COPIED_PER_PROGRAM = 2048  # elements of a cache, at a time


class FewRowsSizes(NamedTuple):
    """Sizes of a call.

    Attributes:
        n, rows: sequences, and rows of all.
        ranges: work ranges.
        max_pages, pages: pages of a row of the block table, and of the cache.
        cache_size: elements of the cache, as they are read.
        left, WINDOW: keys seen before a row, where there is a window.
    """

    n: int
    rows: int
    ranges: int
    max_pages: int
    pages: int
    cache_size: int
    left: int
    WINDOW: bool


@triton.jit
def select_lane(lane, x, i):
    """Returns element i of a vector."""
    return tl.sum(tl.where(lane == i, x, 0), 0)


@triton.jit
def _clear_rows(o, lse, lane, is_seen, first, step, rows, member, inside, layout, V):
    """Writes the rows that see no key, of the query heads ``member``: 0, and -inf as the lse.

    Of these the rows ``first``, ``first + step`` and so on.
    """
    if tl.min(tl.where(lane < rows, is_seen, 1), 0) == 0:
        for row in range(first, rows, step):
            if select_lane(lane, is_seen, row) == 0:
                target = (row * layout.ALL + member).to(tl.int64)
                zero = tl.zeros([layout.BLOCK, V.MAIN], tl.float32)
                zero_tail = zero
                if V.TAIL > 0:
                    zero_tail = tl.zeros([layout.BLOCK, V.TAIL], tl.float32)
                store_rows(o, target, zero, zero_tail, inside, V)
                if lse is not None:
                    least = tl.full([layout.BLOCK], float("-inf"), tl.float32)
                    tl.store(lse + target, least, mask=inside)


class RowChunks(NamedTuple):
    """Chunks of up to TOKENS rows of a sequence, each numbered by its first row.

    Attributes:
        sequence, first: the sequence, and its first row.
        tiles, ends: key tiles, and the sum of those up to this chunk; other rows have no tiles.
        counts: rows.
        begins, stops: first key that is visible, and the end of the keys.
        before: keys before the new ones of a tree, or before the first row of the chunk.
        is_seen: whether the row itself sees a key.
    """

    sequence: Any
    first: Any
    tiles: Any
    ends: Any
    counts: Any
    begins: Any
    stops: Any
    before: Any
    is_seen: Any


@triton.jit
def _find_chunks(
    lane, packed, capacity, sizes, TREE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Returns the ``RowChunks`` that begin at rows ``lane``; TREE: their rows are nodes of one."""
    row_of = find_packed_rows(lane, packed, sizes.n, sizes.rows, capacity, SEQUENCES)
    is_chunk = (row_of.last > 0) & ((lane - row_of.first) % TOKENS == 0)
    counts = tl.minimum(row_of.last - lane, TOKENS)
    first_position = row_of.length - row_of.last + lane
    stops = first_position + counts
    before = stops - counts
    if TREE:
        stops = row_of.length
        before = row_of.length - (row_of.last - row_of.first)
    begins = stops * 0
    if sizes.WINDOW:
        begins = tl.maximum(before - sizes.left, 0)
    tiles = tl.where(is_chunk & (stops > 0), tl.cdiv(stops, BLOCK) - begins // BLOCK, 0)
    # the position of a row that sees a key is not negative
    is_seen = (row_of.last > 0) & (first_position >= 0)
    return RowChunks(
        row_of.sequence, row_of.first, tiles, tl.cumsum(tiles, 0), counts, begins, stops, before,
        is_seen,
    )  # fmt: skip


@triton.jit
def _attend_chunk(
    q, b, chunks, lane, tile, tile_count, token, row_number, is_head, hk, cache, tables, tree,
    k_scale, sizes, logits, layout, dots, BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Returns (m, l, acc, acc_tail, validity) of the query rows of chunk ``b``.

    Attends to ``tile_count`` key tiles from the chunk's tile ``tile`` on.
    """
    TOKENS: tl.constexpr = layout.TOKENS
    count = select_lane(lane, chunks.counts, b)
    length = select_lane(lane, chunks.stops, b)
    begin = select_lane(lane, chunks.begins, b)
    sequence = select_lane(lane, chunks.sequence, b)
    table = tables + sequence.to(tl.int64) * sizes.max_pages
    first_tile = begin // BLOCK + tile
    page = load_block_pages(table, first_tile * BLOCK, length, cache.PAGE, BLOCK)
    factor = None
    if k_scale.array is not None:
        factor = tl.load(k_scale.array + hk * k_scale.head).to(tl.float32) * logits.scale
    inside = is_head
    position = None
    nodes = None
    if TOKENS > 1:
        inside = token < count
        position = length - count + token
    if tree.words is not None:
        keys_before = select_lane(lane, chunks.before, b)
        position = keys_before + b - select_lane(lane, chunks.first, b) + token
        nodes = tree_rows(tree, b + token, inside, position, keys_before)
    m, l, acc, acc_tail = attend_tiles(  # noqa: E741
        q, b.to(tl.int64) * layout.ALL + row_number, inside, position, nodes, factor, cache,
        cache.k + cache.V_OFFSET, hk, table, page, first_tile, first_tile + tile_count, length,
        begin, sizes, logits, layout, dots, BLOCK, sizes.WINDOW, PTX,
    )  # fmt: skip
    return m, l, acc, acc_tail, inside


@triton.jit
def few_rows_attention(
    q, cache, tables, packed, tree, k_scale, v_scale, sinks, counters_in, partial, o, lse, counters,
    cache_out, sizes, logits, layout, dots, BLOCK: tl.constexpr, tile, PTX: tl.constexpr,
):  # fmt: skip
    """Writes all rows of ``o [T, h, d]`` and of ``lse [T, h]``, if the call returns it.

    ``counters_in``, ``cache.k``: operands in whose memory ``counters`` and ``cache_out`` are.
    """
    GROUP: tl.constexpr = layout.ALL // layout.KV
    TOKENS: tl.constexpr = layout.TOKENS
    pid = tl.program_id(0)
    head_block = pid % (layout.CHUNKS * layout.KV)
    hk = head_block // layout.CHUNKS
    work_range = pid // (layout.CHUNKS * layout.KV)
    ranges, rows = sizes.ranges, sizes.rows
    if cache_out is not None:
        copy_if_elsewhere(cache.k, cache_out, sizes.cache_size, tile.COPIED)

    lane = tl.arange(0, tile.LANES)
    chunks = _find_chunks(
        lane, packed, sizes.max_pages * cache.PAGE, sizes, tree.words is not None, TOKENS, BLOCK,
        tile.SEQUENCES,
    )  # fmt: skip
    total = tl.sum(chunks.tiles, 0)
    tiles_each = total // ranges
    extra = total % ranges
    t = work_range * tiles_each + tl.minimum(work_range, extra)
    end = t + tiles_each + (work_range < extra).to(tl.int32)

    member = (head_block % layout.CHUNKS) * layout.BLOCK + tl.arange(0, layout.BLOCK)
    token = member // GROUP
    member = hk * GROUP + (member if TOKENS == 1 else member % GROUP)
    is_head = token == 0
    row_number = token * layout.ALL + member
    if work_range < rows:
        _clear_rows(
            o, lse, lane, chunks.is_seen.to(tl.int32), work_range, ranges, rows, member, is_head,
            layout, cache.V,
        )  # fmt: skip
    while t < end:
        b = tl.sum((chunks.ends <= t).to(tl.int32), 0)
        chunk_end = select_lane(lane, chunks.ends, b)
        chunk_start = chunk_end - select_lane(lane, chunks.tiles, b)
        stop = tl.minimum(end, chunk_end)
        m, l, acc, acc_tail, inside = _attend_chunk(  # noqa: E741
            q, b, chunks, lane, t - chunk_start, stop - t, token, row_number, is_head, hk, cache,
            tables, tree, k_scale, sizes, logits, layout, dots, BLOCK, PTX,
        )  # fmt: skip

        value_scale = load_head_scale(v_scale, 0, hk)
        first_range = find_range(chunk_start, tiles_each, extra)
        parts = find_range(chunk_end - 1, tiles_each, extra) - first_range + 1
        if parts == 1:
            store_output(
                o, lse, b.to(tl.int64) * layout.ALL + row_number, m, l, acc, acc_tail, sinks, 0,
                member, inside, value_scale, cache.V,
            )  # fmt: skip
        else:
            slot = (work_range + b).to(tl.int64) * (TOKENS * layout.ALL)
            store_partial(partial, slot + row_number, m, l, acc, acc_tail, inside, cache.V)
            finished = count_finished(counters + b * (layout.KV * layout.CHUNKS) + head_block)
            if finished == parts - 1:
                first = (first_range + b).to(tl.int64) * (TOKENS * layout.ALL)
                head = (head_block % layout.CHUNKS) * tile.HEADS + tl.arange(0, tile.HEADS)
                is_valid = head < GROUP
                head += hk * GROUP
                for i in range(0, select_lane(lane, chunks.counts, b)):
                    merge_block(
                        partial, sinks, o, lse, 0, first + i * layout.ALL + head,
                        (b + i).to(tl.int64) * layout.ALL + head, head, is_valid, parts,
                        TOKENS * layout.ALL, value_scale, cache.V.DIM, tile.COLUMNS, tile.PARTS,
                    )  # fmt: skip
        t = stop


class FewRowsTile(NamedTuple):
    """Constants.

    Attributes:
        LANES, SEQUENCES: rows and sequences of a call, as powers of two.
        HEADS, COLUMNS, PARTS: query heads, columns and partial results that are merged at once.
        COPIED: elements that a program copies at a time.
    """

    LANES: int
    SEQUENCES: int
    HEADS: int
    COLUMNS: int
    PARTS: int
    COPIED: int


@dataclass(frozen=True)
class FewRowsAttention(RaggedLaunch):
    """Launch of ``few_rows_attention``.

    Results: o ``[T, h, d]``, lse ``[T, h]`` if the call returns it, the cache if the call wrote it,
    partial results and counters, which must be 0 before.
    """

    kernel = few_rows_attention
    batching: ClassVar = sequential(
        "q k tables starts lens valid packed_rows tree positions k_scale v_scale sink counters_in"
    )

    @property
    def ranges(self) -> int:
        """Equal parts of the keys of all chunks."""
        return few_row_ranges(self.problem, self.tiles, self.target)

    @property
    def query_block(self) -> tuple[int, int]:
        """Query rows of a program, and programs for the rows of a kv head."""
        return query_rows(decode_problem(self.problem, self.tiles), self.tiles.decode.max_rows)

    def outputs(self):
        p, rows = self.problem.paged, self.problem.rows
        slots, size = self.ranges + rows - 1, self.tiles.decode_tokens * p.heads
        row = struct("float32", slots, size)
        lse = struct("float32", rows, p.heads) if p.return_lse else None
        writes = bool(self.problem.written_dtypes)
        return {
            "acc": struct("float32", slots, size, p.dim),
            "m": row,
            "l": row,
            "o": struct(p.query_dtype, rows, p.heads, p.dim),
            "lse": lse,
            "counters": struct("int32", count_counters(self.problem, self.tiles)),
            "cache": struct(p.key_dtype, *(self.shape("k") or ())) if writes else None,
        }

    def in_place(self):
        return {"counters": "counters_in", "cache": "k"}

    def grid(self, target):
        return (self.ranges * self.problem.paged.kv_heads * self.query_block[1],)

    def options(self, target):
        return self.tiles.decode.launch_options(target)

    def arguments(self, target):
        p, t, (block, chunks) = self.problem.paged, self.tiles.decode, self.query_block
        view = "int16" if ITEMSIZE[p.key_dtype] == 1 else None
        cache = self.operand("k", view)
        columns = max(16, power_of_two(p.dim))
        heads = block if chunks > 1 else power_of_two(p.group)
        size = math.prod(self.shape("k") or (0,)) // (1 if view is None else 2)
        return {
            # once: XLA copies an operand that it sees read next to the result in its memory
            "cache": cache_group(p, cache, None, None),
            "packed": packed_sequences(self),
            **self.attention_groups(),
            "cache_out": self.result("cache", view),
            "sizes": FewRowsSizes(
                p.batch, self.problem.rows, self.ranges, p.max_pages, p.pages, size,
                p.window_left or 0, WINDOW=p.window_left is not None,
            ),
            "logits": logits_group(p),
            "layout": RowLayout(p.heads, p.kv_heads, chunks, block, self.tiles.decode_tokens),
            "dots": dot_options(p, target),
            "BLOCK": t.block,
            "tile": FewRowsTile(
                LANES=power_of_two(self.problem.rows),
                SEQUENCES=power_of_two(p.batch),
                HEADS=heads,
                COLUMNS=columns,
                PARTS=max(1, LOADED_ELEMENTS // (heads * columns)),
                COPIED=COPIED_PER_PROGRAM,
            ),
            "PTX": ptx_level(target),
        }  # fmt: skip

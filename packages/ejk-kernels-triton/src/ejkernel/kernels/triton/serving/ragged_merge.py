"""Ragged attention, last kernel: partial results of decoded rows and of split tiles to the output.

The sum of ``merge``. Few programs take the work one after another: first each (sequence, query
head), then each (slot, kv head, TILE_ROWS rows of a tile). Writes into the output of the prefill
kernel, which has all other rows; these, and the cache of a call that writes one, are copied where
XLA put a result elsewhere (``in_place``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import power_of_two, struct
from ejkernel.kernels.triton.serving.epilogue import load_head_scale
from ejkernel.kernels.triton.serving.groups import Partial
from ejkernel.kernels.triton.serving.in_place import copy_if_elsewhere, is_elsewhere
from ejkernel.kernels.triton.serving.launch import (
    RaggedLaunch,
    expected_partials,
    partials_at_once,
    sequential,
)
from ejkernel.kernels.triton.serving.merge import (
    find_slots,
    merge_row,
    store_merged_row,
    store_merged_rows,
)
from ejkernel.kernels.triton.serving.prefill import tile_rows
from ejkernel.kernels.triton.serving.schedule import (
    ROW_END,
    SLOTS,
    SLOTS_END,
    SPLITS,
    find_sequence,
)
from ejkernel.types.serving.problem import ITEMSIZE

ROWS_PER_WARP = 4  # of a tile, merged at once
MERGE_WARPS = 16  # of a multiprocessor, at least
COPIED_PER_WARP = 512  # elements that are copied at a time, 32 bytes of 16-bit values a thread


@triton.jit
def _copy_other_rows(
    source, o, rows, d_counts, first_rows, sequences, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Copies the rows that are not merged."""
    column = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        # the sequence is the one after those that end at or before the row
        r, _ = find_sequence(row, sequences + ROW_END * n, n, LANES)
        r = tl.minimum(r, n - 1)
        slots_end = sequences + SLOTS_END * n + r
        slots = tl.load(slots_end) - tl.load(slots_end - 1, mask=r > 0, other=0)
        is_merged = (tl.load(d_counts + r) > 0) | (slots > 0)
        is_merged = is_merged & (row >= tl.load(first_rows + r))
        is_merged = is_merged & (row < tl.load(sequences + ROW_END * n + r))
        if not is_merged:
            start = (tl.zeros([], tl.int64) + row) * WIDTH
            for begin in range(0, WIDTH, BLOCK):
                i = begin + column
                x = tl.load(source + start + i, mask=i < WIDTH)
                tl.store(o + start + i, x, mask=i < WIDTH)


class MergeSizes(NamedTuple):
    """Sizes of a call; ``ranges``: equal parts of the keys of decoded sequences."""

    n: int
    rows: int
    cache_size: int
    ranges: int


class MergeTile(NamedTuple):
    """Constants.

    Attributes:
        TOKENS: rows of a decoded sequence, at most.
        SPLITS: partial results of every decoded sequence; 0: as many as its work ranges.
        D, COLUMNS: columns of a head, and these as a power of two.
        PARTS: partial results of a decoded row that are loaded at once.
        TILE_ROWS: rows of a split tile that are merged at once.
        LANES: sequences that are searched at once.
        COPIED: elements that are copied at once.
    """

    TOKENS: int
    SPLITS: int
    D: int
    COLUMNS: int
    PARTS: int
    TILE_ROWS: int
    LANES: int
    COPIED: int


@triton.jit
def _merge_decoded_rows(
    decoded, starts, counts, first_rows, v_scale, sinks, o, lse, n, ranges, layout, tile
):
    """Writes the rows of the decoded sequences, a (sequence, query head) at a time."""
    HEADS: tl.constexpr = layout.HEADS
    GROUP: tl.constexpr = HEADS // layout.KV_HEADS
    TOKENS: tl.constexpr = tile.TOKENS
    column = tl.arange(0, tile.COLUMNS)
    for x in tl.range(tl.program_id(0), n * HEADS, tl.num_programs(0)):
        h = x % HEADS
        b = x // HEADS
        tokens = tl.load(counts + b)
        start = tl.load(first_rows + b)
        slot, count = find_slots(b, starts, n, ranges, tile.SPLITS, 0)
        value_scale = load_head_scale(v_scale, 0, h // GROUP)
        for token in range(0, tokens):
            partial_row = slot.to(tl.int64) * (TOKENS * HEADS) + token * HEADS + h
            m, l, acc = merge_row(  # noqa: E741
                decoded.acc, decoded.m, decoded.l, partial_row, count, TOKENS * HEADS, column,
                tile.D, tile.PARTS,
            )  # fmt: skip
            row = (start + token).to(tl.int64) * HEADS + h
            store_merged_row(o, lse, row, m, l, acc, column, 0, sinks, 0, h, value_scale, tile.D)


@triton.jit
def _merge_split_tiles(
    prefilled, first_rows, sequences, header, v_scale, sinks, o, lse, n, layout, tile
):
    """Writes the rows of the tiles with several splits, TILE_ROWS of a (slot, kv head) at a time.

    Only the slots of a tile's first split are work.
    """
    HEADS: tl.constexpr = layout.HEADS
    GROUP: tl.constexpr = HEADS // layout.KV_HEADS
    CHUNKS: tl.constexpr = layout.CHUNKS
    ROWS: tl.constexpr = layout.ROWS
    D: tl.constexpr = tile.D
    TILE_ROWS: tl.constexpr = tile.TILE_ROWS
    HEAD_CHUNKS: tl.constexpr = layout.KV_HEADS * CHUNKS  # programs of a unit
    BLOCKS: tl.constexpr = ROWS // TILE_ROWS
    column = tl.arange(0, tile.COLUMNS)
    slots = tl.load(header + SLOTS)
    for x in tl.range(tl.program_id(0), slots * (HEAD_CHUNKS * BLOCKS), tl.num_programs(0)):
        row_block = x % BLOCKS
        head_chunk = (x // BLOCKS) % HEAD_CHUNKS
        slot = x // (BLOCKS * HEAD_CHUNKS)
        r, before = find_sequence(slot, sequences + SLOTS_END * n, n, tile.LANES)
        splits = tl.load(sequences + SPLITS * n + r)
        if (slot - before) % splits == 0:
            first = tl.load(first_rows + r)
            count = tl.load(sequences + ROW_END * n + r) - first
            hk = head_chunk // CHUNKS
            member = row_block * TILE_ROWS + tl.arange(0, TILE_ROWS)
            _, heads, row, inside = tile_rows(
                member, (slot - before) // splits, head_chunk % CHUNKS, first, count, hk,
                HEADS, GROUP, layout.TILE, layout.MEMBERS,
            )  # fmt: skip
            m = tl.full([TILE_ROWS], float("-inf"), tl.float32)
            l = tl.zeros([TILE_ROWS], tl.float32)  # noqa: E741
            acc = tl.zeros([TILE_ROWS, tile.COLUMNS], tl.float32)
            for i in range(0, splits):
                partial_row = ((slot + i).to(tl.int64) * HEAD_CHUNKS + head_chunk) * ROWS + member
                m_i = tl.load(prefilled.m + partial_row)
                acc_i = tl.load(
                    prefilled.acc + partial_row[:, None] * D + column[None, :],
                    mask=(column < D)[None, :], other=0.0,
                )  # fmt: skip
                top = tl.maximum(m, m_i)
                base = tl.where(top == float("-inf"), 0.0, top)
                weight = tl.exp2(m_i - base)
                alpha = tl.exp2(m - base)
                m = top
                l = l * alpha + tl.load(prefilled.l + partial_row) * weight  # noqa: E741
                acc = acc * alpha[:, None] + acc_i * weight[:, None]
            value_scale = load_head_scale(v_scale, 0, hk)
            store_merged_rows(
                o, lse, row, m, l, acc, column, sinks, 0, heads, inside, value_scale, D
            )


@triton.jit
def ragged_merge(
    decoded, d_starts, d_counts, first_rows, sequences, header, prefilled, v_scale, sinks, o_in,
    cache_in, lse_in, o, cache, lse, sizes, layout, tile,
):  # fmt: skip
    """Writes the rows of ``decoded`` and ``prefilled`` partial results into the outputs.

    ``o_in``, ``cache_in``, ``lse_in``: operands in whose memory ``o``, ``cache`` and ``lse`` are.
    """
    n = sizes.n
    HEADS: tl.constexpr = layout.HEADS
    LANES: tl.constexpr = tile.LANES
    COPIED: tl.constexpr = tile.COPIED
    if cache_in is not None:
        copy_if_elsewhere(cache_in, cache, sizes.cache_size, COPIED)
    if is_elsewhere(o_in, o):
        _copy_other_rows(
            o_in, o, sizes.rows, d_counts, first_rows, sequences, n, HEADS * tile.D, COPIED, LANES
        )  # fmt: skip
    if lse is not None:
        if is_elsewhere(lse_in, lse):
            _copy_other_rows(
                lse_in, lse, sizes.rows, d_counts, first_rows, sequences, n, HEADS, COPIED, LANES
            )  # fmt: skip
    _merge_decoded_rows(
        decoded, d_starts, d_counts, first_rows, v_scale, sinks, o, lse, n, sizes.ranges, layout,
        tile,
    )  # fmt: skip
    _merge_split_tiles(
        prefilled, first_rows, sequences, header, v_scale, sinks, o, lse, n, layout, tile
    )


@dataclass(frozen=True)
class RaggedMerge(RaggedLaunch):
    """Launch of ``ragged_merge``: partial results into the output of the prefill.

    A call that writes its cache gets that as a result too.
    """

    kernel = ragged_merge
    batching: ClassVar = sequential(
        "d_acc d_m d_l d_starts d_counts first_rows sequences header p_acc p_m p_l v_scale sink"
        " o_in cache_in lse_in"
    )

    def outputs(self):
        p, cache = self.problem.paged, self.shape("cache_in")
        o = struct(p.query_dtype, self.problem.rows, p.heads, p.dim)
        return {
            "o": o,
            "cache": None if cache is None else struct(p.key_dtype, *cache),
            "lse": struct("float32", self.problem.rows, p.heads) if p.return_lse else None,
        }

    def in_place(self):
        return {"o": "o_in", "cache": "cache_in", "lse": "lse_in"}

    @property
    def columns(self) -> int:
        """Columns of a head, as a power of two."""
        return max(16, power_of_two(self.problem.paged.dim))

    @property
    def parts(self) -> tuple[int, int]:
        """Partial results that a program loads at once, and its warps."""
        expected = expected_partials(self.decode_ranges, self.problem.paged.batch)
        return partials_at_once(self.columns, expected)

    def grid(self, target):
        p, t, warps = self.problem.paged, self.tiles, self.parts[1]
        tiles = (
            self.max_split_units * p.kv_heads * self.chunks * (t.rows // (ROWS_PER_WARP * warps))
        )
        # most calls have few split tiles: a program for each would mostly start and end
        most = target.cores * MERGE_WARPS * (2 if warps > 1 else 1) // warps
        return (min(p.batch * p.heads + tiles, most),)

    def options(self, target):
        return {"num_warps": self.parts[1], "num_stages": 1}

    def arguments(self, target):
        p, (parts, warps) = self.problem.paged, self.parts
        view = "int8" if ITEMSIZE[p.key_dtype] == 1 else None
        return {
            "decoded": Partial(*map(self.operand, ("d_acc", "d_m", "d_l"))),
            "prefilled": Partial(*map(self.operand, ("p_acc", "p_m", "p_l"))),
            "v_scale": self.scale("v_scale"),
            "sinks": self.sinks(),
            "cache_in": self.operand("cache_in", view),
            "cache": self.result("cache", view),
            "sizes": MergeSizes(
                p.batch, self.problem.rows, math.prod(self.shape("cache_in") or (0,)),
                self.decode_ranges,
            ),
            "layout": self.layout(),
            "tile": MergeTile(
                TOKENS=self.tiles.decode_tokens,
                SPLITS=self.tiles.decode.splits or 0,
                D=p.dim,
                COLUMNS=self.columns,
                PARTS=parts,
                TILE_ROWS=ROWS_PER_WARP * warps,
                LANES=self.lanes,
                COPIED=COPIED_PER_WARP * warps,
            ),
        }  # fmt: skip

"""Tables of a ragged call: which kernel attends to which sequence, and the tiles of each.

A ragged call mixes sequences of one new token, of a few, and of thousands, and only the device
knows which. One program makes these tables from row starts and context lengths; every other kernel
of the call reads them. ``ragged_schedule`` is the reference in NumPy.

Three groups of sequences have kernels of their own:

- *decode*: at most ``decode_tokens`` new tokens. Their rows are rows of one matmul, and their keys
  are split.
- *short prefill*: tiles of ``tile_tokens`` tokens and all query heads of a kv head. The keys of a
  tile are split where few tiles are long.
- *long prefill*: at least ``LongPrefill.min_rows`` new tokens, if a backend has a kernel for them.
  Its tiles are rows of one sequence and query head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

ROW_ALIGNMENT = 8  # rows: a work tile begins at a multiple of it
DECODE_LEAD = 2.0  # programs that decode, over those that would take as long as the prefill


class SequenceWork(NamedTuple):
    """Rows of ``RaggedSchedule.sequences``; a column is a sequence.

    Attributes:
        row_end: row past the last. Behind the valid sequences: more rows than there are.
        kv_len: context length.
        units_end: number of work units of this sequence and all before it. A unit is one tile of
            short prefill with one split of its keys.
        splits: splits of the keys of its tiles.
        slots_end: the same number of units, counting only sequences with several splits. Each of
            these units has a slot for its partial result.
    """

    row_end: Any
    kv_len: Any
    units_end: Any
    splits: Any
    slots_end: Any


class ScheduleHeader(NamedTuple):
    """Elements of ``RaggedSchedule.header``.

    Attributes:
        units: work units of short prefill.
        first_row, end_row: first row of any sequence and the row past the last.
        slots: slots of partial results.
        min_prefill_rows: new tokens from which a sequence is long prefill.
        prefill_decodes: whether the long-prefill kernel also has sequences of one new token.
    """

    units: Any
    first_row: Any
    end_row: Any
    slots: Any
    min_prefill_rows: Any
    prefill_decodes: Any


class WorkTile(NamedTuple):
    """Columns of ``RaggedSchedule.work_tiles``; a line is one tile of long prefill.

    Tiles stand in the order in which they are to be taken: the sequence with the longest context
    first, the tiles of a sequence together, its last rows first. Lines behind the last tile have
    ``tiles`` 0.

    Attributes:
        sequence: the sequence.
        row: first row of the tile, a multiple of ``ROW_ALIGNMENT``.
        first_row, end_row: first row of the sequence and the row past its last.
        kv_len: context length.
        tiles_before: tiles of the sequences before this one.
        tiles: tiles of the sequence.
        heads: query heads that are worked on together, because L2 holds their keys and values.
    """

    sequence: Any
    row: Any
    first_row: Any
    end_row: Any
    kv_len: Any
    tiles_before: Any
    tiles: Any
    heads: Any


class DecodeRow(NamedTuple):
    """Columns of ``RaggedSchedule.decode_rows``; a line is a sequence.

    Attributes:
        row: first row of the sequence.
        kv_len: context length if the long-prefill kernel decodes the sequence, else 0.
        programs: programs of that kernel that decode before they take tiles.
    """

    row: Any
    kv_len: Any
    programs: Any


def columns_of(table: type[Any]) -> Any:
    """Returns a tuple of a table's type that holds the index of each column."""
    return table(*range(len(table._fields)))


class RaggedSchedule(NamedTuple):
    """The tables of one call of ``n`` sequences, int32.

    Attributes:
        decode_lens, decode_begins, first_rows, decode_counts: ``[n]``. Of each sequence: context
            length if it is decoded, else 0; first visible key; first row; new tokens if it is
            decoded, else 0.
        sequences: ``[5, n]``, see ``SequenceWork``.
        header: ``[6]``, see ``ScheduleHeader``.
        work_tiles: ``[tiles + 1, 8]``, see ``WorkTile``. None without a long-prefill kernel.
        decode_rows: ``[n, 3]``, see ``DecodeRow``. None without a long-prefill kernel.
    """

    decode_lens: Any
    decode_begins: Any
    first_rows: Any
    decode_counts: Any
    sequences: Any
    header: Any
    work_tiles: Any = None
    decode_rows: Any = None


@dataclass(frozen=True)
class LongPrefill:
    """The sequences that a long-prefill kernel attends to, and its tiles.

    Attributes:
        min_rows: new tokens of a sequence from which its tiles are full.
        min_total_rows: total of the new tokens of such sequences from which the kernel pays. With
            fewer it has no sequences.
        block_q: rows of a tile.
        block_kv: keys of a step.
        decodes: whether it can also attend to sequences of one new token.
    """

    min_rows: int
    min_total_rows: int
    block_q: int
    block_kv: int
    decodes: bool = False

    def max_tiles(self, rows: int, sequences: int) -> int:
        """Returns the most tiles of any mix: one more for either end of a sequence."""
        return rows // self.block_q + 2 * min(sequences, rows // self.min_rows)


@dataclass(frozen=True)
class ScheduleSizes:
    """Sizes that a schedule depends on, besides starts and lengths.

    Attributes:
        rows: packed query rows.
        capacity: tokens that a row of the block table can name.
        heads, kv_heads: heads.
        block_kv: keys of a step of short prefill.
        tile_tokens: tokens of a tile of short prefill.
        decode_tokens: most new tokens of a sequence that is decoded.
        max_split_units: most work units of sequences with several splits.
        min_split_blocks: least steps of a split.
        cores: multiprocessors.
        l2_tokens: keys and values of one head that L2 holds.
        window_left: keys that a row sees before its own, or None for all.
        long: the long-prefill kernel, or None.
    """

    rows: int
    capacity: int
    heads: int
    kv_heads: int
    block_kv: int
    tile_tokens: int
    decode_tokens: int
    max_split_units: int
    min_split_blocks: int
    cores: int
    l2_tokens: int
    window_left: int | None = None
    long: LongPrefill | None = None


def ragged_schedule(
    starts: np.ndarray, lens: np.ndarray, valid: int, sizes: ScheduleSizes
) -> RaggedSchedule:
    """Returns the schedule of ``starts [n + 1]``, ``lens [n]`` and the number of valid sequences.

    Starts are clipped to the rows there are and to no less than the starts before them, so that
    every row belongs to at most one sequence, whatever the starts.
    """
    n, long = len(lens), sizes.long
    valid = min(max(valid, 0), n)
    is_valid = np.arange(n) < valid
    first_row = int(np.clip(starts[0], 0, sizes.rows)) if valid else 0
    first = np.where(is_valid, np.clip(starts[:-1], 0, sizes.rows), 0)
    first = np.maximum.accumulate(np.maximum(first, first_row))
    end = np.maximum(first, np.where(is_valid, np.minimum(starts[1:], sizes.rows), 0))
    kv_len = np.where(is_valid, np.clip(lens, 0, sizes.capacity), 0)
    count = np.where(is_valid, end - first, 0)

    min_prefill, prefill_decodes, programs = sizes.rows + 1, False, 0
    if long is not None and count[count >= long.min_rows].sum() >= long.min_total_rows:
        min_prefill = long.min_rows
        prefill_decodes, programs = _decode_programs(first, end, kv_len, count, sizes)

    is_tiled = (count > sizes.decode_tokens) & (count < min_prefill)
    tiles = np.where(is_tiled, _ceil_div(count, sizes.tile_tokens), 0)
    # the keys that the last tile of a sequence visits
    begin = np.zeros(n, np.int64)
    if sizes.window_left is not None:
        begin = kv_len - count + (tiles - 1) * sizes.tile_tokens - sizes.window_left
        begin = np.minimum(np.maximum(begin, 0), kv_len)
    steps = _ceil_div(kv_len, sizes.block_kv) - begin // sizes.block_kv
    split_steps = _ceil_div(int((tiles * steps).sum()), sizes.max_split_units)
    splits = np.maximum(steps // max(split_steps, sizes.min_split_blocks), 1)
    units = tiles * splits
    slots = np.where(splits > 1, units, 0)

    is_decoded = (count > 0) & (count <= sizes.decode_tokens)
    if prefill_decodes:
        is_decoded &= (count > 1) | (kv_len == 0)
    begins = np.zeros(n, np.int64)
    if sizes.window_left is not None:
        begins = np.maximum(kv_len - count - sizes.window_left, 0)
    row_end = np.where(is_valid, end, sizes.rows + 1)
    work = SequenceWork(row_end, kv_len, np.cumsum(units), splits, np.cumsum(slots))
    end_row = max([first_row, *end[is_valid]])
    header = ScheduleHeader(
        units.sum(), first_row, end_row, slots.sum(), min_prefill, prefill_decodes
    )
    schedule = RaggedSchedule(
        np.where(is_decoded, kv_len, 0), begins, first, np.where(is_decoded, count, 0),
        np.stack(work), np.stack([np.int64(x) for x in header]),
    )  # fmt: skip
    if long is not None:
        is_single = (count == 1) & prefill_decodes
        rows = DecodeRow(first, np.where(is_single, kv_len, 0), np.full(n, programs))
        schedule = schedule._replace(
            work_tiles=work_tiles(first, end, kv_len, count >= min_prefill, sizes),
            decode_rows=np.stack(rows, axis=1),
        )
    return RaggedSchedule(*(None if x is None else x.astype(np.int32) for x in schedule))


def work_tiles(
    first: np.ndarray, end: np.ndarray, kv_len: np.ndarray, is_long: np.ndarray,
    sizes: ScheduleSizes,
) -> np.ndarray:  # fmt: skip
    """Returns ``RaggedSchedule.work_tiles``, int32, from the rows of the sequences."""
    long, lines = sizes.long, []
    assert long is not None
    for i in np.argsort(-_ceil_div(kv_len, long.block_kv), kind="stable"):
        aligned = first[i] // ROW_ALIGNMENT * ROW_ALIGNMENT
        rows = range(aligned, end[i], long.block_q) if is_long[i] else ()
        # as many kv heads as L2 holds the keys of
        kv_heads = max(
            k
            for k in range(1, sizes.kv_heads + 1)
            if sizes.kv_heads % k == 0 and (k == 1 or kv_len[i] <= sizes.l2_tokens // k)
        )
        shared = (len(lines), len(rows), kv_heads * sizes.heads // sizes.kv_heads)
        lines += [WorkTile(i, row, first[i], end[i], kv_len[i], *shared) for row in reversed(rows)]
    # a tile's index is divided by ``heads``, so it is 1 behind the last tile too
    empty = WorkTile(0, 0, 0, 0, 0, 0, 0, heads=1)
    count = long.max_tiles(sizes.rows, len(first)) + 1
    return np.asarray(lines + [empty] * (count - len(lines)), np.int32)


def _decode_programs(
    first: np.ndarray, end: np.ndarray, kv_len: np.ndarray, count: np.ndarray, sizes: ScheduleSizes
) -> tuple[bool, int]:
    """Returns whether the long-prefill kernel decodes, and in how many programs.

    It does unless one of the sequences of one new token takes half as long as the whole call.
    """
    long = sizes.long
    assert long is not None
    if not long.decodes:
        return False, 0
    is_long, is_single = count >= long.min_rows, count == 1
    blocks = _ceil_div(kv_len, long.block_kv)
    # keys that programs visit, in steps of 128 rows
    visited = (count * (kv_len - 0.5 * count))[is_long].sum() * (sizes.heads / 128)
    visited += kv_len[is_single].sum() * (sizes.kv_heads / 2)
    longest = int(kv_len[is_single].max(initial=0))
    if 2.0 * longest * sizes.cores > visited:
        return False, 0
    decode_blocks = blocks[is_single].sum() * (sizes.kv_heads / 2)
    aligned = first // ROW_ALIGNMENT * ROW_ALIGNMENT
    tiles = _ceil_div(end - aligned, long.block_q)
    prefill_blocks = (tiles * (blocks - 0.5 * tiles + 1.0))[is_long].sum() * sizes.heads
    share = decode_blocks / max(decode_blocks + prefill_blocks, 1.0)
    return True, min(int(np.ceil(np.float32(share * sizes.cores * DECODE_LEAD))), sizes.cores)


def _ceil_div(a: Any, b: int) -> Any:
    return -(-a // b)

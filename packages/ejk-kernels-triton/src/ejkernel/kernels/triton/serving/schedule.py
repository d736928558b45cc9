"""Ragged attention, first kernel: the schedule of a call, from starts and lengths alone.

One program. ``types.serving.schedule`` describes the tables, with a reference in NumPy. Sequences
of at most TOKENS rows are decoded (``decode``), the others prefilled by tiles of TILE rows
(``prefill``). The keys of tiles are split where few tiles are long::

    split_blocks = max(min_split_blocks,
                       sum over sequences of tiles * longest / max_split_units)
    splits       = max(1, longest / split_blocks)

in blocks of keys. ``longest`` is the KV range of a sequence's last tile, so sequences with several
splits have at most ``max_split_units`` work units in all, and no split is twice as long as
``split_blocks``.

Rows: starts are clipped to the rows there are, and to no less than those before. So every row
belongs to one sequence at most, whatever the starts, and rows of none are those before the first
start and behind the last.

Long prefill is another kernel's: with MIN_ROWS > 0 it has the sequences of at least MIN_ROWS rows,
if these have ``min_total_rows`` in all. With DECODES it also decodes the sequences of one row, if
none of them takes half as long as all its work on the GPU's ``cores``: ``programs`` of it decode,
twice as many as would take as long as all others.

The queue of its tiles is in the order of the keys that they read: sequence by sequence, that with
the longest KV range first; of a sequence as many kv heads at a time as L2 holds, and of these tile
by tile, the longest first. So programs that run together read the same keys, and the last ones are
short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import struct
from ejkernel.kernels.triton.serving.groups import Operand
from ejkernel.kernels.triton.serving.launch import RaggedLaunch, sequential
from ejkernel.types.serving.schedule import (
    DECODE_LEAD,
    ROW_ALIGNMENT,
    DecodeRow,
    ScheduleHeader,
    SequenceWork,
    WorkTile,
    columns_of,
)

L2_BYTES = 16 << 20  # keys and values that programs iterate over together
SEQUENCES = tl.constexpr(64)  # sequences whose tiles are queued together
TILES = tl.constexpr(16)  # tiles of each of them
EMPTY_LINES = tl.constexpr(128)  # lines of the queue that are cleared together
ALIGNED = tl.constexpr(ROW_ALIGNMENT)
LEAD = tl.constexpr(DECODE_LEAD)
WORK_COLUMNS, DECODE_COLUMNS = (tl.constexpr(len(row._fields)) for row in (WorkTile, DecodeRow))

# columns of the tables: ``SequenceWork``, ``ScheduleHeader``, ``WorkTile`` and ``DecodeRow``
ROW_END, KV_LEN, UNITS_END, SPLITS, SLOTS_END = map(tl.constexpr, columns_of(SequenceWork))
UNITS, FIRST_ROW, END_ROW, SLOTS, MIN_PREFILL_ROWS, PREFILL_DECODES = map(
    tl.constexpr, columns_of(ScheduleHeader)
)
(
    TILE_SEQUENCE, TILE_ROW, TILE_FIRST_ROW, TILE_END_ROW, TILE_KV_LEN, TILES_BEFORE, TILE_COUNT,
    TILE_HEADS,
) = map(tl.constexpr, columns_of(WorkTile))  # fmt: skip
DECODE_ROW, DECODE_KV_LEN, DECODE_PROGRAMS = map(tl.constexpr, columns_of(DecodeRow))
# rows of the list of long sequences, which only this kernel reads
LONG_SEQUENCE, LONG_FIRST, LONG_END, LONG_KV_LEN, LONG_TILES = map(tl.constexpr, range(5))


@triton.jit
def find_sequence(number, ends, n, LANES: tl.constexpr):
    """Returns (sequence, end of the one before) of a number counted by the ends ``[n]``."""
    lane = tl.arange(0, LANES)
    sequence = 0
    before = 0
    for base in range(0, n, LANES):
        i = base + lane
        end = tl.load(ends + i, mask=i < n, other=2147483647)
        is_done = end <= number
        sequence += tl.sum(is_done.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(is_done, end, 0), 0))
    return sequence, before


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


class SequenceRows(NamedTuple):
    """First row, row past the last, length and number of rows, ``[LANES]`` sequences each."""

    first: Operand
    last: Operand
    length: Operand
    count: Operand


@triton.jit
def _load_sequences(i, starts, lens, valid, min_start, sizes):
    """Returns ``SequenceRows`` of sequences ``i``; none of them begins before ``min_start``."""
    is_valid = i < valid
    first = tl.load(starts + i, mask=is_valid, other=0)
    last = tl.load(starts + i + 1, mask=is_valid, other=0)
    length = tl.load(lens + i, mask=is_valid, other=0)
    first = tl.minimum(tl.maximum(first, 0), sizes.rows)
    first = tl.maximum(tl.associative_scan(first, 0, _larger), min_start)
    last = tl.maximum(first, tl.minimum(last, sizes.rows))
    length = tl.minimum(tl.maximum(length, 0), sizes.capacity)
    return SequenceRows(first, last, length, tl.where(is_valid, last - first, 0))


@triton.jit
def _pass_sequences(loaded, i, starts, lens, valid, min_start, sizes, tile):
    """Returns ``SequenceRows`` of sequences ``i``: with SINGLE_PASS ``loaded``, else loads them."""
    sequence_rows = loaded
    if not tile.SINGLE_PASS:
        sequence_rows = _load_sequences(i, starts, lens, valid, min_start, sizes)
    return sequence_rows


@triton.jit
def _count_prefill_tiles(length, count, max_rows, left, tile):
    """Returns tiles and blocks of the last one, 0 for sequences of more than ``max_rows`` rows."""
    tiles = tl.where((count > tile.TOKENS) & (count <= max_rows), tl.cdiv(count, tile.TILE), 0)
    begin = length * 0
    if tile.WINDOW:
        # of the first row of the last tile
        begin = tl.maximum(length - count + (tiles - 1) * tile.TILE - left, 0)
    return tiles, tl.cdiv(length, tile.BLOCK) - tl.minimum(begin, length) // tile.BLOCK


@triton.jit
def _count_long_tiles(first, last, BLOCK_Q: tl.constexpr):
    """Returns the tiles of rows first .. last, which begin at a multiple of ALIGNED."""
    return tl.cdiv(last - first // ALIGNED * ALIGNED, BLOCK_Q)


@triton.jit
def _queue_tiles(
    long_sequences, long_count, n, work_tiles, max_tiles, BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, L2_TOKENS: tl.constexpr,
):  # fmt: skip
    """Writes ``max_tiles + 1`` lines of ``WorkTile``."""
    lane = tl.arange(0, SEQUENCES)
    total = 0
    for base in range(0, long_count, SEQUENCES):
        a = base + lane
        is_valid = a < long_count
        sequence = tl.load(long_sequences + LONG_SEQUENCE * n + a, mask=is_valid, other=0)
        first = tl.load(long_sequences + LONG_FIRST * n + a, mask=is_valid, other=0)
        last = tl.load(long_sequences + LONG_END * n + a, mask=is_valid, other=0)
        length = tl.load(long_sequences + LONG_KV_LEN * n + a, mask=is_valid, other=0)
        tiles = tl.load(long_sequences + LONG_TILES * n + a, mask=is_valid, other=0)
        blocks = tl.cdiv(length, BLOCK_KV)
        before = tl.zeros([SEQUENCES], tl.int32)
        for other in range(0, long_count, SEQUENCES):
            b = other + lane
            other_len = tl.load(long_sequences + LONG_KV_LEN * n + b, mask=b < long_count, other=0)
            other_blocks = tl.cdiv(other_len, BLOCK_KV)
            ahead = other_blocks[None, :] > blocks[:, None]
            ahead = ahead | ((other_blocks[None, :] == blocks[:, None]) & (b[None, :] < a[:, None]))
            count = tl.load(long_sequences + LONG_TILES * n + b, mask=b < long_count, other=0)
            before += tl.sum(tl.where(ahead, count[None, :], 0), 1)
        heads = tl.full([SEQUENCES], HEADS // KV_HEADS, tl.int32)
        for k in tl.static_range(2, KV_HEADS + 1):
            if KV_HEADS % k == 0:
                heads = tl.where(length <= L2_TOKENS // k, HEADS // KV_HEADS * k, heads)
        begin = first // ALIGNED * ALIGNED
        for first_tile in range(0, tl.max(tiles, 0), TILES):
            t = first_tile + tl.arange(0, TILES)[None, :]
            inside = t < tiles[:, None]
            line = work_tiles + ((before + tiles - 1)[:, None] - t) * WORK_COLUMNS
            tl.store(line + TILE_SEQUENCE, sequence[:, None], mask=inside)
            tl.store(line + TILE_ROW, begin[:, None] + t * BLOCK_Q, mask=inside)
            tl.store(line + TILE_FIRST_ROW, first[:, None], mask=inside)
            tl.store(line + TILE_END_ROW, last[:, None], mask=inside)
            tl.store(line + TILE_KV_LEN, length[:, None], mask=inside)
            tl.store(line + TILES_BEFORE, before[:, None], mask=inside)
            tl.store(line + TILE_COUNT, tiles[:, None], mask=inside)
            tl.store(line + TILE_HEADS, heads[:, None], mask=inside)
        total += tl.sum(tiles, 0)
    column = tl.arange(0, WORK_COLUMNS)[None, :]
    for base in range(total, max_tiles + 1, EMPTY_LINES):
        line = base + tl.arange(0, EMPTY_LINES)[:, None]
        # indices of the queue are divided by the heads that are worked on together
        empty = (column == TILE_HEADS).to(tl.int32) + tl.zeros(
            [EMPTY_LINES, WORK_COLUMNS], tl.int32
        )
        tl.store(work_tiles + line * WORK_COLUMNS + column, empty, mask=line <= max_tiles)


class DecodedSequences(NamedTuple):
    """Results for ``decode``: length, first visible key, first row, number of rows."""

    lens: Operand
    begins: Operand
    rows: Operand
    counts: Operand


class LongPrefillTables(NamedTuple):
    """Tables of another kernel, None without one: see ``types.serving.schedule``."""

    sequences: Operand
    work_tiles: Operand
    decode_rows: Operand


class ScheduleSizes(NamedTuple):
    """Sizes of a call, as in ``types.serving.schedule``.

    ``left``: keys seen before a row, with WINDOW. ``min_total_rows``, ``max_tiles``: of long
    prefill.
    """

    n: int
    rows: int
    capacity: int
    left: int
    max_split_units: int
    min_split_blocks: int
    min_total_rows: int
    cores: int
    max_tiles: int


class ScheduleTile(NamedTuple):
    """Constants of ``prefill`` and of long prefill.

    SINGLE_PASS: all sequences are looked at together. COUNT: index in ``valid`` of the number of
    valid sequences.
    """

    WINDOW: bool
    BLOCK: int
    TOKENS: int
    TILE: int
    MIN_ROWS: int
    DECODES: bool
    HEADS: int
    KV_HEADS: int
    BLOCK_Q: int
    BLOCK_KV: int
    L2_TOKENS: int
    COUNT: int
    SINGLE_PASS: bool


@triton.jit
def _choose_long_prefill(loaded, starts, lens, valid, first_row, sizes, LANES: tl.constexpr, tile):
    """Returns (most rows of a sequence that ``prefill`` takes, decodes, programs that decode).

    ``loaded``: the ``SequenceRows`` of all sequences, with SINGLE_PASS.
    """
    lane = tl.arange(0, LANES)
    long_rows = 0
    # KV tokens that programs of long prefill iterate over, in steps of 128 rows
    iterated = 0.0
    # blocks of keys that the programs of its tiles, and its programs that decode, work on
    tile_blocks = 0.0
    decode_blocks = 0.0
    longest_decode = 0
    min_start = first_row
    for base in range(0, LANES if tile.SINGLE_PASS else sizes.n, LANES):
        first, last, length, count = _pass_sequences(
            loaded, base + lane, starts, lens, valid, min_start, sizes, tile
        )
        long_rows += tl.sum(tl.where(count >= tile.MIN_ROWS, count, 0), 0)
        if tile.DECODES:
            seen = length.to(tl.float32) - 0.5 * count
            steps = tl.where(count >= tile.MIN_ROWS, count * seen * (tile.HEADS / 128), 0.0)
            decode_len = tl.where(count == 1, length, 0)
            iterated += tl.sum(steps + decode_len.to(tl.float32) * (tile.KV_HEADS / 2), 0)
            longest_decode = tl.maximum(longest_decode, tl.max(decode_len, 0))
            blocks = tl.cdiv(length, tile.BLOCK_KV).to(tl.float32)
            decode_blocks += tl.sum(tl.where(count == 1, blocks, 0.0), 0) * (tile.KV_HEADS / 2)
            tiles = _count_long_tiles(first, last, tile.BLOCK_Q).to(tl.float32)
            tiles = tl.where(count >= tile.MIN_ROWS, tiles * (blocks - 0.5 * tiles + 1.0), 0.0)
            tile_blocks += tl.sum(tiles, 0) * tile.HEADS
        min_start = tl.max(first, 0)
    max_rows = tl.where(long_rows >= sizes.min_total_rows, tile.MIN_ROWS - 1, sizes.rows)
    decodes = 0
    programs = 0
    if tile.DECODES:
        is_short = 2.0 * longest_decode * sizes.cores <= iterated
        decodes = tl.where((long_rows >= sizes.min_total_rows) & is_short, 1, 0)
        share = decode_blocks / tl.maximum(decode_blocks + tile_blocks, 1.0)
        programs = share * sizes.cores * LEAD
        floor = programs.to(tl.int32)
        programs = tl.minimum(tl.where(programs > floor, floor + 1, floor), sizes.cores)
        programs = programs * decodes
    return max_rows, decodes, programs


@triton.jit
def _store_long_prefill(
    tables, i, sequence_rows, long_count, max_rows, decodes, programs, n, BLOCK_Q: tl.constexpr
):
    """Stores the sequences ``i`` of long prefill behind ``long_count`` others, and decode rows.

    Returns the number of these sequences.
    """
    first, last, length, count = sequence_rows
    is_long = count > max_rows
    target = tables.sequences + long_count + tl.cumsum(is_long.to(tl.int32), 0) - 1
    tl.store(target + LONG_SEQUENCE * n, i, mask=is_long)
    tl.store(target + LONG_FIRST * n, first, mask=is_long)
    tl.store(target + LONG_END * n, last, mask=is_long)
    tl.store(target + LONG_KV_LEN * n, length, mask=is_long)
    tl.store(target + LONG_TILES * n, _count_long_tiles(first, last, BLOCK_Q), mask=is_long)
    is_single = (count == 1) & (decodes > 0)
    line = tables.decode_rows + DECODE_COLUMNS * i
    tl.store(line + DECODE_ROW, first, mask=i < n)
    tl.store(line + DECODE_KV_LEN, tl.where(is_single, length, 0), mask=i < n)
    tl.store(line + DECODE_PROGRAMS, programs, mask=i < n)
    return tl.sum(is_long.to(tl.int32), 0)


@triton.jit
def ragged_schedule(
    starts, lens, valid, decode, sequences, header, long_prefill, sizes, LANES: tl.constexpr, tile
):
    """Writes the tables of ``types.serving.schedule.RaggedSchedule``."""
    n, rows = sizes.n, sizes.rows
    lane = tl.arange(0, LANES)
    valid = tl.minimum(tl.maximum(tl.load(valid + tile.COUNT), 0), n)
    first_row = tl.load(starts)
    first_row = tl.where(valid > 0, tl.minimum(tl.maximum(first_row, 0), rows), 0)

    loaded = None
    if tile.SINGLE_PASS:
        loaded = _load_sequences(lane, starts, lens, valid, first_row, sizes)
    max_rows = rows  # of a sequence that ``prefill`` takes
    decodes = 0
    programs = 0
    if tile.MIN_ROWS > 0:
        max_rows, decodes, programs = _choose_long_prefill(
            loaded, starts, lens, valid, first_row, sizes, LANES, tile
        )

    total = tl.zeros([], tl.int64)
    min_start = first_row
    for base in range(0, LANES if tile.SINGLE_PASS else n, LANES):
        first, last, length, count = _pass_sequences(
            loaded, base + lane, starts, lens, valid, min_start, sizes, tile
        )
        tiles, longest = _count_prefill_tiles(length, count, max_rows, sizes.left, tile)
        total += tl.sum(tiles.to(tl.int64) * longest, 0)
        min_start = tl.max(first, 0)
    split_blocks = tl.maximum(
        (total + sizes.max_split_units - 1) // sizes.max_split_units, sizes.min_split_blocks
    ).to(tl.int32)

    units = 0
    slots = 0
    long_count = 0
    min_start = first_row
    end_row = first_row
    for base in range(0, LANES if tile.SINGLE_PASS else n, LANES):
        i = base + lane
        inside = i < n
        sequence_rows = _pass_sequences(loaded, i, starts, lens, valid, min_start, sizes, tile)
        first, last, length, count = sequence_rows
        tiles, longest = _count_prefill_tiles(length, count, max_rows, sizes.left, tile)
        min_start = tl.max(first, 0)
        end_row = tl.maximum(end_row, tl.max(tl.where(i < valid, last, 0), 0))
        splits = tl.maximum(longest // split_blocks, 1)
        sequence_units = tiles * splits
        sequence_slots = tl.where(splits > 1, sequence_units, 0)

        is_decode = (count > 0) & (count <= tile.TOKENS)
        if tile.DECODES:
            is_decode = is_decode & ((decodes == 0) | (count > 1) | (length == 0))
        begin = length * 0
        if tile.WINDOW:
            begin = tl.maximum(length - count - sizes.left, 0)
        tl.store(decode.lens + i, tl.where(is_decode, length, 0), mask=inside)
        tl.store(decode.begins + i, begin, mask=inside)
        tl.store(decode.rows + i, first, mask=inside)
        tl.store(decode.counts + i, tl.where(is_decode, count, 0), mask=inside)
        tl.store(sequences + ROW_END * n + i, tl.where(i < valid, last, rows + 1), mask=inside)
        tl.store(sequences + KV_LEN * n + i, length, mask=inside)
        tl.store(sequences + UNITS_END * n + i, units + tl.cumsum(sequence_units, 0), mask=inside)
        tl.store(sequences + SPLITS * n + i, splits, mask=inside)
        tl.store(sequences + SLOTS_END * n + i, slots + tl.cumsum(sequence_slots, 0), mask=inside)
        units += tl.sum(sequence_units, 0)
        slots += tl.sum(sequence_slots, 0)
        if tile.MIN_ROWS > 0:
            long_count += _store_long_prefill(
                long_prefill, i, sequence_rows, long_count, max_rows, decodes, programs, n,
                tile.BLOCK_Q,
            )  # fmt: skip
    tl.store(header + UNITS, units)
    tl.store(header + FIRST_ROW, first_row)
    tl.store(header + END_ROW, end_row)
    tl.store(header + SLOTS, slots)
    tl.store(header + MIN_PREFILL_ROWS, max_rows + 1)
    tl.store(header + PREFILL_DECODES, decodes)
    if tile.MIN_ROWS > 0:
        tl.debug_barrier()  # a thread reads lines of the list that another one has written
        _queue_tiles(
            long_prefill.sequences, long_count, n, long_prefill.work_tiles, sizes.max_tiles,
            tile.BLOCK_Q, tile.BLOCK_KV, tile.HEADS, tile.KV_HEADS, tile.L2_TOKENS
        )  # fmt: skip


@dataclass(frozen=True)
class RaggedScheduleLaunch(RaggedLaunch):
    """Launch of ``ragged_schedule``; the results are tables of ``types.serving.schedule``.

    With long prefill these include the sequences and tiles of another kernel, and the single rows
    that it decodes.
    """

    kernel = ragged_schedule
    batching: ClassVar = sequential("starts lens valid")

    @property
    def max_tiles(self) -> int:
        """Tiles of long prefill in any mix of sequences."""
        p, long = self.problem, self.tiles.long_prefill
        return 0 if long is None else long.max_tiles(p.rows, p.sequences)

    def outputs(self):
        n, long = self.problem.sequences, self.tiles.long_prefill is not None
        row = struct("int32", n)
        tiles = struct("int32", self.max_tiles + 1, len(WorkTile._fields))
        return {
            **dict.fromkeys(("d_lens", "d_begins", "d_rows", "d_counts"), row),
            "sequences": struct("int32", len(SequenceWork._fields), n),
            "header": struct("int32", len(ScheduleHeader._fields)),
            "long_sequences": struct("int32", 5, n) if long else None,
            "work_tiles": tiles if long else None,
            "decode_rows": struct("int32", n, len(DecodeRow._fields)) if long else None,
        }

    def grid(self, target):
        return (1,)

    def options(self, target):
        return {"num_warps": 4, "num_stages": 1}

    def arguments(self, target):
        p, t, long = self.problem.paged, self.tiles, self.tiles.long_prefill
        decode = ("d_lens", "d_begins", "d_rows", "d_counts")
        tables = ("long_sequences", "work_tiles", "decode_rows")
        valid = self.shape("valid") or (1,)
        return {
            "decode": DecodedSequences(*map(self.result, decode)),
            "long_prefill": LongPrefillTables(*map(self.result, tables)),
            "sizes": ScheduleSizes(
                n=p.batch,
                rows=self.problem.rows,
                capacity=p.capacity,
                left=p.window_left or 0,
                max_split_units=self.max_split_units,
                min_split_blocks=-(-t.min_split_keys // t.block),
                min_total_rows=long.min_total_rows if long else 0,
                cores=target.cores,
                max_tiles=self.max_tiles,
            ),
            "LANES": self.lanes,
            "tile": ScheduleTile(
                WINDOW=p.window_left is not None,
                BLOCK=t.block,
                TOKENS=t.decode_tokens,
                TILE=t.tile,
                MIN_ROWS=long.min_rows if long else 0,
                DECODES=long is not None and long.decodes,
                HEADS=p.heads,
                KV_HEADS=p.kv_heads,
                BLOCK_Q=long.block_q if long else 1,
                BLOCK_KV=long.block_kv if long else 1,
                L2_TOKENS=L2_BYTES // p.token_bytes,
                COUNT=valid[0] - 1,  # the last element is the number of valid sequences
                SINGLE_PASS=p.batch <= self.lanes,
            ),
        }

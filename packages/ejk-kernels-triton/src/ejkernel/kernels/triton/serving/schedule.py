"""Ragged attention, first kernel: which sequence is done how, from starts and lengths alone.

One program. Sequences of at most TOKENS rows are decoded (``decode``), the
others prefilled by tiles of TILE rows, whose keys are cut into parts where few tiles are long::

    part = max(LEAST, sum over sequences of tiles * longest / FAIR)   blocks of keys
    parts = longest / part, rounded down, at least 1

``longest`` is the walk of a sequence's last tile, so sequences cut into parts have at most FAIR of
them in all, and no part is twice as long as ``part``.

Rows: starts are clipped to the rows there are, and to no less than those before. So every row
belongs to one sequence at most, whatever the starts, and rows of none are those before the first
start and behind the last.

``work [5, n]``: row past the last (more than there are from the last sequence on), context length,
pieces (tiles times parts) up to and with this sequence, parts, slots up to and with this sequence
(pieces of sequences cut into parts). ``facts [6]``: pieces, first and last row of any, slots, from
how many rows on a sequence is another kernel's, and whether those of one row are too. The first is
LONG if such sequences have ``enough`` rows in all, else more than there are. LONG 0: there is no
other kernel. SINGLE: it takes those of one row beside long ones, where none of them is half as long
as all takes (``cores`` programs). Its sequences and their tiles are listed besides (``longs``,
``lines``), and those of one row that it takes: ``own [n, 3]`` has the row of
each, its length or 0, and how many of its programs decode, twice those that would take as long as
all others.

The queue of the other kernel's tiles is in the order of what they read: sequence by sequence, that
with the longest KV range first; of a sequence as many kv heads at a time as the near L2 holds, and
of these tile by tile, the longest first. So programs that run together read the same keys, and the
last ones taken are short. ``longs [5, n]``: of the other kernel's sequences number, first row, row
past the last, length and tiles, side by side. ``types.serving.schedule.WorkTile`` names the columns
of ``lines``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import struct
from ejkernel.kernels.triton.serving.groups import Given
from ejkernel.kernels.triton.serving.launch import RaggedLaunch, sequential

NEAR_BYTES = 16 << 20  # keys and values that programs loop over together
EARLY = tl.constexpr(2.0)  # programs that decode, over those that would take as long as all others
ALIGNED = tl.constexpr(8)  # rows: a tile begins at a multiple of it
SEQUENCES = tl.constexpr(64)  # looked at together
TILES = tl.constexpr(16)  # of each of them
LINES = tl.constexpr(128)  # empty lines written at a time


@triton.jit
def find_sequence(x, until, n, LANES: tl.constexpr):
    """(sequence, what those before it have) of number ``x``, counted by ``until [n]``."""
    lane = tl.arange(0, LANES)
    found = 0
    before = 0
    for base in range(0, n, LANES):
        i = base + lane
        u = tl.load(until + i, mask=i < n, other=2147483647)
        done = u <= x
        found += tl.sum(done.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(done, u, 0), 0))
    return found, before


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _sequences(i, starts, lens, valid, top, rows, capacity):
    """Returns first row, row past the last, length and rows of sequences ``i``.

    None of them begins before ``top``.
    """
    here = i < valid
    first = tl.load(starts + i, mask=here, other=0)
    last = tl.load(starts + i + 1, mask=here, other=0)
    length = tl.load(lens + i, mask=here, other=0)
    first = tl.minimum(tl.maximum(first, 0), rows)
    first = tl.maximum(tl.associative_scan(first, 0, _larger), top)
    last = tl.maximum(first, tl.minimum(last, rows))
    length = tl.minimum(tl.maximum(length, 0), capacity)
    return first, last, length, tl.where(here, last - first, 0)


@triton.jit
def _tiles(
    length, count, most, left, WINDOW: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Returns tiles and blocks of the last one, 0 for sequences of more than ``most`` rows."""
    tiles = tl.where((count > TOKENS) & (count <= most), tl.cdiv(count, TILE), 0)
    begin = length * 0
    if WINDOW:
        # of the first row of the last tile
        begin = tl.maximum(length - count + (tiles - 1) * TILE - left, 0)
    return tiles, tl.cdiv(length, BLOCK) - tl.minimum(begin, length) // BLOCK


class DecodeRows(NamedTuple):
    """Returns of decoded sequences: length, first visible key, first row, number of rows."""

    lens: Given
    begins: Given
    rows: Given
    counts: Given


class LongPrefill(NamedTuple):
    """Tables of another kernel, None without one: see ``types.serving.schedule``."""

    sequences: Given
    work_tiles: Given
    decode_rows: Given


class ScheduleSizes(NamedTuple):
    """Sizes of a call; ``left``: keys seen before a row, with WINDOW.

    ``fair``, ``least``: partial results of split tiles, and blocks of keys in one at least.
    ``enough``: rows that another kernel needs; ``most_tiles``: tiles that it may have.
    """

    n: int
    rows: int
    capacity: int
    left: int
    fair: int
    least: int
    enough: int
    cores: int
    most_tiles: int


class ScheduleTile(NamedTuple):
    """Constants. ONCE: all sequences are looked at at once. COUNT: index in ``valid``."""

    WINDOW: bool
    BLOCK: int
    TOKENS: int
    TILE: int
    LONG: int
    SINGLE: bool
    HEADS: int
    KV_HEADS: int
    BLOCK_Q: int
    BLOCK_KV: int
    NEAR: int
    COUNT: int
    ONCE: bool


@triton.jit
def _count_tiles(first, last, BLOCK_Q: tl.constexpr):
    """Returns the tiles of rows first .. last, which begin at a multiple of ALIGNED."""
    return tl.cdiv(last - first // ALIGNED * ALIGNED, BLOCK_Q)


@triton.jit
def _queue_tiles(
    longs, found, n, lines, most, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Writes ``most + 1`` lines. NEAR: keys of one head that the near L2 holds."""
    lane = tl.arange(0, SEQUENCES)
    total = 0
    for base in range(0, found, SEQUENCES):
        a = base + lane
        here = a < found
        sequence = tl.load(longs + a, mask=here, other=0)
        first = tl.load(longs + n + a, mask=here, other=0)
        last = tl.load(longs + 2 * n + a, mask=here, other=0)
        length = tl.load(longs + 3 * n + a, mask=here, other=0)
        tiles = tl.load(longs + 4 * n + a, mask=here, other=0)
        blocks = tl.cdiv(length, BLOCK_KV)
        before = tl.zeros([SEQUENCES], tl.int32)
        for other in range(0, found, SEQUENCES):
            b = other + lane
            theirs = tl.cdiv(tl.load(longs + 3 * n + b, mask=b < found, other=0), BLOCK_KV)
            ahead = theirs[None, :] > blocks[:, None]
            ahead = ahead | ((theirs[None, :] == blocks[:, None]) & (b[None, :] < a[:, None]))
            count = tl.load(longs + 4 * n + b, mask=b < found, other=0)
            before += tl.sum(tl.where(ahead, count[None, :], 0), 1)
        together = tl.full([SEQUENCES], HEADS // KV_HEADS, tl.int32)
        for k in tl.static_range(2, KV_HEADS + 1):
            if KV_HEADS % k == 0:
                together = tl.where(length <= NEAR // k, HEADS // KV_HEADS * k, together)
        begin = first // ALIGNED * ALIGNED
        for some in range(0, tl.max(tiles, 0), TILES):
            t = some + tl.arange(0, TILES)[None, :]
            inside = t < tiles[:, None]
            at = lines + ((before + tiles - 1)[:, None] - t) * 8
            tl.store(at, sequence[:, None], mask=inside)
            tl.store(at + 1, begin[:, None] + t * BLOCK_Q, mask=inside)
            tl.store(at + 2, first[:, None], mask=inside)
            tl.store(at + 3, last[:, None], mask=inside)
            tl.store(at + 4, length[:, None], mask=inside)
            tl.store(at + 5, before[:, None], mask=inside)
            tl.store(at + 6, tiles[:, None], mask=inside)
            tl.store(at + 7, together[:, None], mask=inside)
        total += tl.sum(tiles, 0)
    column = tl.arange(0, 8)[None, :]
    for base in range(total, most + 1, LINES):
        m = base + tl.arange(0, LINES)[:, None]
        # indices of the queue are divided by the heads that are worked on together
        empty = (column == 7).to(tl.int32) + tl.zeros([LINES, 8], tl.int32)
        tl.store(lines + m * 8 + column, empty, mask=m <= most)


@triton.jit
def ragged_schedule(
    starts, lens, valid, decode, work, facts, long_prefill, sizes, LANES: tl.constexpr, tile
):
    """Writes the schedule of a call, see above."""
    n, rows, capacity, left = sizes.n, sizes.rows, sizes.capacity, sizes.left
    lane = tl.arange(0, LANES)
    valid = tl.minimum(tl.maximum(tl.load(valid + tile.COUNT), 0), n)
    edge = tl.load(starts)
    edge = tl.where(valid > 0, tl.minimum(tl.maximum(edge, 0), rows), 0)

    if tile.ONCE:  # a look at all sequences serves every pass
        first, last, length, count = _sequences(lane, starts, lens, valid, edge, rows, capacity)
    most = rows
    single = 0
    decoding = 0
    if tile.LONG > 0:
        found = 0
        # keys that programs of the other kernel iterate over, in steps of 128 rows
        walked = 0.0
        # blocks of keys that the programs of its tiles, and those that decode, work on
        long_blocks = 0.0
        own_blocks = 0.0
        longest_single = 0
        top = edge
        for base in range(0, LANES if tile.ONCE else n, LANES):
            if not tile.ONCE:
                first, last, length, count = _sequences(
                    base + lane, starts, lens, valid, top, rows, capacity
                )
            found += tl.sum(tl.where(count >= tile.LONG, count, 0), 0)
            if tile.SINGLE:
                seen = length.to(tl.float32) - 0.5 * count
                steps = tl.where(count >= tile.LONG, count * seen * (tile.HEADS / 128), 0.0)
                alone = tl.where(count == 1, length, 0)
                walked += tl.sum(steps + alone.to(tl.float32) * (tile.KV_HEADS / 2), 0)
                longest_single = tl.maximum(longest_single, tl.max(alone, 0))
                blocks = tl.cdiv(length, tile.BLOCK_KV).to(tl.float32)
                own_blocks += tl.sum(tl.where(count == 1, blocks, 0.0), 0) * (tile.KV_HEADS / 2)
                mine = _count_tiles(first, last, tile.BLOCK_Q).to(tl.float32)
                mine = tl.where(count >= tile.LONG, mine * (blocks - 0.5 * mine + 1.0), 0.0)
                long_blocks += tl.sum(mine, 0) * tile.HEADS
            top = tl.max(first, 0)
        most = tl.where(found >= sizes.enough, tile.LONG - 1, rows)
        if tile.SINGLE:
            fits = 2.0 * longest_single * sizes.cores <= walked
            single = tl.where((found >= sizes.enough) & fits, 1, 0)
            share = own_blocks / tl.maximum(own_blocks + long_blocks, 1.0)
            decoding = share * sizes.cores * EARLY
            down = decoding.to(tl.int32)
            decoding = tl.minimum(tl.where(decoding > down, down + 1, down), sizes.cores) * single

    total = tl.zeros([], tl.int64)
    top = edge
    for base in range(0, LANES if tile.ONCE else n, LANES):
        if not tile.ONCE:
            first, last, length, count = _sequences(
                base + lane, starts, lens, valid, top, rows, capacity
            )
        tiles, longest = _tiles(
            length, count, most, left, tile.WINDOW, tile.BLOCK, tile.TOKENS, tile.TILE
        )
        total += tl.sum(tiles.to(tl.int64) * longest, 0)
        top = tl.max(first, 0)
    part = tl.maximum((total + sizes.fair - 1) // sizes.fair, sizes.least).to(tl.int32)

    pieces = 0
    slots = 0
    listed = 0
    top = edge
    end = edge
    for base in range(0, LANES if tile.ONCE else n, LANES):
        i = base + lane
        inside = i < n
        if not tile.ONCE:
            first, last, length, count = _sequences(i, starts, lens, valid, top, rows, capacity)
        tiles, longest = _tiles(
            length, count, most, left, tile.WINDOW, tile.BLOCK, tile.TOKENS, tile.TILE
        )
        top = tl.max(first, 0)
        end = tl.maximum(end, tl.max(tl.where(i < valid, last, 0), 0))
        parts = tl.maximum(longest // part, 1)
        mine = tiles * parts
        kept = tl.where(parts > 1, mine, 0)

        few = (count > 0) & (count <= tile.TOKENS)
        if tile.SINGLE:
            few = few & ((single == 0) | (count > 1) | (length == 0))
        begin = length * 0
        if tile.WINDOW:
            begin = tl.maximum(length - count - left, 0)
        tl.store(decode.lens + i, tl.where(few, length, 0), mask=inside)
        tl.store(decode.begins + i, begin, mask=inside)
        tl.store(decode.rows + i, first, mask=inside)
        tl.store(decode.counts + i, tl.where(few, count, 0), mask=inside)
        tl.store(work + i, tl.where(i < valid, last, rows + 1), mask=inside)
        tl.store(work + n + i, length, mask=inside)
        tl.store(work + 2 * n + i, pieces + tl.cumsum(mine, 0), mask=inside)
        tl.store(work + 3 * n + i, parts, mask=inside)
        tl.store(work + 4 * n + i, slots + tl.cumsum(kept, 0), mask=inside)
        pieces += tl.sum(mine, 0)
        slots += tl.sum(kept, 0)
        if tile.LONG > 0:
            long = count > most
            at = long_prefill.sequences + listed + tl.cumsum(long.to(tl.int32), 0) - 1
            tl.store(at, i, mask=long)
            tl.store(at + n, first, mask=long)
            tl.store(at + 2 * n, last, mask=long)
            tl.store(at + 3 * n, length, mask=long)
            tl.store(at + 4 * n, _count_tiles(first, last, tile.BLOCK_Q), mask=long)
            listed += tl.sum(long.to(tl.int32), 0)
            alone = (count == 1) & (single > 0)
            tl.store(long_prefill.decode_rows + 3 * i, first, mask=inside)
            tl.store(long_prefill.decode_rows + 3 * i + 1, tl.where(alone, length, 0), mask=inside)
            tl.store(long_prefill.decode_rows + 3 * i + 2, decoding, mask=inside)
    tl.store(facts, pieces)
    tl.store(facts + 1, edge)
    tl.store(facts + 2, end)
    tl.store(facts + 3, slots)
    tl.store(facts + 4, most + 1)
    tl.store(facts + 5, single)
    if tile.LONG > 0:
        tl.debug_barrier()  # what one thread has listed, another reads
        _queue_tiles(
            long_prefill.sequences, listed, n, long_prefill.work_tiles, sizes.most_tiles,
            tile.BLOCK_Q, tile.BLOCK_KV, tile.HEADS, tile.KV_HEADS, tile.NEAR
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
    def most_tiles(self) -> int:
        """Tiles of long prefill in any mix of sequences."""
        p, long = self.problem, self.tiles.long
        return 0 if long is None else long.max_tiles(p.rows, p.sequences)

    def outputs(self):
        n, long = self.problem.sequences, self.tiles.long is not None
        row = struct("int32", n)
        return {
            **dict.fromkeys(("d_lens", "d_begins", "d_rows", "d_counts"), row),
            "work": struct("int32", 5, n),
            "facts": struct("int32", 6),
            "long_sequences": struct("int32", 5, n) if long else None,
            "work_tiles": struct("int32", self.most_tiles + 1, 8) if long else None,
            "decode_rows": struct("int32", n, 3) if long else None,
        }

    def grid(self, target):
        return (1,)

    def options(self, target):
        return {"num_warps": 4, "num_stages": 1}

    def arguments(self, target):
        p, t, long = self.problem.paged, self.tiles, self.tiles.long
        decode = ("d_lens", "d_begins", "d_rows", "d_counts")
        tables = ("long_sequences", "work_tiles", "decode_rows")
        valid = self.shape("valid") or (1,)
        return {
            "decode": DecodeRows(*map(self.result, decode)),
            "long_prefill": LongPrefill(*map(self.result, tables)),
            "sizes": ScheduleSizes(
                n=p.batch,
                rows=self.problem.rows,
                capacity=p.capacity,
                left=p.window_left or 0,
                fair=self.fair,
                least=-(-t.least // t.block),
                enough=long.min_total_rows if long else 0,
                cores=target.cores,
                most_tiles=self.most_tiles,
            ),
            "LANES": self.lanes,
            "tile": ScheduleTile(
                WINDOW=p.window_left is not None,
                BLOCK=t.block,
                TOKENS=t.decode_tokens,
                TILE=t.tile,
                LONG=long.min_rows if long else 0,
                SINGLE=long is not None and long.decodes,
                HEADS=p.heads,
                KV_HEADS=p.kv_heads,
                BLOCK_Q=long.block_q if long else 1,
                BLOCK_KV=long.block_kv if long else 1,
                NEAR=NEAR_BYTES // p.token_bytes,
                COUNT=valid[0] - 1,  # the last element is the number of valid sequences
                ONCE=p.batch <= self.lanes,
            ),
        }

"""Work ranges of paged decoding: a program finds its sequences and tiles from the lengths.

Key tiles of all sequences, laid end to end, are split into equal ranges: ``decode`` says how.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton


@triton.jit
def _load_or_zero(values, b, mask):
    if mask is None:
        value = tl.load(values + b)
    else:
        value = tl.load(values + b, mask=mask, other=0)
    return value


@triton.jit
def load_extent(sequences, b, mask, capacity, sizes, BLOCK: tl.constexpr, TOKENS: tl.constexpr):
    """Returns length, first visible key, first tile and number of tiles of sequences ``b``."""
    length = tl.minimum(tl.maximum(_load_or_zero(sequences.lens, b, mask), 0), capacity)
    begin = length * 0
    if sequences.begins is not None:
        begin = tl.minimum(tl.maximum(_load_or_zero(sequences.begins, b, mask), 0), length)
    if sizes.WINDOW:
        begin = tl.maximum(length - TOKENS - sizes.left, begin)  # what the first row sees
    first = begin // BLOCK
    return length, begin, first, tl.cdiv(length, BLOCK) - first


@triton.jit
def sequence_cost(tiles, SETUP_TILES: tl.constexpr):
    """Returns the cost of a sequence, in tiles; ``decode`` says what SETUP_TILES is."""
    if SETUP_TILES > 0:
        return tl.where(tiles > 0, tiles + SETUP_TILES, 0)
    else:
        return tiles


@triton.jit
def find_sequence_split(
    number, sequences, capacity, sizes,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Returns first tile, end and sequence of a split, one of SPLITS equal parts of a sequence."""
    b = number // SPLITS
    split = number % SPLITS
    _, _, _, tiles = load_extent(sequences, b, None, capacity, sizes, BLOCK, TOKENS)
    t = (tiles.to(tl.int64) * split // SPLITS).to(tl.int32)
    return t, (tiles.to(tl.int64) * (split + 1) // SPLITS).to(tl.int32), b


@triton.jit
def _load_costs(
    i, sequences, batch, capacity, sizes,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, SETUP_TILES: tl.constexpr,
):  # fmt: skip
    """Returns the costs of sequences ``i``, 0 behind the last."""
    _, _, _, tiles = load_extent(sequences, i, i < batch, capacity, sizes, BLOCK, TOKENS)
    return sequence_cost(tiles, SETUP_TILES)


@triton.jit
def find_work_range(
    number, lane, sequences, capacity, sizes, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    SETUP_TILES: tl.constexpr, LANES: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Returns first tile and end of a range, its first sequence, where that begins, and all tiles.

    ``lane``: 0 .. LANES, the sequences looked at together; ROUNDS of them are all.
    """
    batch = sizes.batch
    total = 0
    for base in tl.static_range(0, ROUNDS * LANES, LANES):
        costs = _load_costs(
            base + lane, sequences, batch, capacity, sizes, BLOCK, TOKENS, SETUP_TILES
        )
        total += tl.sum(costs, 0)
    tiles_each = total // sizes.ranges
    extra = total % sizes.ranges
    t = number * tiles_each + tl.minimum(number, extra)
    b = 0
    before = 0
    seen = 0
    for base in tl.static_range(0, ROUNDS * LANES, LANES):
        costs = _load_costs(
            base + lane, sequences, batch, capacity, sizes, BLOCK, TOKENS, SETUP_TILES
        )
        ends = seen + tl.cumsum(costs, 0)
        is_done = (ends <= t) & (base + lane < batch)
        b += tl.sum(is_done.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(is_done, ends, 0), 0))
        seen += tl.sum(costs, 0)
    return t, t + tiles_each + (number < extra).to(tl.int32), b, before, total


@triton.jit
def store_sequence_starts(
    starts, total, lane, sequences, capacity, sizes, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    SETUP_TILES: tl.constexpr, LANES: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Stores the first tile of every sequence, and the number of all tiles."""
    batch = sizes.batch
    seen = 0
    for base in tl.static_range(0, ROUNDS * LANES, LANES):
        i = base + lane
        costs = _load_costs(i, sequences, batch, capacity, sizes, BLOCK, TOKENS, SETUP_TILES)
        tl.store(starts + i, seen + tl.cumsum(costs, 0) - costs, mask=i < batch)
        seen += tl.sum(costs, 0)
    tl.store(starts + batch, total)

"""Shares of paged decoding: how a program finds its sequences and tiles from the lengths.

Key tiles of all sequences, laid end to end, are cut into equal shares: ``decode`` says how.
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
def extent(sequences, b, mask, capacity, sizes, BLOCK: tl.constexpr, TOKENS: tl.constexpr):
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
def cost(tiles, OPENING: tl.constexpr):
    """Returns the cost of a sequence, in tiles; ``decode`` says what OPENING is."""
    if OPENING > 0:
        return tl.where(tiles > 0, tiles + OPENING, 0)
    else:
        return tiles


@triton.jit
def part_of_sequence(
    share, sequences, capacity, sizes,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Returns first tile, end and sequence of a share, one of SPLITS equal parts of it."""
    b = share // SPLITS
    part = share % SPLITS
    _, _, _, tiles = extent(sequences, b, None, capacity, sizes, BLOCK, TOKENS)
    t = (tiles.to(tl.int64) * part // SPLITS).to(tl.int32)
    return t, (tiles.to(tl.int64) * (part + 1) // SPLITS).to(tl.int32), b


@triton.jit
def _costs(
    i, sequences, batch, capacity, sizes,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, OPENING: tl.constexpr,
):  # fmt: skip
    """Returns the costs of sequences ``i``, 0 behind the last."""
    _, _, _, tiles = extent(sequences, i, i < batch, capacity, sizes, BLOCK, TOKENS)
    return cost(tiles, OPENING)


@triton.jit
def find_share(
    share, lane, sequences, capacity, sizes, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    OPENING: tl.constexpr, LANES: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Returns first tile, end, sequence, its first tile, and the tiles of all, of a share.

    ``lane``: 0 .. LANES, the sequences looked at together; ROUNDS of them are all.
    """
    batch = sizes.batch
    total = 0
    for base in tl.static_range(0, ROUNDS * LANES, LANES):
        costs = _costs(base + lane, sequences, batch, capacity, sizes, BLOCK, TOKENS, OPENING)
        total += tl.sum(costs, 0)
    each = total // sizes.shares
    extra = total % sizes.shares
    t = share * each + tl.minimum(share, extra)
    b = 0
    before = 0
    passed = 0
    for base in tl.static_range(0, ROUNDS * LANES, LANES):
        costs = _costs(base + lane, sequences, batch, capacity, sizes, BLOCK, TOKENS, OPENING)
        upto = passed + tl.cumsum(costs, 0)
        done = (upto <= t) & (base + lane < batch)
        b += tl.sum(done.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(done, upto, 0), 0))
        passed += tl.sum(costs, 0)
    return t, t + each + (share < extra).to(tl.int32), b, before, total


@triton.jit
def store_starts(
    starts, total, lane, sequences, capacity, sizes, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    OPENING: tl.constexpr, LANES: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Stores the first tile of every sequence, and the number of all tiles."""
    batch = sizes.batch
    passed = 0
    for base in tl.static_range(0, ROUNDS * LANES, LANES):
        i = base + lane
        costs = _costs(i, sequences, batch, capacity, sizes, BLOCK, TOKENS, OPENING)
        tl.store(starts + i, passed + tl.cumsum(costs, 0) - costs, mask=i < batch)
        passed += tl.sum(costs, 0)
    tl.store(starts + batch, total)

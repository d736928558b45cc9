"""The queue of another kernel's tiles, a part of the schedule: which there are, in which order.

Their order is that of what they read: sequence by sequence, that with the longest walk first; of a
sequence as many key heads at a time as the near L2 holds, and of these tile by tile, the longest
first. So programs that run together read the same keys, and the last ones taken are short.

``longs [5, n]``: of the other kernel's sequences number, first row, row past the last, length and
tiles, ``found`` of them side by side. ``lines``: ``problem.Long`` says what stands in them.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton

ALIGNED = tl.constexpr(8)  # rows: a tile begins at a multiple of it
SEQUENCES = tl.constexpr(64)  # looked at together
TILES = tl.constexpr(16)  # of each of them
LINES = tl.constexpr(128)  # that are left empty at a time


@triton.jit
def tiles_of(first, last, BLOCK_Q: tl.constexpr):
    return tl.cdiv(last - first // ALIGNED * ALIGNED, BLOCK_Q)


@triton.jit
def queue_tiles(
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

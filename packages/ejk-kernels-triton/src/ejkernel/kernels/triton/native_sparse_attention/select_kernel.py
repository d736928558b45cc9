"""The blocks that every token looks at.

Math, per token t, key head and block c complete by then, k_c the mean of the block's keys, over the
query heads h of the group:

    x_htc = scale * q_ht . k_c;  score_tc = sum_h exp(x_htc - lse_ht)

The own block comes first, then the blocks of the largest scores, ties to the lower index.

Dot products are exact in float32: a query is scaled to the range of float16 by a power of two, a
mean by one for all of its head, and each is one float16 value (a query of 16 bits) or the sum of
two (22 bits and a sign between them: float32 but for its last bit, where a mean is not less than
2^-17 of the largest). Products of two such values are exact, and accumulation is float32.

Order: blocks of equal means have equal terms, dot products and scores, so the lower index goes
first. Other scores are in float32, as XLA's are, and two that differ by less than their rounding
may change places. A mean below 2^-17 of the largest M of its head loses bits, 2^-39 M at most: its
logits are off by 2^-39 scale |q|_1 M, less than the rounding of exp while no logit of the head
exceeds 2^15. Beyond, blocks far smaller than the largest may change places among themselves, by
that much.

Work split: as many programs as run at once, each for every n-th of the tiles of tokens, the longest
first. A tile's rows are the query heads of the group of its tokens, so that the sum over heads is a
sum over rows, and queries are loaded once. The loop over a tile's blocks runs twice, for lse, then
for the scores, which go to the program's own memory. From there a warp loads the scores of a token
and takes the best, one after the other: every lane has the best of its own blocks, one instruction
finds the largest of a warp, and its successor is loaded again.

Bound: 8 * T * blocks * d FLOPs per head over the visible half (two matmuls twice). At T 32k, 64
heads, D128, blocks of 64: 0.55 TFLOP, and 4 GB of means from L2: both 1.1 ms or less. Takes
1.75 ms on an H200.

Source: Yuan et al., "Native Sparse Attention" (2025), section 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ejkernel.kernels.triton.bound_launch import TensorMap
from ejkernel.kernels.triton.common.softmax import fused_softmax
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, Launch, power_of_two, struct
from ejkernel.kernels.triton.native_sparse_attention.forward_kernel import load_group
from ejkernel.kernels.triton.native_sparse_attention.problem import Problem, padded
from ejkernel.kernels.triton.native_sparse_attention.tiles import SelectTiles, query_term_count

EMPTY = tl.constexpr(-8388608)  # the bits of -inf; as an integer, below the bits of every score
EXPONENT = tl.constexpr(0x7F800000)  # the bits of a power of two
# bounds of slopes: hidden scores at -inf stay so, and logits of at most 0 are finite
SMALLEST = tl.constexpr(2.0**-90)
LARGEST = tl.constexpr(2.0**80)
LANES = tl.constexpr(32)  # threads of the warp that ranks a token's blocks


@triton.jit
def visible_means(firsts, completes, token, t, real, size, blocks):
    """Returns the range of complete blocks of every token's sequence, among all blocks."""
    if firsts is None:
        low = t * 0
        high = (t + 1) // size
    else:
        low = tl.load(firsts + token + t, mask=real, other=0)
        high = low + tl.load(completes + token + t, mask=real, other=0)
    return tl.where(real, low, blocks), tl.where(real, high, 0)


@triton.jit
def own_blocks(owns, token, t, real, size):
    """Returns every token's own block in its sequence; -1 for tokens of no sequence."""
    own_block = t // size
    if owns is not None:
        own_block = tl.load(owns + token + t, mask=real, other=-1)
    return own_block


@triton.jit
def query_terms(q, sign, slope):
    """Returns two float16 rows whose sum is a power of two times q, and two slopes.

    These are the slope of their scores in base 2, and the power of two below it.
    """
    x = q.to(tl.float32)
    bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(bits >> 23, 15), 254)  # rows are brought to [2^14, 2^15)
    x *= ((268 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    if sign is not None:
        x *= sign
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    slope = slope * ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    slope = tl.minimum(tl.maximum(slope, SMALLEST), LARGEST)
    power = (slope.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
    return high, low, slope, power


@triton.jit
def store_and_load(
    queries, high, low,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, QUERY_TERMS: tl.constexpr,
):  # fmt: skip
    """Returns the same two tiles, stored to this program's memory and loaded again."""
    row = tl.program_id(0).to(tl.int64) * (QUERY_TERMS * ROWS) + tl.arange(0, ROWS)
    pointers = queries + row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(pointers, high)
    if QUERY_TERMS == 2:
        tl.store(pointers + ROWS * COLUMNS, low)
    tl.debug_barrier()
    high = tl.load(pointers)
    if QUERY_TERMS == 2:
        low = tl.load(pointers + ROWS * COLUMNS)
    tl.debug_barrier()
    return high, low


@triton.jit
def exact_scores(q_high, q_low, terms, head_row, first, tile):
    """Returns scores of queries and the means of KEYS blocks of a head, from block ``first``.

    ``head_row``: the head's first row of ``terms``. Both terms of a mean are neighbouring rows of
    one matmul, whose accumulators one thread holds. There are rows for KEYS blocks more than there
    are blocks.
    """
    KEYS: tl.constexpr = tile.KEYS
    if tile.MAPPED:
        rows = terms.load([(head_row + 2 * first).to(tl.int32), 0])
    else:
        row = head_row + 2 * first + tl.arange(0, 2 * KEYS)
        column = tl.arange(0, tile.COLUMNS)[None, :]
        pointers = terms + row[:, None] * tile.D + column
        if tile.COLUMNS == tile.D:
            rows = tl.load(pointers)
        else:
            rows = tl.load(pointers, mask=column < tile.D, other=0.0)
    s = tl.zeros([q_high.shape[0], 2 * KEYS], tl.float32)
    if tile.QUERY_TERMS == 2:  # the small terms first
        s = tl.dot(q_low, tl.trans(rows), s)
    s = tl.dot(q_high, tl.trans(rows), s)
    high, low = tl.split(tl.reshape(s, [q_high.shape[0], KEYS, 2]))
    return high + low


@triton.jit
def load_scores(at, number, low, high, own_block):
    """Loads scores as integers of the same order; EMPTY for own and invisible blocks."""
    visible = (number >= low) & (number < high) & (number != low + own_block)
    x = tl.load(at + number, mask=visible, other=float("-inf"))
    return tl.where(x == x, x, float("inf")).to(tl.int32, bitcast=True)


@triton.jit
def rank_blocks(
    scores, chosen, firsts, completes, owns, token, first_token, last_token, row, size, blocks, tile
):
    """Writes the lists of PER tokens, one a warp, by their ``scores [PER, blocks]``."""
    PER: tl.constexpr = tile.PER
    SLABS: tl.constexpr = tile.SLABS
    COUNT: tl.constexpr = tile.COUNT
    LISTED: tl.constexpr = tile.LISTED
    t = first_token + tl.arange(0, PER)
    real = t < last_token
    low, high = visible_means(firsts, completes, token, t, real, size, blocks)
    own_block = own_blocks(owns, token, t, real, size)
    at = scores + tl.arange(0, PER).to(tl.int64)[:, None] * blocks
    lane = tl.arange(0, LANES)[None, :]
    slot = tl.arange(0, LISTED)[:, None, None] * LANES + lane[None, :, :]
    begin = tl.min(low, 0)
    end = tl.max(high, 0)
    low, high, own_block = low[:, None], high[:, None], own_block[:, None]
    # every lane's best of its remaining blocks, every 32nd, and the block's index
    best = tl.full([PER, LANES], EMPTY, tl.int32)
    number = tl.full([PER, LANES], -1, tl.int32)
    for step in tl.range(0, end - begin, SLABS * LANES, num_stages=1):
        block = begin + step + tl.arange(0, SLABS)[:, None, None] * LANES + lane[None, :, :]
        x = load_scores(at, block, low, high, own_block)
        most = tl.max(x, 0)
        first = tl.min(tl.where(x == most[None, :, :], block, blocks), 0)
        number = tl.where(most > best, first, number)
        best = tl.maximum(most, best)
    top = tl.full([LISTED, PER, LANES], EMPTY, tl.int32)
    best_blocks = tl.full([LISTED, PER, LANES], -1, tl.int32)
    for i in tl.range(0, COUNT):
        most = tl.max(best, 1)[:, None]
        best_block = tl.min(tl.where(best == most, number, blocks), 1)[:, None]
        top = tl.where(slot == i, most[None, :, :], top)
        best_blocks = tl.where(slot == i, best_block[None, :, :], best_blocks)
        # the remaining blocks of that lane come after it: all lanes look for its best
        owner_lane = (best_block - begin) % LANES
        new_best = tl.full([PER, LANES], EMPTY, tl.int32)
        new_number = tl.full([PER, LANES], -1, tl.int32)
        for step in tl.range(0, end - begin, LANES * LANES, num_stages=1):
            block = begin + step + owner_lane + lane * LANES
            x = load_scores(at, block, low, high, own_block)
            x = tl.where((x < most) | ((x == most) & (block > best_block)), x, EMPTY)
            new_number = tl.where(x > new_best, block, new_number)
            new_best = tl.maximum(x, new_best)
        most = tl.max(new_best, 1)[:, None]
        best_block = tl.min(tl.where(new_best == most, new_number, blocks), 1)[:, None]
        best = tl.where(lane == owner_lane, most, best)
        number = tl.where(lane == owner_lane, best_block, number)
    best_blocks = tl.where(top == EMPTY, -1, best_blocks - low[None, :, :])
    out = chosen + (token + t) * row
    tl.store(out[:, None], own_block, mask=real[:, None])
    stored = real[None, :, None] & (slot < COUNT)
    tl.store(out[None, :, None] + 1 + slot, best_blocks, mask=stored)


class Sizes(NamedTuple):
    """Sizes of a call; ``slots``: entries of a list, ``sign``: see ``Problem.sign``."""

    length: int
    heads: int
    kv_heads: int
    blocks: int
    size: int
    slots: int
    programs: int
    slope: float
    sign: float | None


class Tile(NamedTuple):
    """Constants: MEMBERS query heads of each of TOKENS tokens and KEYS means at once.

    MAPPED: means are loaded by TMA. SPLITS tiles of heads make a GROUP. QUERY_TERMS: float16 values
    whose sum a query is. Ranking: PER tokens at once, SLABS blocks a lane in a load, COUNT blocks
    to find, LISTED of them a lane.
    """

    MAPPED: bool
    D: int
    COLUMNS: int
    GROUP: int
    MEMBERS: int
    SPLITS: int
    TOKENS: int
    KEYS: int
    QUERY_TERMS: int
    PER: int
    SLABS: int
    COUNT: int
    LISTED: int


@triton.jit
def softmax_terms(
    q_high, q_low, terms, head_row, begin, end, inner, outer, low, high, real, slope, power,
    PACKED: tl.constexpr, tile,
):  # fmt: skip
    """Returns (slope, shift, factor): a row's probabilities are exp2(slope score - shift) factor.

    A row sees the blocks ``low`` to ``high``, every row those from ``inner`` to ``outer``, and some
    row those from ``begin`` to ``end``.
    """
    KEYS: tl.constexpr = tile.KEYS
    ROWS: tl.constexpr = tile.TOKENS * tile.MEMBERS
    large = 1073741824.0 / power  # as in fused_softmax
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    e = tl.zeros([ROWS], tl.float32)
    for at in tl.range(0, end - begin, KEYS):
        first = begin + at
        s = exact_scores(q_high, q_low, terms, head_row, first, tile)
        if (first < inner) | (first + KEYS > outer):
            c = first + tl.arange(0, KEYS)[None, :]
            visible = c < high[:, None]
            if PACKED:
                visible = visible & (c >= low[:, None])
            s = tl.where(visible, s, float("-inf"))
        _, m, l, e, _ = fused_softmax(s, m, l, e, slope, power, large, True)  # noqa: E741
    # p is exp2 of the same multiply-add, over l: rounding of a large m cancels
    # next to a block whose score is NaN, which is chosen, the other blocks score 0
    m = tl.where(l > 0.0, m, 0.0)
    slope = tl.where(tl.abs(m) >= large, power, slope)
    factor = tl.where(real & (l > 0.0), 1.0 / tl.where(l > 0.0, l, 1.0), 0.0)
    return slope, m * slope, factor


@triton.jit
def score_blocks(q, terms, factors, firsts, completes, owns, chosen, scores, queries, sizes, tile):
    """Writes the lists of blocks of all tokens, or with ``chosen`` None the scores.

    ``chosen [b, s, hk, slots]``: the own block and the COUNT best others, by index in their
    sequence, best first; -1 after them. ``scores [b, programs * TOKENS, blocks]`` is memory of a
    program, or the result ``[b, s, hk, blocks]``, of which some that a token does not see are not
    written. ``terms [b, hk, blocks + KEYS, 2, D]`` times ``factors [b, hk]`` are the means.
    ``owns [b, s]``: -1 for tokens of no sequence. ``queries``: memory for a program's rows in
    float16.
    """
    COLUMNS: tl.constexpr = tile.COLUMNS
    MEMBERS: tl.constexpr = tile.MEMBERS
    TOKENS: tl.constexpr = tile.TOKENS
    KEYS: tl.constexpr = tile.KEYS
    length, heads, kv_heads = sizes.length, sizes.heads, sizes.kv_heads
    blocks, size, programs = sizes.blocks, sizes.size, sizes.programs
    b = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    token = b.to(tl.int64) * length
    tiles = (length + TOKENS - 1) // TOKENS
    tile_row = tl.arange(0, TOKENS * MEMBERS)
    for number in tl.range(program, tiles * kv_heads, programs):
        token_tile = tiles - 1 - number // kv_heads  # the longest first
        hk = number % kv_heads
        t = token_tile * TOKENS + tl.arange(0, TOKENS)
        row_t = token_tile * TOKENS + tile_row // MEMBERS
        low, high = visible_means(firsts, completes, token, t, t < length, size, blocks)
        row_low, row_high = visible_means(
            firsts, completes, token, row_t, row_t < length, size, blocks
        )
        begin = tl.min(low, 0)
        end = tl.max(high, 0)
        # the range of blocks that every token sees
        inner = tl.max(tl.where(t < length, low, 0), 0)
        outer = tl.min(tl.where(t < length, high, blocks), 0)
        head_row = (b.to(tl.int64) * kv_heads + hk) * (blocks + KEYS) * 2
        factor = tl.load(factors + b * kv_heads + hk)
        if chosen is None:
            row = (token + t) * kv_heads + hk
        else:
            row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        for split in tl.range(0, tile.SPLITS):
            member = split * MEMBERS + tile_row % MEMBERS
            real = (member < tile.GROUP) & (row_t < length)
            q_tile = load_group(
                q, (token + row_t) * heads, real, hk * tile.GROUP + member, tile.D, COLUMNS
            )  # fmt: skip
            q_high, q_low, row_slope, power = query_terms(q_tile, sizes.sign, sizes.slope * factor)
            # an operand that was loaded stays in shared memory, another would be copied to
            # registers again in every step
            q_high, q_low = store_and_load(
                queries, q_high, q_low, TOKENS * MEMBERS, COLUMNS, tile.QUERY_TERMS
            )
            row_slope, shift, inverse = softmax_terms(
                q_high, q_low, terms, head_row, begin, end, inner, outer, row_low, row_high, real,
                row_slope, power, firsts is not None, tile,
            )  # fmt: skip
            for at in tl.range(0, end - begin, KEYS):
                first = begin + at
                s = exact_scores(q_high, q_low, terms, head_row, first, tile)
                p = tl.exp2(tl.fma(s, row_slope[:, None], -shift[:, None])) * inverse[:, None]
                score = tl.sum(tl.reshape(p, [TOKENS, MEMBERS, KEYS]), 1)
                c = first + tl.arange(0, KEYS)[None, :]
                pointers = scores + row[:, None] * blocks + c
                stored = (t < length)[:, None] & (c < blocks)
                if tile.SPLITS > 1:
                    if split > 0:
                        score += tl.load(pointers, mask=stored, other=0.0)
                tl.store(pointers, score, mask=stored)
            if tile.SPLITS > 1:
                tl.debug_barrier()
        if chosen is not None:
            tl.debug_barrier()  # one warp reads what another has written
            for at in tl.range(0, TOKENS, tile.PER):
                rank_blocks(
                    scores + (tl.program_id(0).to(tl.int64) * TOKENS + at) * blocks,
                    chosen + hk * sizes.slots, firsts, completes, owns, token,
                    token_tile * TOKENS + at,
                    tl.minimum(length, token_tile * TOKENS + TOKENS),
                    kv_heads * sizes.slots, size, blocks, tile,
                )  # fmt: skip
            tl.debug_barrier()


@dataclass(frozen=True)
class ScoreBlocks(Launch):
    """Launch of ``score_blocks``; ``ranks``: the result is ``chosen``, otherwise the scores."""

    kernel = score_blocks
    batching: ClassVar = {
        **dict.fromkeys(("q", "terms", "factors"), BATCHED),
        **dict.fromkeys(("firsts", "completes", "owns"), BATCHED),
    }

    problem: Problem
    tiles: SelectTiles
    ranks: bool

    def outputs(self):
        p, t = self.problem, self.tiles
        lead = (p.batch, p.length, p.kv_heads)
        rows = t.programs * query_term_count(p.dtype) * t.rows
        memory = (p.batch, t.programs * t.tokens(p), p.blocks)
        return {
            "chosen": struct("int32", *lead, p.slots) if self.ranks else None,
            "scores": struct("float32", *(memory if self.ranks else (*lead, p.blocks))),
            "queries": struct("float16", p.batch, rows, padded(p.dim)),
        }

    def grid(self, target):
        return (self.problem.batch * self.tiles.programs,)

    def options(self, target):
        t = self.tiles
        bounds = {} if t.registers is None or not self.ranks else {"maxnreg": t.registers}
        return {**super().options(target), **bounds}

    def arguments(self, target):
        p, t = self.problem, self.tiles
        terms, mapped = self.operand("terms"), target.hopper and target.tensor_maps
        count = p.slots - 1 if self.ranks else 1
        if mapped and terms is not None:
            rows = p.batch * p.kv_heads * (p.blocks + t.keys) * 2
            terms = TensorMap(terms.index, (rows, p.dim), (2 * t.keys, padded(p.dim)))
        return {
            "terms": terms,
            "sizes": Sizes(
                p.length, p.heads, p.kv_heads, p.blocks, p.size, p.slots, t.programs, p.slope,
                p.sign,
            ),
            "tile": Tile(
                MAPPED=mapped,
                D=p.dim,
                COLUMNS=padded(p.dim),
                GROUP=p.group,
                MEMBERS=t.members(p),
                SPLITS=-(-p.group // t.members(p)),
                TOKENS=t.tokens(p),
                KEYS=t.keys,
                QUERY_TERMS=query_term_count(p.dtype),
                PER=t.num_warps,
                SLABS=min(16, power_of_two(-(-p.blocks // 32))),
                COUNT=count,
                LISTED=power_of_two(-(-count // 32)),
            ),
        }  # fmt: skip

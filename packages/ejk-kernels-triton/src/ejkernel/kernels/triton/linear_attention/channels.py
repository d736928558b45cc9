"""Decays per channel inside a chunk, by halving.

A block of 2 m rows is cut in the middle. A row of the later half reaches back to the cut by the sum
of its own gates since, a row of the earlier half reaches up to it by the sum of the gates after it;
the two meet as a product of rows with rows. log2(chunk) halvings have every pair of rows once, the
diagonal does not decay:

    S[t, s] = sum over channels of q_t exp(since cut_t) k_s exp(until cut_s)
    o_t = exp(since cut_t) sum over s of W[t, s] exp(until cut_s) v_s

No exponent is a difference, none is above 0 where gates are not: nothing overflows, no vanished
decay is divided by, and gates of -20 a row lose nothing. The sums themselves are products of the
gates with matrices of 0 and 1, exact but for the accumulation: a float32 gate goes through the
matrix unit in three parts of eight bits, a bfloat16 one in one. They have no sign but the gates'
own, so that their relative error is that of a sum of at most 128 numbers, 2^-17. A gate below -128
is taken as -128, whose power is 0 in float32 as well.

*Near* chunks need none of it: where the gates between the middle and any row sum up to at most
``near`` (40, for bfloat16), one product does. With f_t the log decay since the middle, above 0
before it, rows read with exp(f) and are read with exp(-f): all powers lie between exp(-40) and
exp(40), and those of two rows that see each other multiply to what lies between the two. A power
errs by 2^-24 times its exponent, less than the 2^-9 of what it multiplies. Other pairs of rows may
overflow, and are not taken.

Source: Yang et al. 2023, "Gated linear attention transformers" (arXiv 2312.06635), section 4.3,
carried down to single rows.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.linear_attention.problem import Problem


@triton.jit
def reach(level, REVERSED: tl.constexpr, CHUNK: tl.constexpr):
    """Which gates lie between a row and its cut where halves have 2^level rows, bfloat16 0 or 1
    ``[row, gate]``."""
    r = tl.arange(0, CHUNK)[:, None]
    c = tl.arange(0, CHUNK)[None, :]
    if REVERSED:
        after = c >= r
        until = c < r
    else:
        after = c > r
        until = c <= r
    late = ((r >> level) & 1) == 1
    found = (late & until) | ((r >> level) % 2 == 0) & after
    return tl.where(found & ((r >> level) == (c >> level)), 1.0, 0.0).to(tl.bfloat16)


@triton.jit
def meeting(level, CHUNK: tl.constexpr):
    """Pairs of rows that meet at a cut between halves of 2^level rows."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    return ((i >> level) ^ (j >> level)) == 1


@triton.jit
def sees(LATER: tl.constexpr, CHUNK: tl.constexpr):
    """Pairs ``[row that reads, row before it]``; with LATER the earlier row reads."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    if LATER:
        found = i < j
    else:
        found = i > j
    return found


@triton.jit
def reads(level, LATER: tl.constexpr, CHUNK: tl.constexpr):
    """Returns whether a row reads at its cut, else it is read, ``[row, 1]``."""
    r = tl.arange(0, CHUNK)[:, None]
    half = (r >> level) & 1
    if LATER:
        found = half == 0
    else:
        found = half == 1
    return found


@triton.jit
def load_cut(cuts, WHICH: tl.constexpr, CHUNK: tl.constexpr):
    """One of ``tiles.cuts``: made by a program, it would take a tenth of its instructions."""
    r = tl.arange(0, CHUNK)
    return tl.load(cuts + WHICH * (CHUNK * CHUNK) + r[:, None] * CHUNK + r[None, :])


@triton.jit
def sums(matrix, x, PARTS: tl.constexpr):
    """``matrix`` of 0 and 1 times x, in PARTS of eight bits."""
    total = tl.zeros([matrix.shape[0], x.shape[1]], tl.float32)
    for _ in tl.static_range(PARTS - 1):
        # cut off, not rounded: conversions of single numbers take eight times as long
        part = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        total = tl.dot(matrix, part.to(tl.bfloat16), total)
        x = x - part
    return tl.dot(matrix, x.to(tl.bfloat16), total)


@triton.jit
def middle(
    matrix,
    gate,
    REVERSED: tl.constexpr,
    PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
    NEAR: tl.constexpr,
):
    """(log decay of every row since the middle of the chunk, below 0 after it and above 0 before
    it; whether none is beyond NEAR). ``matrix``: which gates lie between."""
    CHUNK: tl.constexpr = gate.shape[0]
    reached = sums(matrix, gate, PARTS)
    # NaN is not near
    near = tl.max(tl.where(tl.abs(reached) <= NEAR, 0, 1)) == 0
    since = tl.where(reads(LEVELS - 1, REVERSED, CHUNK), reached, -reached)
    return since, near


@triton.jit
def scores(
    found,
    q,
    k,
    gate,
    REVERSED: tl.constexpr,
    PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``found`` and the decayed products of the rows that read with those they see, by halving."""
    CHUNK: tl.constexpr = gate.shape[0]
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    own = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
    found += tl.where(i == j, own[:, None], 0.0)
    seen = sees(REVERSED, CHUNK)
    for level in tl.range(0, LEVELS):
        e = tl.exp(sums(reach(level, REVERSED, CHUNK), gate, PARTS))
        # a row is of one half: it reads there or is read
        row = tl.where(reads(level, REVERSED, CHUNK), q, k)
        row = (row.to(tl.float32) * e).to(q.dtype)
        met = tl.dot(row, tl.trans(row), input_precision=PRECISION)
        found += tl.where(seen & meeting(level, CHUNK), met, 0.0)
    return found


def near(p: Problem, *, subtracts: bool = False) -> float:
    """Exponents that one product takes: its error is theirs times 2^-24, and so less than that of
    the operands; powers of twice as much are finite. ``subtracts``: the result is a difference,
    which strong decays make small."""
    return 40.0 if p.operand == "bfloat16" else 1.0 if subtracts else 8.0

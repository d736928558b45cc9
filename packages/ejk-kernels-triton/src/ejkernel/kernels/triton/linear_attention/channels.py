"""Decays per channel inside a chunk, by halving.

A block of 2 m rows is cut in the middle. A row of the later half reaches back to the cut by the sum
of its own gates since, a row of the earlier half reaches up to it by the sum of the gates after it;
the two meet in a matmul of rows with rows. log2(chunk) halvings have every pair of rows once, the
diagonal does not decay:

    S[t, s] = sum over channels of q_t exp(since cut_t) k_s exp(until cut_s)
    o_t = exp(since cut_t) sum over s of W[t, s] exp(until cut_s) v_s

No exponent is a difference, none is above 0 where gates are not: nothing overflows, no vanished
decay is divided by, and gates of -20 a row lose nothing. The exponents are matmuls of the gates
with matrices of 0 and 1, exact but for the accumulation: a float32 gate goes through the matrix
unit in three parts of eight bits, a bfloat16 one in one. All terms have the sign of the gates, so
that the relative error is the one of a sum of at most 128 values, 2^-17. A gate below -128 is taken
as -128, whose exponential is 0 in float32 as well.

*Near* chunks need none of it: where the gates between the middle and any row sum up to at most
``near_limit`` (40, for bfloat16), one matmul does. With f_t the log decay since the middle, above 0
before it, rows read with exp(f) and are read with exp(-f): all powers lie between exp(-40) and
exp(40), and the powers of two rows that see each other multiply to the decay between the two. A
power errs by 2^-24 times its exponent, less than the 2^-9 of its factor. Other pairs of rows may
overflow, and are not used.

Source: Yang et al. 2023, "Gated linear attention transformers" (arXiv 2312.06635), section 4.3,
carried down to single rows.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.linear_attention.problem import Problem


@triton.jit
def gates_to_cut(level, REVERSED: tl.constexpr, CHUNK: tl.constexpr):
    """Returns 1 for gates between a row and its cut, ``[row, gate]`` in bfloat16.

    Halves have 2^level rows.
    """
    r = tl.arange(0, CHUNK)[:, None]
    c = tl.arange(0, CHUNK)[None, :]
    if REVERSED:
        after = c >= r
        until = c < r
    else:
        after = c > r
        until = c <= r
    late = ((r >> level) & 1) == 1
    between = (late & until) | ((r >> level) % 2 == 0) & after
    return tl.where(between & ((r >> level) == (c >> level)), 1.0, 0.0).to(tl.bfloat16)


@triton.jit
def meets_at_cut(level, CHUNK: tl.constexpr):
    """Returns the pairs of rows on both sides of a cut between halves of 2^level rows."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    return ((i >> level) ^ (j >> level)) == 1


@triton.jit
def visible_rows(LATER: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the pairs ``[row that reads, row before it]``; with LATER the earlier row reads."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    if LATER:
        visible = i < j
    else:
        visible = i > j
    return visible


@triton.jit
def is_reader(level, LATER: tl.constexpr, CHUNK: tl.constexpr):
    """Returns whether a row reads at its cut, else it is read, ``[row, 1]``."""
    r = tl.arange(0, CHUNK)[:, None]
    half = (r >> level) & 1
    if LATER:
        reader = half == 0
    else:
        reader = half == 1
    return reader


@triton.jit
def load_cut_matrix(cut_matrices, WHICH: tl.constexpr, CHUNK: tl.constexpr):
    """Loads one of ``tiles.cut_matrices``: computing it would take a tenth of the instructions."""
    r = tl.arange(0, CHUNK)
    return tl.load(cut_matrices + WHICH * (CHUNK * CHUNK) + r[:, None] * CHUNK + r[None, :])


@triton.jit
def matrix_sums(matrix, x, PARTS: tl.constexpr):
    """Returns a ``matrix`` of 0 and 1 times x, which is split into PARTS of eight bits."""
    total = tl.zeros([matrix.shape[0], x.shape[1]], tl.float32)
    for _ in tl.static_range(PARTS - 1):
        # truncated, not rounded: conversions of single values take eight times as long
        part = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        total = tl.dot(matrix, part.to(tl.bfloat16), total)
        x = x - part
    return tl.dot(matrix, x.to(tl.bfloat16), total)


@triton.jit
def decay_from_middle(
    matrix,
    gate,
    REVERSED: tl.constexpr,
    PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Returns the log decay of every row since the middle of the chunk, and whether none is large.

    It is below 0 after the middle and above 0 before it; large is beyond NEAR. ``matrix`` has 1 for
    the gates in between.
    """
    CHUNK: tl.constexpr = gate.shape[0]
    decay = matrix_sums(matrix, gate, PARTS)
    # NaN is not near
    is_near = tl.max(tl.where(tl.abs(decay) <= NEAR, 0, 1)) == 0
    since = tl.where(is_reader(LEVELS - 1, REVERSED, CHUNK), decay, -decay)
    return since, is_near


@triton.jit
def add_scores(
    scores,
    q,
    k,
    gate,
    REVERSED: tl.constexpr,
    PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the decayed scores of the rows that read and the rows that they see, by halving."""
    CHUNK: tl.constexpr = gate.shape[0]
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    diagonal = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
    scores += tl.where(i == j, diagonal[:, None], 0.0)
    visible = visible_rows(REVERSED, CHUNK)
    for level in tl.range(0, LEVELS):
        e = tl.exp(matrix_sums(gates_to_cut(level, REVERSED, CHUNK), gate, PARTS))
        # a row is in one half: it reads there or is read
        row = tl.where(is_reader(level, REVERSED, CHUNK), q, k)
        row = (row.to(tl.float32) * e).to(q.dtype)
        level_scores = tl.dot(row, tl.trans(row), input_precision=PRECISION)
        scores += tl.where(visible & meets_at_cut(level, CHUNK), level_scores, 0.0)
    return scores


def near_limit(p: Problem, *, subtracts: bool = False) -> float:
    """Returns the largest exponent of a near chunk.

    The error of a power is its exponent times 2^-24, and so less than the error of the operands;
    powers of twice the exponent are finite. ``subtracts``: the result is a difference, which strong
    decays make small.
    """
    return 40.0 if p.compute_dtype == "bfloat16" else 1.0 if subtracts else 8.0

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

The gradient of the gates follows the same way back: what every exponent gathers goes through the
transposed matrix, again without a difference.

Source: Yang et al. 2023, "Gated linear attention transformers" (arXiv 2312.06635), section 4.3,
carried down to single rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reach(HALF: tl.constexpr, LATE: tl.constexpr, REVERSED: tl.constexpr, CHUNK: tl.constexpr):
    """Which gates lie between a row and its cut, bfloat16 0 or 1 ``[row, gate]``.

    LATE: as for a row of a later half (1), of an earlier one (0), or of its own (2).
    """
    r = tl.arange(0, CHUNK)[:, None]
    c = tl.arange(0, CHUNK)[None, :]
    if REVERSED:
        after = c >= r
        until = c < r
    else:
        after = c > r
        until = c <= r
    if LATE == 1:
        found = until
    elif LATE == 0:
        found = after
    else:
        late = (r // HALF) % 2
        found = ((late == 1) & until) | ((late == 0) & after)
    return tl.where(found & (r // HALF == c // HALF), 1.0, 0.0).to(tl.bfloat16)


@triton.jit
def crossing(HALF: tl.constexpr, LATER: tl.constexpr, CHUNK: tl.constexpr):
    """Pairs that meet at a cut ``[row that reads, row that is read]``; with LATER the earlier one
    reads."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    if LATER:
        apart = j // HALF - i // HALF == 1
    else:
        apart = i // HALF - j // HALF == 1
    return apart & (i // (2 * HALF) == j // (2 * HALF))


@triton.jit
def sums(matrix, x, PARTS: tl.constexpr):
    """``matrix`` of 0 and 1 times x, in PARTS of eight bits."""
    part = x.to(tl.bfloat16)
    total = tl.dot(matrix, part)
    for _ in tl.static_range(PARTS - 1):
        x = x - part.to(tl.float32)
        part = x.to(tl.bfloat16)
        total = tl.dot(matrix, part, total)
    return total


@triton.jit
def edges(gate, REVERSED: tl.constexpr, LATER: tl.constexpr, PARTS: tl.constexpr):
    """(since the state before, until the state after) of every row, as a walk meets them."""
    CHUNK: tl.constexpr = gate.shape[0]
    since = sums(reach(CHUNK, 1, REVERSED, CHUNK), gate, PARTS)
    rest = sums(reach(CHUNK, 0, REVERSED, CHUNK), gate, PARTS)
    if LATER:
        since, rest = rest, since
    return since, rest


@triton.jit
def scores(
    q,
    k,
    gate,
    REVERSED: tl.constexpr,
    LATER: tl.constexpr,
    PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Decayed products of the rows that read with those they see, float32; 0 for the others."""
    CHUNK: tl.constexpr = gate.shape[0]
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    own = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
    found = tl.where(i == j, own[:, None], 0.0)
    for level in tl.static_range(LEVELS):
        e = tl.exp(sums(reach(1 << level, 2, REVERSED, CHUNK), gate, PARTS))
        reader = (q.to(tl.float32) * e).to(q.dtype)
        source = (k.to(tl.float32) * e).to(q.dtype)
        met = tl.dot(reader, tl.trans(source), input_precision=PRECISION)
        found += tl.where(crossing(1 << level, LATER, CHUNK), met, 0.0)
    return found


@triton.jit
def combine(
    weights,
    v,
    gate,
    REVERSED: tl.constexpr,
    LATER: tl.constexpr,
    PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What the rows that read get of v, whose channels decay; float32."""
    CHUNK: tl.constexpr = gate.shape[0]
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    own = tl.sum(tl.where(i == j, weights, 0.0), 1)
    found = own[:, None] * v.to(tl.float32)
    for level in tl.static_range(LEVELS):
        e = tl.exp(sums(reach(1 << level, 2, REVERSED, CHUNK), gate, PARTS))
        met = tl.where(crossing(1 << level, LATER, CHUNK), weights, 0.0).to(v.dtype)
        source = (v.to(tl.float32) * e).to(v.dtype)
        found += e * tl.dot(met, source, input_precision=PRECISION)
    return found

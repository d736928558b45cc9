"""Sums of log decays inside a chunk, exact where they are differences of large ones.

A pair of rows e < l decays by the sum of the gates of rows e + 1 .. l, or e .. l - 1 where time
runs backwards: in both cases P[l] - P[e], P being the inclusive or the exclusive prefix sum. In
float32 a difference would lose what is small beside P: after rows of -20 a pair that hardly decays
would be wrong by 1e-4. So a gate is cut at 2^-10 into a multiple of that and a rest. Prefix sums of
multiples up to 2^14 are exact, and so are their differences; those of rests stay below 2^-3, where
float32 errs by 2^-27. No exponent is then ever larger than the gates between two rows ask for, a
vanished decay is never divided by, and nothing overflows.

A gate below -128 is taken as -128, whose power is 0 in float32 as well: 128 rows stay below 2^14.

The sums of a chunk are made once for all walks (``gate_sums``): in a walk every chunk would wait
for them. Those of a constant of the head are the same in every chunk (``constant_sums``).

Bound of ``gate_sums``: a gate read and two sums written a row and head, 2 x 8192 rows of 16 heads
3 MB: next to nothing. Measured on an H200: 0.003 ms.
"""

from __future__ import annotations

from ejkernel.kernels.triton.bound_launch import BoundLaunch, Out
from ejkernel.kernels.triton.common.sequences import find_segment
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.linear_attention.opening import kernel_params
from ejkernel.kernels.triton.linear_attention.problem import Problem
from ejkernel.kernels.triton.linear_attention.rows import FULL
from ejkernel.kernels.triton.linear_attention.tiles import Tiles
from ejkernel.kernels.triton.plan import bound, inputs
from ejkernel.kernels.triton.targets import Target


@triton.jit
def split(gate):
    """(a multiple of 2^-10, the rest) of log decays."""
    coarse = tl.floor(gate * 1024.0) * 0.0009765625
    return coarse, gate - coarse


@triton.jit
def gate_sums(
    gate,
    constant,
    cu,
    high,
    low,
    totals,
    rows,
    heads,
    sequences,
    pieces,
    constants,
    EXCLUSIVE: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Prefix sums of multiples and of rests in every chunk, and their totals; of ``gate``
    ``[batch, rows, heads]`` and ``constant`` ``[1 or batch, heads]``, those given."""
    across = (heads + HEADS - 1) // HEADS
    program = tl.program_id(0)
    head = program % across * HEADS + tl.arange(0, HEADS)[None, :]
    chunk = (program // across).to(tl.int64)
    slot = chunk // (SEGMENT // CHUNK)
    batch, begin, _, end = find_segment(cu, slot, pieces, rows, sequences, SEGMENT, LANES)
    at = (chunk % (SEGMENT // CHUNK)).to(tl.int32) * CHUNK
    row = begin + at + tl.arange(0, CHUNK)[:, None]
    inside = (row < end) & (head < heads)
    place = (batch * rows + row) * heads + head
    g = tl.zeros([CHUNK, HEADS], tl.float32)
    if constant is not None:
        g += tl.load(constant + batch * constants + head, mask=head < heads, other=0.0)
    if gate is not None:
        g += tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.where(inside, tl.maximum(g, -128.0), 0.0)
    coarse, fine = split(g)
    sum_high = tl.cumsum(coarse, 0)
    sum_low = tl.cumsum(fine, 0)
    if EXCLUSIVE:
        sum_high -= coarse
        sum_low -= fine
    tl.store(high + place, sum_high, mask=inside)
    tl.store(low + place, sum_low, mask=inside)
    total = totals + chunk * 2 * heads + head
    tl.store(total, tl.sum(coarse, 0)[None, :], mask=head < heads)
    tl.store(total + heads, tl.sum(fine, 0)[None, :], mask=head < heads)


@triton.jit
def walked(high, low, rest, high_all, low_all, LATER: tl.constexpr):
    """(multiples, rests, since the state before, until the state after, all) of every row of a
    chunk; behind the rows that count nothing is added.

    Before and after as a walk meets them: from the first row to the last, or with LATER from the
    last to the first.
    """
    since = high + low
    if LATER:
        since, rest = rest, since
    return high, low, since, rest, high_all + low_all


@triton.jit
def constant_sums(
    gate, count, LATER: tl.constexpr, EXCLUSIVE: tl.constexpr, CHUNK: tl.constexpr,
    MAPS: tl.constexpr,
):  # fmt: skip
    """``walked`` of a chunk whose ``count`` rows all have the same ``gate``: the compiler takes
    them out of a walk through whole chunks."""
    coarse, fine = split(tl.maximum(gate, -128.0))
    before = tl.arange(0, CHUNK)
    if not EXCLUSIVE:
        before += 1
    every = CHUNK
    if MAPS != FULL:
        every = tl.maximum(tl.minimum(count, CHUNK), 0)
        before = tl.minimum(before, every)
    since = before.to(tl.float32)
    rest = (every - before).to(tl.float32)
    rest = rest * coarse + rest * fine
    return walked(since * coarse, since * fine, rest, every * coarse, every * fine, LATER)


@triton.jit
def chunk_sums(
    high, low, totals, at, chunk, head, heads, count, LATER: tl.constexpr, CHUNK: tl.constexpr,
    MAPS: tl.constexpr,
):  # fmt: skip
    """``walked`` of the ``count`` rows of a chunk whose sums are ``at`` and on."""
    each = tl.arange(0, CHUNK)
    high += at + each * heads
    low += at + each * heads
    high_all = tl.load(totals + chunk * 2 * heads + head)
    low_all = tl.load(totals + chunk * 2 * heads + heads + head)
    if MAPS == FULL:
        high = tl.load(high)
        low = tl.load(low)
    else:
        high = tl.where(each < count, tl.load(high, mask=each < count, other=0.0), high_all)
        low = tl.where(each < count, tl.load(low, mask=each < count, other=0.0), low_all)
    rest = (high_all - high) + (low_all - low)
    return walked(high, low, rest, high_all, low_all, LATER)


@triton.jit
def pair_decays(high, low, LATER: tl.constexpr, CHUNK: tl.constexpr):
    """Decay between the row that reads (first axis) and every row it sees; 0 for the others."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    if LATER:
        between = tl.where(i <= j, -between, float("-inf"))
    else:
        between = tl.where(i >= j, between, float("-inf"))
    return tl.exp(between)


def launch(
    p: Problem, t: Tiles, target: Target, given: tuple[str, ...], shared: bool
) -> BoundLaunch:
    """Of the operands ``given`` of gate, constant and cu; ``shared``: one constant for all batch
    rows."""
    known, block = kernel_params(p, t, target), min(32, power_of_two(p.heads))
    arguments = {
        **inputs({name: name in given for name in ("gate", "constant", "cu")}),
        "high": Out(0),
        "low": Out(1),
        "totals": Out(2),
        "constants": 0 if shared else p.heads,
        "EXCLUSIVE": p.reverse,
        "HEADS": block,
    }
    grid = (p.batch * known["pieces"] * (t.segment // t.chunk) * -(-p.heads // block),)
    return bound(gate_sums, arguments, grid, 4, 1, known=known)

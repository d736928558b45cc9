"""Prefix sums of log decays inside a chunk, exact where they are differences of large ones.

A pair of rows e < l decays by the sum of the gates of rows e + 1 .. l, or e .. l - 1 where time
runs backwards: in both cases P[l] - P[e], P being the inclusive or the exclusive prefix sum. In
float32 a difference would lose what is small next to P: after rows of -20 a pair that hardly decays
would be wrong by 1e-4. So a gate is split at 2^-10 into a multiple of that and a remainder. Prefix
sums of multiples up to 2^14 are exact, and so are their differences; prefix sums of remainders stay
below 2^-3, where float32 errs by 2^-27. No exponent is then ever larger than the gates between two
rows, a vanished decay is never divided by, and nothing overflows.

A gate below -128 is taken as -128, whose exponential is 0 in float32 as well: 128 rows stay below
2^14.

``gate_prefix_sums`` computes them once for all launches: in ``chunk_loop`` every chunk would wait
for them. The sums of a constant of the head are the same in every chunk (``constant_sums``).

Bound of ``gate_prefix_sums``: a gate read and two sums written a row and head, 2 x 8192 rows of 16
heads 3 MB: next to nothing. Measured on an H200: 0.003 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.common.sequences import find_segment
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, SHARED, power_of_two, struct
from ejkernel.kernels.triton.linear_attention.launch import LinearLaunch
from ejkernel.kernels.triton.linear_attention.rows import FULL


@triton.jit
def split_gate(gate):
    """Splits log decays into a multiple of 2^-10 and the remainder."""
    coarse = tl.floor(gate * 1024.0) * 0.0009765625
    return coarse, gate - coarse


@triton.jit
def gate_prefix_sums(
    gate,
    constant,
    cu,
    high_sums,
    low_sums,
    gate_totals,
    rows,
    heads,
    sequences,
    pieces,
    constant_stride,
    EXCLUSIVE: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Writes prefix sums of multiples and of remainders in every chunk, and their totals.

    The log decay is the sum of ``gate`` ``[batch, rows, heads]`` and of ``constant``
    ``[1 or batch, heads]``, as far as they are not None.
    """
    across = (heads + HEADS - 1) // HEADS
    program = tl.program_id(0)
    head = program % across * HEADS + tl.arange(0, HEADS)[None, :]
    chunk = (program // across).to(tl.int64)
    slot = chunk // (SEGMENT // CHUNK)
    batch, begin, _, end = find_segment(cu, slot, pieces, rows, sequences, SEGMENT, LANES)
    at = (chunk % (SEGMENT // CHUNK)).to(tl.int32) * CHUNK
    row = begin + at + tl.arange(0, CHUNK)[:, None]
    inside = (row < end) & (head < heads)
    offset = (batch * rows + row) * heads + head
    g = tl.zeros([CHUNK, HEADS], tl.float32)
    if constant is not None:
        g += tl.load(constant + batch * constant_stride + head, mask=head < heads, other=0.0)
    if gate is not None:
        g += tl.load(gate + offset, mask=inside, other=0.0).to(tl.float32)
    g = tl.where(inside, tl.maximum(g, -128.0), 0.0)
    coarse, fine = split_gate(g)
    sum_high = tl.cumsum(coarse, 0)
    sum_low = tl.cumsum(fine, 0)
    if EXCLUSIVE:
        sum_high -= coarse
        sum_low -= fine
    tl.store(high_sums + offset, sum_high, mask=inside)
    tl.store(low_sums + offset, sum_low, mask=inside)
    total = gate_totals + chunk * 2 * heads + head
    tl.store(total, tl.sum(coarse, 0)[None, :], mask=head < heads)
    tl.store(total + heads, tl.sum(fine, 0)[None, :], mask=head < heads)


@triton.jit
def in_loop_order(high, low, until, high_all, low_all, LATER: tl.constexpr):
    """Returns multiples, remainders and the log decays of every row of a chunk.

    The decays are since the state before the chunk, until the state after it, and of the full
    chunk, in the order of the loop: first row to last, or with LATER last to first. Rows past the
    valid ones add nothing.
    """
    since = high + low
    if LATER:
        since, until = until, since
    return high, low, since, until, high_all + low_all


@triton.jit
def constant_sums(
    gate, count, LATER: tl.constexpr, EXCLUSIVE: tl.constexpr, CHUNK: tl.constexpr,
    MAPS: tl.constexpr,
):  # fmt: skip
    """Returns ``in_loop_order`` of a chunk whose ``count`` rows all have the same ``gate``.

    The compiler hoists it out of a loop over full chunks.
    """
    coarse, fine = split_gate(tl.maximum(gate, -128.0))
    before = tl.arange(0, CHUNK)
    if not EXCLUSIVE:
        before += 1
    valid = CHUNK
    if MAPS != FULL:
        valid = tl.maximum(tl.minimum(count, CHUNK), 0)
        before = tl.minimum(before, valid)
    since = before.to(tl.float32)
    until = (valid - before).to(tl.float32)
    until = until * coarse + until * fine
    return in_loop_order(since * coarse, since * fine, until, valid * coarse, valid * fine, LATER)


@triton.jit
def load_chunk_sums(
    high, low, totals, at, chunk, head, heads, count, LATER: tl.constexpr, CHUNK: tl.constexpr,
    MAPS: tl.constexpr,
):  # fmt: skip
    """Loads ``in_loop_order`` of the ``count`` rows of a chunk whose sums start at ``at``."""
    row = tl.arange(0, CHUNK)
    high += at + row * heads
    low += at + row * heads
    high_all = tl.load(totals + chunk * 2 * heads + head)
    low_all = tl.load(totals + chunk * 2 * heads + heads + head)
    if MAPS == FULL:
        high = tl.load(high)
        low = tl.load(low)
    else:
        high = tl.where(row < count, tl.load(high, mask=row < count, other=0.0), high_all)
        low = tl.where(row < count, tl.load(low, mask=row < count, other=0.0), low_all)
    until = (high_all - high) + (low_all - low)
    return in_loop_order(high, low, until, high_all, low_all, LATER)


@triton.jit
def pair_decays(high, low, LATER: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the decay between the row that reads (first axis) and every row; 0 if unseen."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    if LATER:
        between = tl.where(i <= j, -between, float("-inf"))
    else:
        between = tl.where(i >= j, between, float("-inf"))
    return tl.exp(between)


@dataclass(frozen=True)
class GatePrefixSums(LinearLaunch):
    """Launch of ``gate_prefix_sums``."""

    kernel = gate_prefix_sums
    batching: ClassVar = {"gate": BATCHED, "constant": SHARED, "cu": BATCHED}

    @property
    def heads(self) -> int:
        """Heads of a program."""
        return min(32, power_of_two(self.problem.heads))

    def outputs(self):
        p = self.problem
        rows = struct("float32", p.batch, p.rows, p.heads)
        totals = struct("float32", self.chunks, 2, p.heads)
        return {"high_sums": rows, "low_sums": rows, "gate_totals": totals}

    def grid(self, target):
        return (self.chunks * -(-self.problem.heads // self.heads),)

    def options(self, target):
        return {"num_warps": 4, "num_stages": 1}

    def arguments(self, target):
        p, t = self.problem, self.tiles
        return {
            "rows": p.rows,
            "heads": p.heads,
            "sequences": p.sequences,
            "pieces": self.pieces,
            "constant_stride": self.constant_stride,
            "EXCLUSIVE": p.reverse,
            "CHUNK": t.chunk,
            "SEGMENT": t.segment,
            "HEADS": self.heads,
            "LANES": self.lanes,
        }

"""The gradient of one log decay a row and head, from numbers of rows.

The gate of row r decays every pair of a row s before it in time and a row t from it on:

    dg_r = sum over t >= r, s < r in the chunk of Z[t, s]
         + sum over t >= r of a_t        a_t = scale exp(since_t) (q_t H) do_t: s before the chunk
         + sum over s < r of b_s         b_s = exp(since_s) (k_s dH) v_s: t after the chunk
         + c                             c = exp(all) sum of H . dH: both outside

The first line is a sum over rows from r on of what they read less what is read of them, which
``read_gradients`` has, as it has b; the walk of queries' gradients has a (``reached``). All pairs
over a boundary between chunks sum to X = <H, dH>, so that no walk has to keep its states for c:

    c = X after the chunk - sum of b        X before the chunk = c + sum of a

X at the end of a segment comes from the float32 states themselves. What a and b lose to rounding, c
collects along one segment and no further: steps of 2^-9 (bfloat16; TF32 2^-11) of the largest X in
it, in sums of random sign. Where a chunk decays to nothing c is 0, whatever was lost before.

Work split: a segment of some heads a program of one warp, from the last chunk in time to the first.

Bound: five numbers a row and head: what it waits for, chunk after chunk. Measured for 2 x 8192 rows
of 16 heads on an H200: 0.016 ms.
"""

from __future__ import annotations

from ejkernel.kernels.triton.bound_launch import BoundLaunch, Out
from ejkernel.kernels.triton.common.sequences import find_segment
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.linear_attention.opening import kernel_params
from ejkernel.kernels.triton.linear_attention.problem import Problem
from ejkernel.kernels.triton.linear_attention.read_gradients import ACROSS, DOWN
from ejkernel.kernels.triton.linear_attention.tiles import Tiles
from ejkernel.kernels.triton.plan import bound, inputs
from ejkernel.kernels.triton.targets import Target

OPERANDS = ("over", "leaving", "read", "reading", "reached", "totals", "cu")


@triton.jit
def load_parts(source, place, inside, PARTS: tl.constexpr):
    """The sum of PARTS neighbours of each, a power of two: a thread has them in one piece."""
    part = tl.arange(0, PARTS)[None, None, :]
    parts = source + (place * PARTS)[:, :, None] + part
    return tl.sum(tl.load(parts, mask=inside[:, :, None], other=0.0), 2)


@triton.jit
def pull(
    over,
    leaving,
    read,
    reading,
    reached,
    totals,
    cu,
    dgate,
    rows,
    heads,
    sequences,
    pieces,
    REVERSED: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
):
    """``reached``: a in PARTS summands."""
    across = (heads + HEADS - 1) // HEADS
    program = tl.program_id(0)
    head = program % across * HEADS + tl.arange(0, HEADS)
    slot = (program // across).to(tl.int64)
    batch, begin, end, used = find_segment(cu, slot, pieces, rows, sequences, SEGMENT, LANES)
    steps = tl.maximum((end - begin + CHUNK - 1) // CHUNK, 0)
    mine = head < heads
    x = tl.load(over + slot * heads + head, mask=mine, other=0.0)
    each = tl.arange(0, CHUNK)
    for t in tl.range(0, steps, num_stages=3):
        if REVERSED:
            at = t * CHUNK
        else:
            at = (steps - 1 - t) * CHUNK
        row = begin + at + each
        place = (batch * rows + row)[:, None] * heads + head[None, :]
        inside = (row < used)[:, None] & mine[None, :]
        b = load_parts(leaving, place, inside, ACROSS)
        a = load_parts(reached, place, inside, PARTS)
        z = load_parts(reading, place, inside, DOWN)
        z -= tl.load(read + place, mask=inside, other=0.0)
        total = totals + (slot * (SEGMENT // CHUNK) + at // CHUNK) * 2 * heads + head
        every = tl.load(total, mask=mine, other=0.0)
        every += tl.load(total + heads, mask=mine, other=0.0)
        outside = tl.where(tl.exp(every) == 0.0, 0.0, x - tl.sum(b, 0))
        x = outside + tl.sum(a, 0)
        # b of the row before in time: none of a gate's own row
        if REVERSED:
            near = inside & (row + 1 < used)[:, None] & (each + 1 < CHUNK)[:, None]
            b = load_parts(leaving, place + heads, near, ACROSS)
        else:
            near = inside & (each > 0)[:, None]
            b = load_parts(leaving, place - heads, near, ACROSS)
        dg = tl.cumsum(z + a, 0, reverse=not REVERSED) + tl.cumsum(b, 0, reverse=REVERSED)
        written = (row < end)[:, None] & mine[None, :]
        tl.store(dgate + place, tl.where(inside, dg + outside[None, :], 0.0), mask=written)


def launch(p: Problem, t: Tiles, target: Target) -> BoundLaunch:
    """Of OPERANDS in their order, cu where there is one."""
    known, block = kernel_params(p, t, target), min(2, power_of_two(p.heads))
    arguments = {
        **inputs({name: name != "cu" or p.sequences > 0 for name in OPERANDS}),
        "dgate": Out(0),
        "HEADS": block,
        "PARTS": -(-p.dim // t.columns),
    }
    grid = (p.batch * known["pieces"] * -(-p.heads // block),)
    return bound(pull, arguments, grid, 1, 1, known=known)

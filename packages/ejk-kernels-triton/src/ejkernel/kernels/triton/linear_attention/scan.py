"""States passed between segments, from what every segment adds to a state.

    start of a segment = state;     state <- exp(decay of the segment) state + what it adds

Work split: some rows of the states of one head and sequence; segments one after the other, the
next one's numbers on their way while one is added.

Bound: one state a segment is read and one written, in float32: memory. 2 x 8192 rows, 16 heads of
128 x 128, segments of 1024: 2 x 17 MB = 0.008 ms on an H200.

Sources: as ``walk``.
"""

from __future__ import annotations

from ejkernel.kernels.triton.bound_launch import BoundLaunch, Out
from ejkernel.kernels.triton.common.sequences import pieces_of
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.linear_attention.opening import kernel_params
from ejkernel.kernels.triton.linear_attention.problem import Problem
from ejkernel.kernels.triton.linear_attention.tiles import Tiles
from ejkernel.kernels.triton.plan import bound, inputs
from ejkernel.kernels.triton.targets import Target

BLOCK = 1024


@triton.jit
def scan(
    ends,
    decays,
    key_decays,
    value_decays,
    initial,
    cu,
    starts,
    final,
    rows,
    heads,
    dim,
    columns,
    sequences,
    pieces,
    BACKWARD: tl.constexpr,
    SEGMENT: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A state is [dim, columns]; a program has DIM rows of one. BACKWARD: from the last segment to
    the first."""
    across = (dim + DIM - 1) // DIM
    program = tl.program_id(0)
    d = (program % across * DIM + tl.arange(0, DIM))[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    head = program // across % heads
    owner = (program // across // heads).to(tl.int64)
    batch = owner
    first = 0
    last = pieces
    if cu is not None:
        batch = owner // sequences
        cu += batch * (sequences + 1)
        sequence = (owner % sequences).to(tl.int32)
        first, last, _ = pieces_of(cu, sequence, sequences, rows, SEGMENT)
    held = (d < dim) & (c < columns)
    element = d * columns + c
    size = dim * columns
    state_at = (owner * heads + head) * size + element
    state = tl.zeros([DIM, COLUMNS], tl.float32)
    if initial is not None:
        state = tl.load(initial + state_at, mask=held, other=0.0).to(tl.float32)
    for t in tl.range(0, last - first, num_stages=4):
        if BACKWARD:
            piece = last - 1 - t
        else:
            piece = first + t
        slot = (batch * pieces + piece) * heads + head
        added = tl.load(ends + slot * size + element, mask=held, other=0.0)
        tl.store(starts + slot * size + element, state, mask=held)
        if decays is not None:
            state = state * tl.exp(tl.load(decays + slot))
        if key_decays is not None:
            of_key = key_decays + slot * dim + d
            state = state * tl.exp(tl.load(of_key, mask=d < dim, other=0.0))
        if value_decays is not None:
            of_value = value_decays + slot * columns + c
            state = state * tl.exp(tl.load(of_value, mask=c < columns, other=0.0))
        state += added
    tl.store(final + state_at, state, mask=held)


def launch(p: Problem, t: Tiles, target: Target, later: bool, initial: bool) -> BoundLaunch:
    """Of operands ends, then decays (three kinds), initial and cu as far as they are given."""
    block = power_of_two(p.value_dim)
    tall = min(max(1, BLOCK // block), power_of_two(p.dim))
    given = {
        "ends": True,
        "decays": p.scalar,
        "key_decays": p.key_parts > 0,
        "value_decays": p.value_parts > 0,
        "initial": initial,
        "cu": p.sequences > 0,
    }
    arguments = {
        **inputs(given),
        "starts": Out(0),
        "final": Out(1),
        "BACKWARD": later != p.reverse,
        "DIM": tall,
        "COLUMNS": block,
    }
    grid = (p.batch * p.states * p.heads * -(-p.dim // tall),)
    return bound(scan, arguments, grid, 4, 1, known=kernel_params(p, t, target))

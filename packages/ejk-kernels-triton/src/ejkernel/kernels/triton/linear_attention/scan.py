"""States passed between segments, from what every segment adds to a state.

    start of a segment = state;     state <- exp(decay of the segment) state + what it adds

Work split: some elements of the states of one head and sequence; segments one after the other, the
next one's numbers on their way while one is added.

Bound: one state a segment is read and one written, in float32: memory. 2 x 8192 rows, 16 heads of
128 x 128, segments of 256: 2 x 67 MB = 0.03 ms on an H200.

Sources: as ``walk``.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from ejkernel.kernels.triton.common.sequences import piece_count, pieces_of
from ejkernel.kernels.triton.launch import In, Launch, Out, power_of_two
from ejkernel.kernels.triton.linear_attention.problem import Problem
from ejkernel.kernels.triton.linear_attention.tiles import Tiles

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
    size,
    columns,
    sequences,
    pieces,
    BACKWARD: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``size``: elements of a state. BACKWARD: from the last segment to the first."""
    across = (size + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    element = program % across * BLOCK + tl.arange(0, BLOCK)
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
    held = element < size
    state_at = (owner * heads + head) * size + element
    state = tl.zeros([BLOCK], tl.float32)
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
            of_key = key_decays + slot * (size // columns) + element // columns
            state = state * tl.exp(tl.load(of_key, mask=held, other=0.0))
        if value_decays is not None:
            of_value = value_decays + slot * columns + element % columns
            state = state * tl.exp(tl.load(of_value, mask=held, other=0.0))
        state += added
    tl.store(final + state_at, state, mask=held)


def launch(p: Problem, t: Tiles, later: bool, initial: bool) -> Launch:
    """Of operands ends, then decays (three kinds), initial and cu as far as they are given."""
    size = p.dim * p.value_dim
    block = min(BLOCK, power_of_two(size))
    known = {
        "ends": True,
        "decays": p.scalar,
        "key_decays": p.key_parts > 0,
        "value_decays": p.value_parts > 0,
        "initial": initial,
        "cu": p.sequences > 0,
    }
    order = [name for name, given in known.items() if given]
    arguments: dict[str, Any] = {
        **{name: In(order.index(name)) if name in order else None for name in known},
        "starts": Out(0),
        "final": Out(1),
        "rows": p.rows,
        "heads": p.heads,
        "size": size,
        "columns": p.value_dim,
        "sequences": p.sequences,
        "pieces": piece_count(p.rows, p.sequences, t.segment),
    }
    constants = {"BACKWARD": later != p.reverse, "SEGMENT": t.segment, "BLOCK": block}
    grid = (p.batch * p.states * p.heads * -(-size // block),)
    return Launch(scan, arguments, constants, grid, 4, 1)

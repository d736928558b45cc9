"""States passed between segments, from what every segment adds to a state.

    start of a segment = state;     state <- exp(decay of the segment) state + what it adds

Work split: some rows of the states of one head and sequence; segments one after the other, the
next one's values in flight while one is added.

Bound: one state a segment is read and one written, in float32: memory. 2 x 8192 rows, 16 heads of
128 x 128, segments of 1024: 2 x 17 MB = 0.008 ms on an H200.

Sources: as ``chunk_loop``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.common.sequences import pieces_of
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, power_of_two, struct
from ejkernel.kernels.triton.linear_attention.launch import LinearLaunch

BLOCK = 1024  # elements of a state in a program


@triton.jit
def state_scan(
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
    """Writes the state before every segment and the last one.

    A state is ``[dim, columns]``; a program has DIM rows of one. BACKWARD: from the last segment to
    the first.
    """
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
    inside = (d < dim) & (c < columns)
    element = d * columns + c
    size = dim * columns
    state_at = (owner * heads + head) * size + element
    state = tl.zeros([DIM, COLUMNS], tl.float32)
    if initial is not None:
        state = tl.load(initial + state_at, mask=inside, other=0.0).to(tl.float32)
    for t in tl.range(0, last - first, num_stages=4):
        if BACKWARD:
            piece = last - 1 - t
        else:
            piece = first + t
        slot = (batch * pieces + piece) * heads + head
        added = tl.load(ends + slot * size + element, mask=inside, other=0.0)
        tl.store(starts + slot * size + element, state, mask=inside)
        if decays is not None:
            state = state * tl.exp(tl.load(decays + slot))
        if key_decays is not None:
            of_key = key_decays + slot * dim + d
            state = state * tl.exp(tl.load(of_key, mask=d < dim, other=0.0))
        if value_decays is not None:
            of_value = value_decays + slot * columns + c
            state = state * tl.exp(tl.load(of_value, mask=c < columns, other=0.0))
        state += added
    tl.store(final + state_at, state, mask=inside)


@dataclass(frozen=True)
class StateScan(LinearLaunch):
    """Launch of ``state_scan``; ``later``: states come from the segments after them in time."""

    kernel = state_scan
    batching: ClassVar = dict.fromkeys(
        ("ends", "decays", "key_decays", "value_decays", "initial", "cu"), BATCHED
    )

    later: bool

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a program."""
        columns = power_of_two(self.problem.value_dim)
        return min(max(1, BLOCK // columns), power_of_two(self.problem.dim)), columns

    def outputs(self):
        p = self.problem
        state = (p.heads, p.dim, p.value_dim)
        return {
            "starts": struct("float32", self.segments, *state),
            "final": struct("float32", p.batch * p.states, *state),
        }

    def grid(self, target):
        p = self.problem
        return (p.batch * p.states * p.heads * -(-p.dim // self.block[0]),)

    def options(self, target):
        return {"num_warps": 4, "num_stages": 1}

    def arguments(self, target):
        p = self.problem
        return {
            "rows": p.rows,
            "heads": p.heads,
            "dim": p.dim,
            "columns": p.value_dim,
            "sequences": p.sequences,
            "pieces": self.pieces,
            "BACKWARD": self.later != p.reverse,
            "SEGMENT": self.tiles.segment,
            "DIM": self.block[0],
            "COLUMNS": self.block[1],
        }

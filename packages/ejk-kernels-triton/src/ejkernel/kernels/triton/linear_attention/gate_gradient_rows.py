"""The gradient of one log decay a row and head, from one value of every row.

The gate of row r decays every pair of a row s before it in time and a row t not before it:

    dg_r = sum over t >= r, s < r in the chunk of Z[t, s]
         + sum over t >= r of a_t        a_t = scale exp(since_t) (q_t H) do_t: s before the chunk
         + sum over s < r of b_s         b_s = exp(since_s) (k_s dH) v_s: t after the chunk
         + c                             c = exp(chunk) sum of H . dH: both outside

The first line is a sum over rows t >= r of Z over the rows they read, less Z over the rows that
read them, which ``backward_kv`` writes, as it writes b; the pass of dq writes a (``state_dots``).
All pairs over a boundary between chunks sum to X = <H, dH>, so that no pass has to store its states
for c:

    c = X after the chunk - sum of b        X before the chunk = c + sum of a

X at the end of a segment comes from the float32 states themselves. The rounding errors of a and b
accumulate in c along one segment and no further: steps of 2^-9 (bfloat16; TF32 2^-11) of the
largest X in it, in sums of random sign. Where a chunk decays to nothing c is 0, whatever was lost
before.

Work split: a segment of some heads a program of one warp, from the last chunk in time to the first.

Bound: five values a row and head. The limit is waiting for them, chunk after chunk. Measured for
2 x 8192 rows of 16 heads on an H200: 0.016 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.common.sequences import find_segment
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, power_of_two, struct
from ejkernel.kernels.triton.linear_attention.backward_kv import ACROSS, DOWN
from ejkernel.kernels.triton.linear_attention.launch import LinearLaunch


@triton.jit
def load_partial_sums(source, element, inside, PARTS: tl.constexpr):
    """Loads the sums of PARTS neighbours, a power of two, which one thread has."""
    part = tl.arange(0, PARTS)[None, None, :]
    parts = source + (element * PARTS)[:, :, None] + part
    return tl.sum(tl.load(parts, mask=inside[:, :, None], other=0.0), 2)


@triton.jit
def gate_gradient_rows(
    state_dot,
    leaving,
    z_read,
    z_reading,
    state_dots,
    gate_totals,
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
    """Writes the gradient of the gates of one segment; ``state_dots``: a in PARTS summands."""
    across = (heads + HEADS - 1) // HEADS
    program = tl.program_id(0)
    head = program % across * HEADS + tl.arange(0, HEADS)
    slot = (program // across).to(tl.int64)
    batch, begin, end, used = find_segment(cu, slot, pieces, rows, sequences, SEGMENT, LANES)
    steps = tl.maximum((end - begin + CHUNK - 1) // CHUNK, 0)
    valid_head = head < heads
    x = tl.load(state_dot + slot * heads + head, mask=valid_head, other=0.0)
    chunk_row = tl.arange(0, CHUNK)
    for t in tl.range(0, steps, num_stages=3):
        if REVERSED:
            at = t * CHUNK
        else:
            at = (steps - 1 - t) * CHUNK
        row = begin + at + chunk_row
        element = (batch * rows + row)[:, None] * heads + head[None, :]
        inside = (row < used)[:, None] & valid_head[None, :]
        b = load_partial_sums(leaving, element, inside, ACROSS)
        a = load_partial_sums(state_dots, element, inside, PARTS)
        z = load_partial_sums(z_reading, element, inside, DOWN)
        z -= tl.load(z_read + element, mask=inside, other=0.0)
        total = gate_totals + (slot * (SEGMENT // CHUNK) + at // CHUNK) * 2 * heads + head
        chunk_decay = tl.load(total, mask=valid_head, other=0.0)
        chunk_decay += tl.load(total + heads, mask=valid_head, other=0.0)
        outside = tl.where(tl.exp(chunk_decay) == 0.0, 0.0, x - tl.sum(b, 0))
        x = outside + tl.sum(a, 0)
        # b of the row before in time: a gate does not decay its own row
        if REVERSED:
            near = inside & (row + 1 < used)[:, None] & (chunk_row + 1 < CHUNK)[:, None]
            b = load_partial_sums(leaving, element + heads, near, ACROSS)
        else:
            near = inside & (chunk_row > 0)[:, None]
            b = load_partial_sums(leaving, element - heads, near, ACROSS)
        dg = tl.cumsum(z + a, 0, reverse=not REVERSED) + tl.cumsum(b, 0, reverse=REVERSED)
        written = (row < end)[:, None] & valid_head[None, :]
        tl.store(dgate + element, tl.where(inside, dg + outside[None, :], 0.0), mask=written)


@dataclass(frozen=True)
class GateGradientRows(LinearLaunch):
    """Launch of ``gate_gradient_rows``."""

    kernel = gate_gradient_rows
    batching: ClassVar = {
        **dict.fromkeys(("state_dot", "leaving", "z_read", "z_reading"), BATCHED),
        **dict.fromkeys(("state_dots", "gate_totals", "cu"), BATCHED),
    }

    @property
    def heads(self) -> int:
        """Heads of a program."""
        return min(2, power_of_two(self.problem.heads))

    def outputs(self):
        p = self.problem
        return {"dgate": struct("float32", p.batch, p.rows, p.heads)}

    def grid(self, target):
        return (self.segments * -(-self.problem.heads // self.heads),)

    def options(self, target):
        return {"num_warps": 1, "num_stages": 1}

    def arguments(self, target):
        p, t = self.problem, self.tiles
        return {
            "rows": p.rows,
            "heads": p.heads,
            "sequences": p.sequences,
            "pieces": self.pieces,
            "REVERSED": p.reverse,
            "CHUNK": t.chunk,
            "SEGMENT": t.segment,
            "HEADS": self.heads,
            "PARTS": -(-p.dim // t.columns),
            "LANES": self.lanes,
        }

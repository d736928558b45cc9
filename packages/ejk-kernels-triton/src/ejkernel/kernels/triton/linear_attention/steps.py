"""Linear attention of a few tokens: the state is read once, taken through them, written once.

For every token t of a head, in float32 throughout:

    H <- exp(gates of t) H + k_t v_t^T          o_t = scale q_t H

Work split: some columns of the state of one head and sequence, in registers; tokens one after the
other, the next one's rows on their way. A state in float32 is written where it was read
(``Launch.aliases``): a caller that donates it, or carries it through a loop, has one buffer.

Bound: a state is read and written: memory. 64 sequences, 16 heads of 128 x 128: 134 MB = 0.031 ms
on an H200. Measured: 0.036 ms a token, 0.072 ms for eight.

Sources: as ``walk``.
"""

from __future__ import annotations

from ejkernel.kernels.triton.bound_launch import BoundLaunch, Out
from ejkernel.kernels.triton.common.sequences import sequence_start
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.linear_attention.opening import kernel_params
from ejkernel.kernels.triton.linear_attention.problem import Problem
from ejkernel.kernels.triton.linear_attention.tiles import Tiles, width
from ejkernel.kernels.triton.plan import bound, inputs
from ejkernel.kernels.triton.targets import Target

OPERANDS = ("query", "key", "value", "constant", "gate", "key_gate", "value_gate", "cu", "initial")


@triton.jit
def steps(
    query,
    key,
    value,
    constant,
    gate,
    key_gate,
    value_gate,
    cu,
    initial,
    out,
    final,
    rows,
    heads,
    kv_heads,
    dim,
    columns,
    sequences,
    constants,
    scale,
    REVERSED: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``constant``: a log decay of every head, of ``constants`` numbers a batch row (0: of all)."""
    across = (columns + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    column = program % across * COLUMNS
    head = program // across % heads
    owner = (program // across // heads).to(tl.int64)
    batch = owner
    begin = 0
    end = rows
    tall = dim
    if cu is not None:
        # rows behind the last sequence belong to one more, which has no state
        batch = owner // (sequences + 1)
        sequence = (owner % (sequences + 1)).to(tl.int32)
        cu += batch * (sequences + 1)
        begin = sequence_start(cu, sequence, sequences, rows)
        end = sequence_start(cu, sequence + 1, sequences, rows)
        owner = batch * sequences + sequence
        tall = tl.where(sequence < sequences, dim, 0)
    kv_head = head // (heads // kv_heads)
    d = tl.arange(0, DIM)
    c = tl.arange(0, COLUMNS)
    of_key = d < tall
    of_value = c < columns - column
    place = (owner * heads + head) * dim * columns + column
    place += d[:, None] * columns + c[None, :]
    held = of_key[:, None] & of_value[None, :]
    state = tl.zeros([DIM, COLUMNS], tl.float32)
    if initial is not None:
        state = tl.load(initial + place, mask=held, other=0.0).to(tl.float32)
    fixed = 0.0
    if constant is not None:
        fixed = tl.load(constant + batch * constants + head).to(tl.float32)
    for t in tl.range(0, end - begin, num_stages=3):
        if REVERSED:
            row = batch * rows + end - 1 - t
        else:
            row = batch * rows + begin + t
        mine = row * heads + head
        of_head = row * kv_heads + kv_head
        q = tl.load(query + mine * dim + d, mask=of_key, other=0.0).to(tl.float32)
        k = tl.load(key + of_head * dim + d, mask=of_key, other=0.0).to(tl.float32)
        v = tl.load(value + of_head * columns + column + c, mask=of_value, other=0.0)
        decay = fixed
        if gate is not None:
            decay += tl.load(gate + mine).to(tl.float32)
        if constant is not None or gate is not None:
            state = state * tl.exp(decay)
        if key_gate is not None:
            g = tl.load(key_gate + mine * dim + d, mask=of_key, other=0.0).to(tl.float32)
            state = state * tl.exp(g)[:, None]
        if value_gate is not None:
            g = tl.load(value_gate + mine * columns + column + c, mask=of_value, other=0.0)
            state = state * tl.exp(g.to(tl.float32))[None, :]
        state += k[:, None] * v.to(tl.float32)[None, :]
        o = tl.sum(q[:, None] * state, 0) * scale
        pointers = out + mine * columns + column + c
        tl.store(pointers, o.to(out.dtype.element_ty), mask=of_value)
    tl.store(final + place, state, mask=held)


def launch(
    p: Problem, t: Tiles, target: Target, given: tuple[str, ...], shared: bool, in_place: bool
) -> BoundLaunch:
    """Of the operands ``given``, in the order of OPERANDS; ``shared``: one constant for all batch
    rows."""
    block = min(t.columns, width(p.value_dim))
    arguments = {
        **inputs({name: name in given for name in OPERANDS}),
        "out": Out(0),
        "final": Out(1),
        "constants": 0 if shared else p.heads,
        "COLUMNS": block,
    }
    owners = p.sequences + 1 if p.sequences else 1
    grid = (p.batch * owners * p.heads * -(-p.value_dim // block),)
    aliases = {given.index("initial"): 1} if in_place else {}
    known = kernel_params(p, t, target)
    return bound(steps, arguments, grid, t.num_warps, 1, known=known, aliases=aliases)

"""Linear attention of a few tokens: the state is read once, updated by them, written once.

For every token t of a head, in float32 throughout:

    H <- exp(gates of t) H + k_t v_t^T          o_t = scale q_t H

Work split: some columns of the state of one head and sequence, in registers; tokens one after the
other, the next one's rows in flight. A float32 state is written where it was read: a caller that
donates it, or carries it through a loop, has one buffer.

Bound: a state is read and written: memory. 64 sequences, 16 heads of 128 x 128: 134 MB = 0.031 ms
on an H200. Measured: 0.036 ms a token, 0.072 ms for eight.

Sources: as ``chunk_loop``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ejkernel.kernels.triton.common.sequences import sequence_start
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, SHARED, struct
from ejkernel.kernels.triton.linear_attention.launch import LinearLaunch
from ejkernel.kernels.triton.linear_attention.tiles import width


class Sizes(NamedTuple):
    """Sizes of a call, as ``Problem`` has them."""

    rows: int
    heads: int
    kv_heads: int
    dim: int
    columns: int
    sequences: int


@triton.jit
def decode_tokens(
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
    sizes,
    constant_stride,
    scale,
    REVERSED: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Writes the output of every token and the state after the last one."""
    rows, heads, kv_heads, dim = sizes.rows, sizes.heads, sizes.kv_heads, sizes.dim
    columns, sequences = sizes.columns, sizes.sequences
    across = (columns + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    column = program % across * COLUMNS
    head = program // across % heads
    state_row = (program // across // heads).to(tl.int64)
    batch = state_row
    begin = 0
    end = rows
    valid_dim = dim
    if cu is not None:
        # rows after the last sequence belong to one more, which has no state
        batch = state_row // (sequences + 1)
        sequence = (state_row % (sequences + 1)).to(tl.int32)
        cu += batch * (sequences + 1)
        begin = sequence_start(cu, sequence, sequences, rows)
        end = sequence_start(cu, sequence + 1, sequences, rows)
        state_row = batch * sequences + sequence
        valid_dim = tl.where(sequence < sequences, dim, 0)
    kv_head = head // (heads // kv_heads)
    d = tl.arange(0, DIM)
    c = tl.arange(0, COLUMNS)
    of_key = d < valid_dim
    of_value = c < columns - column
    offset = (state_row * heads + head) * dim * columns + column
    offset += d[:, None] * columns + c[None, :]
    inside = of_key[:, None] & of_value[None, :]
    state = tl.zeros([DIM, COLUMNS], tl.float32)
    if initial is not None:
        state = tl.load(initial + offset, mask=inside, other=0.0).to(tl.float32)
    constant_decay = 0.0
    if constant is not None:
        constant_decay = tl.load(constant + batch * constant_stride + head).to(tl.float32)
    for t in tl.range(0, end - begin, num_stages=3):
        if REVERSED:
            row = batch * rows + end - 1 - t
        else:
            row = batch * rows + begin + t
        q_row = row * heads + head
        kv_row = row * kv_heads + kv_head
        q = tl.load(query + q_row * dim + d, mask=of_key, other=0.0).to(tl.float32)
        k = tl.load(key + kv_row * dim + d, mask=of_key, other=0.0).to(tl.float32)
        v = tl.load(value + kv_row * columns + column + c, mask=of_value, other=0.0)
        decay = constant_decay
        if gate is not None:
            decay += tl.load(gate + q_row).to(tl.float32)
        if constant is not None or gate is not None:
            state = state * tl.exp(decay)
        if key_gate is not None:
            g = tl.load(key_gate + q_row * dim + d, mask=of_key, other=0.0).to(tl.float32)
            state = state * tl.exp(g)[:, None]
        if value_gate is not None:
            g = tl.load(value_gate + q_row * columns + column + c, mask=of_value, other=0.0)
            state = state * tl.exp(g.to(tl.float32))[None, :]
        state += k[:, None] * v.to(tl.float32)[None, :]
        o = tl.sum(q[:, None] * state, 0) * scale
        pointers = out + q_row * columns + column + c
        tl.store(pointers, o.to(out.dtype.element_ty), mask=of_value)
    tl.store(final + offset, state, mask=inside)


@dataclass(frozen=True)
class DecodeTokens(LinearLaunch):
    """Launch of ``decode_tokens``; ``reuse_state``: the final state replaces the initial one."""

    kernel = decode_tokens
    batching: ClassVar = {
        **dict.fromkeys(("query", "key", "value", "gate", "key_gate", "value_gate"), BATCHED),
        "constant": SHARED,
        "cu": BATCHED,
        "initial": BATCHED,
    }

    reuse_state: bool

    @property
    def columns(self) -> int:
        """Columns of a program."""
        return min(self.tiles.columns, width(self.problem.value_dim))

    def outputs(self):
        p = self.problem
        return {
            "out": struct(p.out, p.batch, p.rows, p.heads, p.value_dim),
            "final": struct("float32", p.batch * p.states, p.heads, p.dim, p.value_dim),
        }

    def in_place(self):
        return {"final": "initial"} if self.reuse_state else {}

    def grid(self, target):
        p = self.problem
        sequences = p.sequences + 1 if p.sequences else 1
        return (p.batch * sequences * p.heads * -(-p.value_dim // self.columns),)

    def options(self, target):
        return {"num_warps": self.tiles.num_warps, "num_stages": 1}

    def arguments(self, target):
        p = self.problem
        return {
            "sizes": Sizes(p.rows, p.heads, p.kv_heads, p.dim, p.value_dim, p.sequences),
            "constant_stride": self.constant_stride,
            "scale": float(p.scale),
            "REVERSED": p.reverse,
            "DIM": width(p.dim),
            "COLUMNS": self.columns,
        }

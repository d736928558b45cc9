"""A few tokens: the state is read once, taken through them, and written once.

For every token t of a value head, in float32:

    S <- exp(g_t) S        u_t = beta_t (v_t - k_t S)        S <- S + k_t^T u_t        o_t = q_t S

The output is q_t S + (q_t k_t) u_t of the state before its update: what query and key read of it is
summed over the threads together.

Work split: some columns of the state of one head and sequence, in registers; tokens one after the
other. A float32 state is written where it was read: a caller that donates it, or carries it through
a loop, has one buffer.

Bound: a state is read and written: memory. 64 sequences, 32 heads of 128 x 128 in float32: 268 MB,
0.0625 ms on an H200 (copies 4.3 TB/s); with a bfloat16 state to read 201 MB. Measured: 0.068 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.gated_delta_rule.chunks import ChunkLaunch, find_sequence
from ejkernel.kernels.triton.gated_delta_rule.prepare import EPSILON
from ejkernel.kernels.triton.gated_delta_rule.scan import scan_programs
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, struct

OPERANDS = ("query", "key", "value", "gate", "beta", "initial", "cu")


@triton.jit
def add_pairs(a, b, c, d):
    """Returns the sums of two pairs."""
    return a + c, b + d


@triton.jit
def decode_tokens(
    query, key, value, gate, beta, initial, cu, out, final, sizes, scale,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, NORMALIZE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Takes some columns of the state of a sequence and head through its tokens."""
    DIM: tl.constexpr = sizes.DIM
    COLUMNS: tl.constexpr = sizes.COLUMNS
    across = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    column = program % across * COLUMNS
    head = program // across % sizes.heads
    kv_head = head // (sizes.heads // sizes.kv_heads)
    owner = (program // across // sizes.heads).to(tl.int64)
    sequence = find_sequence(cu, owner, sizes)
    d = tl.arange(0, DIM)
    c = tl.arange(0, COLUMNS)
    in_key = (d < KEY_DIM) & sequence.has_state
    in_value = c < VALUE_DIM - column
    offset = (sequence.state * sizes.heads + head) * KEY_DIM * VALUE_DIM + column
    offset += d[:, None] * VALUE_DIM + c[None, :]
    in_state = in_key[:, None] & in_value[None, :]
    state = tl.zeros([DIM, COLUMNS], tl.float32)
    if initial is not None:
        state = tl.load(initial + offset, mask=in_state, other=0.0).to(tl.float32)
    for t in tl.range(0, sequence.stop - sequence.start):
        if sizes.REVERSED:
            row = sequence.batch * sizes.rows + sequence.stop - 1 - t
        else:
            row = sequence.batch * sizes.rows + sequence.start + t
        at_key = (row * sizes.kv_heads + kv_head) * KEY_DIM + d
        at = row * sizes.heads + head
        at_value = at * VALUE_DIM + column + c
        q = tl.load(query + at_key, mask=in_key, other=0.0).to(tl.float32)
        k = tl.load(key + at_key, mask=in_key, other=0.0).to(tl.float32)
        v = tl.load(value + at_value, mask=in_value & sequence.has_state, other=0.0).to(tl.float32)
        if NORMALIZE:
            q = q / tl.sqrt(tl.sum(q * q, 0) + EPSILON)
            k = k / tl.sqrt(tl.sum(k * k, 0) + EPSILON)
        decay = 1.0
        if gate is not None:
            if CHANNELS:
                g = tl.load(gate + at * KEY_DIM + d, mask=in_key, other=0.0).to(tl.float32)
                state *= tl.exp(g)[:, None]
            else:
                decay = tl.exp(tl.load(gate + at).to(tl.float32))
        # what the key and the query read of the state before, in one pass over the threads
        pairs = k[:, None] * state, q[:, None] * state
        read_by_key, read_by_query = tl.reduce(pairs, 0, add_pairs)
        update = v - decay * read_by_key
        if beta is not None:
            update = update * tl.load(beta + at).to(tl.float32)
        state = decay * state + k[:, None] * update[None, :]
        o = (decay * read_by_query + tl.sum(q * k, 0) * update) * scale
        # rows past the last sequence may have any gate and beta
        o = tl.where(sequence.has_state, o, 0.0)
        tl.store(out + at_value, o.to(out.dtype.element_ty), mask=in_value)
    tl.store(final + offset, state, mask=in_state)


@dataclass(frozen=True)
class DecodeLaunch(ChunkLaunch):
    """Launch of ``decode_tokens``: out ``[batch, rows, heads, dv]`` and the float32 states.

    ``overwrites``: the new states lie in the memory of the initial ones.
    """

    kernel = decode_tokens
    batching: ClassVar = dict.fromkeys(OPERANDS, BATCHED)

    overwrites: bool

    def outputs(self):
        p = self.problem
        return {
            "out": struct(p.out, p.batch, p.rows, p.heads, p.value_dim),
            "final": struct("float32", p.batch * p.states, p.heads, p.dim, p.value_dim),
        }

    def in_place(self):
        return {"final": "initial"} if self.overwrites else {}

    def grid(self, target):
        return (scan_programs(self),)

    def arguments(self, target):
        p = self.problem
        return {
            "sizes": self.sizes(target),
            "scale": float(p.scale),
            "KEY_DIM": p.dim,
            "VALUE_DIM": p.value_dim,
            "NORMALIZE": p.normalize,
            "CHANNELS": p.channel_gates,
        }

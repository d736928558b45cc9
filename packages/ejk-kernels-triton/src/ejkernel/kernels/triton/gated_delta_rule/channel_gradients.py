"""Gradients of queries, keys, gates per key channel and beta, from states and their gradients.

With the names of ``row_gradients``, and D_t, d(t, s) and R_t vectors over the channels,

    A_ts = scale do_t u_s  (s up to t)        B_ts = -dv_t u_s  (s before t)
    dq_t      = scale D_t (do_t S^T) + sum_s A_ts d(t, s) k_s
    reading_t = -D_t (dv_t S^T) + sum_s B_ts d(t, s) k_s
    entering_s = R_s (u_s dS^T) + sum_t d(t, s) (A_ts q_t + B_ts k_t)        dk = reading + entering
    dg_t = decay of the chunk <S, dS> + sum_s R_s k_s (u_s dS^T)
         + sum over r = t and later: q_r dq_r + k_r reading_r - k_r entering_r

channel by channel. The pair of a token with itself does not decay: it is left out of dg, and added
to dq and dk at the end. Sums over pairs go level by level, see ``channel_gates``.

Work split: a block of the channels of one chunk and head a program, which all form both matrices of
pairs. The gradient through the normalization needs whole rows and is left to XLA.

Bound: states and their gradients, updates, do, dv, q, k and gates are read, gradients written: 8192
tokens of 32 heads of 128, chunks of 64 in bfloat16: 1.2 GB, 0.28 ms at 4.3 TB/s. Seven matmuls a
level are 0.18 TFLOP, 0.35 ms at 500 TFLOP/s. Measured: 1.11 ms where one level does, 1.45 with all.
"""

from __future__ import annotations

from typing import ClassVar

from ejkernel.kernels.triton.gated_delta_rule.blocks import (
    BlockLaunch,
    load_block,
    load_state_block,
    reciprocal_length,
    store_block,
)
from ejkernel.kernels.triton.gated_delta_rule.channel_gates import (
    decays_of_chunk,
    direct_decays,
    direct_level,
    is_in_block,
    is_pair,
    level_exponents,
    load_channel_gates,
    split_parts,
    sum_selected,
    time_order,
    total_decay,
)
from ejkernel.kernels.triton.gated_delta_rule.chunks import (
    GRADIENT_OPERANDS,
    find_chunk,
    load_value_rows,
)
from ejkernel.kernels.triton.gated_delta_rule.prepare import load_beta
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, struct
from ejkernel.kernels.triton.linear_attention.tiles import width


@triton.jit
def channel_gradients(
    query, key, gate, beta, dout, updates, dvalue, states, dstates, cu, dquery, dkey, dgate, dbeta,
    sizes, scale, NORMALIZE: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of one chunk and value head for a block of key channels."""
    CHUNK: tl.constexpr = sizes.CHUNK
    DTYPE: tl.constexpr = sizes.DTYPE
    PRECISION: tl.constexpr = sizes.PRECISION
    heads = sizes.heads
    program = tl.program_id(0)
    blocks = (sizes.dim + BLOCK - 1) // BLOCK
    channel = program % blocks * BLOCK
    head = program // blocks % heads
    slot = (program // blocks // heads).to(tl.int64)
    number = slot * heads + head
    chunk = find_chunk(cu, slot, sizes)
    base, tokens, rows = chunk.base, chunk.tokens, chunk.rows
    token = tl.arange(0, CHUNK)
    valid = token < tokens
    row = token[:, None]
    column = token[None, :]
    order = time_order(CHUNK, sizes.REVERSED)
    before = order[:, None] > order[None, :]
    do = load_value_rows(dout, chunk, head, 0, sizes)
    u = load_value_rows(updates, chunk, head, 0, sizes)
    dv = load_value_rows(dvalue, chunk, head, 0, sizes)
    do = do.to(DTYPE)
    seen = tl.dot(do, tl.trans(u), input_precision=PRECISION) * scale
    itself = tl.sum(tl.where(row == column, seen, 0.0), 1)
    seen = tl.where(before, seen, 0.0).to(DTYPE)
    read = tl.dot(dv, tl.trans(u), input_precision=PRECISION)
    if dbeta is not None:
        at = (base + token) * heads + head
        strength = tl.where(valid, load_beta(beta, at, valid), 1.0)
        gain = tl.sum(tl.where(row == column, read, 0.0), 1)
        tl.store(dbeta + at, gain / strength / strength, mask=(token < rows) & (channel == 0))
    read = tl.where(before, -read, 0.0).to(DTYPE)

    parts = load_channel_gates(gate, base, tokens, head, channel, sizes, BLOCK)
    since, until = decays_of_chunk(parts, order)
    state = load_state_block(states, number, channel, sizes, BLOCK)
    other = tl.trans(state)
    dq = tl.dot(do, other, input_precision=PRECISION) * (since * scale)
    reading = tl.dot(dv, other, input_precision=PRECISION) * -since
    dstate = load_state_block(dstates, number, channel, sizes, BLOCK)
    entering = tl.dot(u, tl.trans(dstate), input_precision=PRECISION) * until
    ended = total_decay(parts) * tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
    q = load_block(query, base, tokens, head, channel, sizes, BLOCK)
    k = load_block(key, base, tokens, head, channel, sizes, BLOCK)
    if NORMALIZE:
        q_factor = reciprocal_length(query, base, tokens, head, sizes, BLOCK)
        k_factor = reciprocal_length(key, base, tokens, head, sizes, BLOCK)
        q = (q.to(tl.float32) * q_factor[:, None]).to(DTYPE)
        k = (k.to(tl.float32) * k_factor[:, None]).to(DTYPE)
    ended += tl.sum(k.to(tl.float32) * entering, 0)
    direct = direct_level(parts, order, LEVELS)
    if direct >= 0:
        of_row, of_column = direct_decays(parts, order, direct)
        pair = is_in_block(order, direct)
        k_level = (k.to(tl.float32) * of_column).to(DTYPE)
        pairs = tl.where(pair, seen, 0.0).to(DTYPE)
        dq += of_row * tl.dot(pairs, k_level, input_precision=PRECISION)
        q_level = (q.to(tl.float32) * of_row).to(DTYPE)
        entered = tl.dot(tl.trans(pairs), q_level, input_precision=PRECISION)
        pairs = tl.where(pair, read, 0.0).to(DTYPE)
        reading += of_row * tl.dot(pairs, k_level, input_precision=PRECISION)
        k_level = (k.to(tl.float32) * of_row).to(DTYPE)
        entered = tl.dot(tl.trans(pairs), k_level, acc=entered, input_precision=PRECISION)
        entering += of_column * entered
    for level in tl.range(direct + 1, LEVELS, num_stages=1):
        decayed = tl.exp2(level_exponents(parts, order, level))
        pair = is_pair(order, level)
        k_level = (k.to(tl.float32) * decayed).to(DTYPE)
        pairs = tl.where(pair, read, 0.0).to(DTYPE)
        reading += decayed * tl.dot(pairs, k_level, input_precision=PRECISION)
        entered = tl.dot(tl.trans(pairs), k_level, input_precision=PRECISION)
        pairs = tl.where(pair, seen, 0.0).to(DTYPE)
        dq += decayed * tl.dot(pairs, k_level, input_precision=PRECISION)
        q_level = (q.to(tl.float32) * decayed).to(DTYPE)
        entered = tl.dot(tl.trans(pairs), q_level, acc=entered, input_precision=PRECISION)
        entering += decayed * entered

    q = q.to(tl.float32)
    k = k.to(tl.float32)
    change = split_parts(q * dq + k * (reading - entering), 3)
    later = order[None, :] >= order[:, None]
    dg = tl.where(valid[:, None], sum_selected(later, change) + ended[None, :], 0.0)
    store_block(dgate, dg, base, rows, head, channel, sizes, BLOCK)
    dq += itself[:, None] * k
    store_block(dquery, dq, base, rows, head, channel, sizes, BLOCK)
    dk = reading + entering + itself[:, None] * q
    store_block(dkey, dk, base, rows, head, channel, sizes, BLOCK)


class ChannelGradientsLaunch(BlockLaunch):
    """Launch of ``channel_gradients``.

    Results: dquery and dkey ``[batch, rows, heads, dk]``, of the normalized vectors where they are
    normalized and in float32 then; dgate of the same shape in float32, and dbeta ``[batch, rows,
    heads]`` in float32 where there is beta.
    """

    kernel = channel_gradients
    batching: ClassVar = dict.fromkeys(GRADIENT_OPERANDS, BATCHED)
    max_block = 32

    @property
    def columns(self) -> int:
        """All columns of the values."""
        return width(self.problem.value_dim)

    def outputs(self):
        p = self.problem
        size = (p.batch, p.rows, p.heads, p.dim)
        keys = struct("float32" if p.normalize else p.dtype, *size)
        return {
            "dquery": keys,
            "dkey": keys,
            "dgate": struct("float32", *size),
            "dbeta": struct("float32", *size[:3]) if self.has("beta") else None,
        }

    def grid(self, target):
        return (self.slots * self.problem.heads * -(-self.problem.dim // self.key_width),)

    def options(self, target):
        return {"num_warps": 4, "num_stages": 1}

    def arguments(self, target):
        rows = self.row_tiles(target, "query", "key", "dout", "updates", "dvalue")
        return super().arguments(target) | rows | self.matrices(target, "states", "dstates")

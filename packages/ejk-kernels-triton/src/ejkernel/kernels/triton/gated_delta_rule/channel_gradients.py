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

Work split: one chunk of one head a program.

Bound: states and their gradients, updates, do, dv, q, k and gates are read, gradients written: 8192
tokens of 32 heads of 128, chunks of 64 in bfloat16: 1.2 GB, 0.28 ms at 4.3 TB/s. Seven matmuls a
level are 0.18 TFLOP, 0.35 ms at 500 TFLOP/s. Not measured.
"""

from __future__ import annotations

from ejkernel.kernels.triton.gated_delta_rule.channel_gates import (
    decays_of_chunk,
    is_pair,
    level_decays,
    load_channel_gates,
    split_parts,
    sum_selected,
    time_order,
    total_decay,
)
from ejkernel.kernels.triton.gated_delta_rule.chunks import find_chunk
from ejkernel.kernels.triton.gated_delta_rule.prepare import load_beta, reciprocal_lengths
from ejkernel.kernels.triton.gated_delta_rule.row_gradients import (
    GradientsLaunch,
    load_state,
    load_tile,
    store_gradient,
)
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import struct
from ejkernel.kernels.triton.linear_attention.rows import store_rows


@triton.jit
def channel_gradients(
    query, key, gate, beta, dout, updates, dvalue, states, dstates, cu, dquery, dkey, dgate, dbeta,
    sizes, scale, NORMALIZE: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = sizes.CHUNK
    DTYPE: tl.constexpr = sizes.DTYPE
    PRECISION: tl.constexpr = sizes.PRECISION
    heads = sizes.heads
    program = tl.program_id(0)
    head = program % heads
    slot = (program // heads).to(tl.int64)
    number = slot * heads + head
    base, tokens, rows = find_chunk(cu, slot, sizes)
    token = tl.arange(0, CHUNK)
    valid = token < tokens
    in_rows = token < rows
    row = token[:, None]
    column = token[None, :]
    order = time_order(CHUNK, sizes.REVERSED)
    before = order[:, None] > order[None, :]
    q = load_tile(query, base, tokens, head, heads, sizes.dim, sizes.DIM, sizes)
    k = load_tile(key, base, tokens, head, heads, sizes.dim, sizes.DIM, sizes)
    q_factor = tl.zeros([CHUNK], tl.float32) + 1.0
    k_factor = q_factor
    if NORMALIZE:
        q_factor = reciprocal_lengths(q)
        k_factor = reciprocal_lengths(k)
        q = (q.to(tl.float32) * q_factor[:, None]).to(DTYPE)
        k = (k.to(tl.float32) * k_factor[:, None]).to(DTYPE)
    parts = load_channel_gates(gate, base, tokens, head, sizes)
    since, until = decays_of_chunk(parts, order)

    do = load_tile(dout, base, tokens, head, heads, sizes.value_dim, sizes.COLUMNS, sizes)
    u = load_tile(updates, base, tokens, head, heads, sizes.value_dim, sizes.COLUMNS, sizes)
    dv = load_tile(dvalue, base, tokens, head, heads, sizes.value_dim, sizes.COLUMNS, sizes)
    do = do.to(DTYPE)
    seen = tl.dot(do, tl.trans(u), input_precision=PRECISION) * scale
    itself = tl.sum(tl.where(row == column, seen, 0.0), 1)
    seen = tl.where(before, seen, 0.0).to(DTYPE)
    read = tl.dot(dv, tl.trans(u), input_precision=PRECISION)
    if dbeta is not None:
        at = (base + token) * heads + head
        strength = tl.where(valid, load_beta(beta, at, valid), 1.0)
        gain = tl.sum(tl.where(row == column, read, 0.0), 1)
        tl.store(dbeta + at, gain / strength / strength, mask=in_rows)
    read = tl.where(before, -read, 0.0).to(DTYPE)

    state = load_state(states, number, sizes)
    dstate = load_state(dstates, number, sizes)
    dq = tl.dot(do, state, input_precision=PRECISION) * (since * scale)
    reading = tl.dot(dv, state, input_precision=PRECISION) * -since
    entering = tl.dot(u, dstate, input_precision=PRECISION) * until
    ended = tl.sum(k.to(tl.float32) * entering, 0)
    ended += total_decay(parts) * tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)
    for level in tl.range(0, LEVELS, num_stages=1):
        decayed = level_decays(parts, order, level)
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

    change = q.to(tl.float32) * dq + k.to(tl.float32) * (reading - entering)
    later = order[None, :] >= order[:, None]
    dg = sum_selected(later, split_parts(change)) + ended[None, :]
    dg = tl.where(valid[:, None], dg, 0.0)
    store_rows(dgate, dg, base, rows, head, heads, 0, sizes.dim, CHUNK, sizes.DIM, sizes.MAPS)
    store_gradient(
        dquery, dq, query, key, itself, q_factor, k_factor, base, tokens, rows, head, sizes,
        NORMALIZE,
    )  # fmt: skip
    store_gradient(
        dkey, reading + entering, key, query, itself, k_factor, q_factor, base, tokens, rows, head,
        sizes, NORMALIZE,
    )  # fmt: skip


class ChannelGradientsLaunch(GradientsLaunch):
    """Launch of ``channel_gradients``.

    Results: dquery and dkey ``[batch, rows, heads, dk]``, dgate of the same shape in float32, and
    dbeta ``[batch, rows, heads]`` in float32 where there is beta.
    """

    kernel = channel_gradients

    def outputs(self):
        p = self.problem
        gates = struct("float32", p.batch, p.rows, p.heads, p.dim)
        return super().outputs() | {"dgate": gates}

    def options(self, target):
        return {"num_warps": 8, "num_stages": 1}

    def arguments(self, target):
        return super().arguments(target) | {"LEVELS": self.levels}

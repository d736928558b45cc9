"""Gradients of queries, keys, gates and beta, from states and their gradients.

With S the state before the chunk, dS the gradient of the state after it, u the updates, D, d(t, s)
and R_t the decays from the chunk start, between tokens, and to the chunk end, and k of unit length
where keys are normalized,

    A_ts = do_t u_s  (s up to t)        B_ts = -dv_t u_s  (s before t)
    dq   = scale (D do S^T + (A d) k)
    dk   = -D dv S^T + (B d) k                                 as what reads the state
         + R u dS^T + (A d)^T scale q + (B d)^T k              as what enters it
    dbeta_t = dv_t u_t / beta_t^2
    dg_t    = decay of the chunk <S, dS> + sum_s R_s u_s (k_s dS)
            + sum over tokens r from t on: q_r dq_r + k_r dk_r reading - k_r dk_r entering

The pairs of a token with itself do not decay: they are left out of the last line, where they would
cancel, and so is no decay divided by.

Work split: one chunk of one key head a program, its value heads in turn, whose gradients of q and k
it adds.

Bound: states and their gradients, updates, do and dv are read. 8192 tokens, 16 key and 32 value
heads of 128, chunks of 64 in bfloat16: 268 + 201 MB, with q, k and their gradients 0.6 GB, 0.14 ms at
4.3 TB/s; 51 GFLOP of matmuls, 0.1 ms at 500 TFLOP/s.
"""

from __future__ import annotations

from typing import ClassVar

from ejkernel.kernels.triton.gated_delta_rule.chunks import ChunkLaunch, find_chunk
from ejkernel.kernels.triton.gated_delta_rule.gates import (
    is_earlier,
    load_gates,
    pair_decays,
    prefix_sums,
)
from ejkernel.kernels.triton.gated_delta_rule.prepare import load_beta, reciprocal_lengths
from ejkernel.kernels.triton.gated_delta_rule.tiles import padded
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, struct
from ejkernel.kernels.triton.linear_attention.rows import load_rows, store_rows

OPERANDS = (
    "query", "key", "gate", "beta", "dout", "updates", "dvalue", "states", "dstates", "cu",
)  # fmt: skip


@triton.jit
def row_gradients(
    query, key, gate, beta, dout, updates, dvalue, states, dstates, cu, dquery, dkey, dgate, dbeta,
    sizes, scale, NORMALIZE: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = sizes.CHUNK
    DIM: tl.constexpr = sizes.DIM
    COLUMNS: tl.constexpr = sizes.COLUMNS
    DTYPE: tl.constexpr = sizes.DTYPE
    PRECISION: tl.constexpr = sizes.PRECISION
    program = tl.program_id(0)
    kv_head = program % sizes.kv_heads
    slot = (program // sizes.kv_heads).to(tl.int64)
    base, tokens, rows = find_chunk(cu, slot, sizes)
    token = tl.arange(0, CHUNK)
    valid = token < tokens
    earlier = is_earlier(CHUNK, sizes.REVERSED)
    q = load_rows(
        query, base, tokens, 0, kv_head, sizes.kv_heads, 0, sizes.dim, CHUNK, DIM, sizes.MAPS
    )
    k = load_rows(
        key, base, tokens, 0, kv_head, sizes.kv_heads, 0, sizes.dim, CHUNK, DIM, sizes.MAPS
    )
    q_factor = tl.zeros([CHUNK], tl.float32) + scale
    k_factor = tl.zeros([CHUNK], tl.float32) + 1.0
    if NORMALIZE:
        q_factor = q_factor * reciprocal_lengths(q)
        k_factor = reciprocal_lengths(k)
    d = tl.arange(0, DIM)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    inside = (d < sizes.dim) & (c < sizes.value_dim)
    state_size = sizes.dim * sizes.value_dim
    dq_sum = tl.zeros([CHUNK, DIM], tl.float32)
    dk_sum = tl.zeros([CHUNK, DIM], tl.float32)
    groups = sizes.heads // sizes.kv_heads
    for i in tl.range(0, groups, num_stages=1):
        head = kv_head * groups + i
        at = (base + token) * sizes.heads + head
        since = valid.to(tl.float32)
        until = since
        decayed = tl.where(earlier, 1.0, 0.0)
        total = 0.0
        if gate is not None:
            g = load_gates(gate, at, valid)
            high, low, total_high, total_low = prefix_sums(g, sizes.REVERSED)
            decayed = pair_decays(high, low, earlier)
            since = tl.where(valid, tl.exp(high + low), 0.0)
            until = tl.where(valid, tl.exp((total_high - high) + (total_low - low)), 0.0)
            total = total_high + total_low
        place = (slot * sizes.heads + head) * state_size + d * sizes.value_dim + c
        state = tl.load(states + place, mask=inside, other=0.0)
        dstate = tl.load(dstates + place, mask=inside, other=0.0)
        do = load_rows(
            dout, base, tokens, 0, head, sizes.heads, 0, sizes.value_dim, CHUNK, COLUMNS, sizes.MAPS
        ).to(DTYPE)
        u = load_rows(
            updates, base, tokens, 0, head, sizes.heads, 0, sizes.value_dim, CHUNK, COLUMNS,
            sizes.MAPS,
        )  # fmt: skip
        dv = load_rows(
            dvalue, base, tokens, 0, head, sizes.heads, 0, sizes.value_dim, CHUNK, COLUMNS,
            sizes.MAPS,
        )  # fmt: skip
        ended = 0.0
        if dgate is not None:
            through = tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
            ended = tl.exp(total) * tl.sum(through, 0)
        if dbeta is not None:
            strength = load_beta(beta, at, valid)
            strength = tl.where(valid, strength, 1.0)[:, None]
            gain = tl.sum(dv.to(tl.float32) / strength * (u.to(tl.float32) / strength), 1)
            tl.store(dbeta + at, gain, mask=token < rows)

        pairs = tl.dot(do, tl.trans(u), input_precision=PRECISION)
        itself = tl.sum(tl.where(token[:, None] == token[None, :], pairs, 0.0), 1)
        pairs = pairs * decayed
        read = tl.dot(dv, tl.trans(u), input_precision=PRECISION) * -decayed
        # queries and keys that read the state: gradients of k of unit length, and of scale q
        weights = (pairs * k_factor[None, :]).to(DTYPE)
        dq = tl.dot(do, tl.trans(state), input_precision=PRECISION) * since[:, None]
        dq = tl.dot(weights, k.to(DTYPE), acc=dq, input_precision=PRECISION)
        moved = tl.sum(dq * q.to(tl.float32), 1) * q_factor
        dq_sum += dq + (itself * k_factor)[:, None] * k.to(tl.float32)
        weights = (read * k_factor[None, :]).to(DTYPE)
        dk = tl.dot(dv, tl.trans(state), input_precision=PRECISION) * -since[:, None]
        dk = tl.dot(weights, k.to(DTYPE), acc=dk, input_precision=PRECISION)
        moved += tl.sum(dk * k.to(tl.float32), 1) * k_factor
        dk_sum += dk
        # keys that enter it
        dk = tl.dot(u, tl.trans(dstate), input_precision=PRECISION) * until[:, None]
        ended += tl.sum(tl.sum(dk * k.to(tl.float32), 1) * k_factor, 0)
        weights = tl.trans((pairs * q_factor[:, None]).to(DTYPE))
        dk = tl.dot(weights, q.to(DTYPE), acc=dk, input_precision=PRECISION)
        weights = tl.trans((read * k_factor[:, None]).to(DTYPE))
        dk = tl.dot(weights, k.to(DTYPE), acc=dk, input_precision=PRECISION)
        moved -= tl.sum(dk * k.to(tl.float32), 1) * k_factor
        dk_sum += dk + (itself * q_factor)[:, None] * q.to(tl.float32)
        if dgate is not None:
            moved = tl.cumsum(tl.where(valid, moved, 0.0), 0, reverse=not sizes.REVERSED)
            tl.store(dgate + at, tl.where(valid, moved + ended, 0.0), mask=token < rows)

    if NORMALIZE:
        # of x / |x|: what is along x does not count
        x = q.to(tl.float32) * reciprocal_lengths(q)[:, None]
        dq_sum = (dq_sum - x * tl.sum(x * dq_sum, 1)[:, None]) * q_factor[:, None]
        x = k.to(tl.float32) * k_factor[:, None]
        dk_sum = (dk_sum - x * tl.sum(x * dk_sum, 1)[:, None]) * k_factor[:, None]
    else:
        dq_sum = dq_sum * scale
    store_rows(
        dquery, dq_sum, base, rows, kv_head, sizes.kv_heads, 0, sizes.dim, CHUNK, DIM, sizes.MAPS
    )
    store_rows(
        dkey, dk_sum, base, rows, kv_head, sizes.kv_heads, 0, sizes.dim, CHUNK, DIM, sizes.MAPS
    )


class RowGradientsLaunch(ChunkLaunch):
    """Launch of ``row_gradients``.

    Results: dquery and dkey ``[batch, rows, kv_heads, dk]``, and dgate and dbeta ``[batch, rows,
    heads]`` in float32 where there are gates and beta.
    """

    kernel = row_gradients
    batching: ClassVar = dict.fromkeys(OPERANDS, BATCHED)

    @property
    def columns(self) -> int:
        """All columns of the values."""
        return padded(self.problem.value_dim)

    def outputs(self):
        p = self.problem
        keys = struct(p.dtype, p.batch, p.rows, p.kv_heads, p.dim)
        rows = struct("float32", p.batch, p.rows, p.heads)
        return {
            "dquery": keys,
            "dkey": keys,
            "dgate": rows if self.has("gate") else None,
            "dbeta": rows if self.has("beta") else None,
        }

    def grid(self, target):
        return (self.slots * self.problem.kv_heads,)

    def options(self, target):
        return {"num_warps": 8, "num_stages": 1}

    def arguments(self, target):
        rows = self.row_tiles(target, "query", "key", "dout", "updates", "dvalue")
        return rows | {
            "sizes": self.sizes(target),
            "scale": float(self.problem.scale),
            "NORMALIZE": self.problem.normalize,
        }

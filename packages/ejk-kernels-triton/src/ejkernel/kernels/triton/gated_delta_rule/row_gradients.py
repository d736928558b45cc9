"""Gradients of queries, keys, gates and beta, from states and their gradients.

With S the state before the chunk, dS the gradient of the state after it, u the updates, D_t,
d(t, s) and R_t the decays from the chunk start, between tokens and to the chunk end, and q and k of
unit length where they are normalized,

    A_ts = scale d(t, s) do_t u_s  (s up to t)        B_ts = -d(t, s) dv_t u_s  (s before t)
    dq      = scale D do S^T + A k
    dk      = reading + entering
    reading = -D dv S^T + B k          entering = R u dS^T + A^T q + B^T k
    dbeta_t = dv_t u_t / beta_t^2
    dg_t    = decay of the chunk <S, dS> + sum_s R_s u_s (k_s dS)
            + sum over r = t and later: q_r dq_r + k_r reading_r - k_r entering_r

The pair of a token with itself does not decay. It is left out of the last line, where it would
cancel, and added to dq and dk at the end.

Work split: one chunk of one key head a program. It loops over the value heads of the key head
twice, first for dq and then for dk, as registers hold one of them. Tiles that are needed in
registers are loaded again where they are used.

Bound: states and their gradients, updates, do and dv are read. 8192 tokens, 16 key and 32 value
heads of 128, chunks of 64 in bfloat16: 268 + 201 MB, with q, k and their gradients 0.6 GB, 0.14 ms
at 4.3 TB/s; 55 GFLOP of matmuls, 0.11 ms at 500 TFLOP/s. Measured: 0.46 ms,
0.04 of it for <S, dS>.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from ejkernel.kernels.triton.gated_delta_rule.chunks import (
    GRADIENT_OPERANDS,
    ChunkLaunch,
    find_chunk,
    load_key_rows,
    load_matrix,
    load_value_rows,
)
from ejkernel.kernels.triton.gated_delta_rule.gates import is_up_to, load_gates, pair_decays
from ejkernel.kernels.triton.gated_delta_rule.prepare import load_beta, reciprocal_lengths
from ejkernel.kernels.triton.gated_delta_rule.tiles import has_sm90_kernel
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, struct
from ejkernel.kernels.triton.linear_attention.rows import store_rows
from ejkernel.kernels.triton.linear_attention.tiles import width


@triton.jit
def load_state(states, number, sizes):
    """Loads a matrix of ``[count, dim, value_dim]``."""
    return load_matrix(
        states, number, sizes.dim, sizes.value_dim, sizes.DIM, sizes.COLUMNS, sizes.MAPS
    )


@triton.jit
def inner_product(x, y, number, sizes):
    """Returns the inner product of two states, a few rows at a time to save registers."""
    d = tl.arange(0, 16)[:, None]
    c = tl.arange(0, sizes.COLUMNS)[None, :]
    total = tl.zeros([16, sizes.COLUMNS], tl.float32)
    for i in range(0, sizes.dim, 16):
        offset = (number * sizes.dim + i + d) * sizes.value_dim + c
        inside = (i + d < sizes.dim) & (c < sizes.value_dim)
        row = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
        total += row * tl.load(y + offset, mask=inside, other=0.0).to(tl.float32)
    return tl.sum(tl.sum(total, 1), 0)


@triton.jit
def load_decays(gate, at, valid, sizes):
    """Returns decays between tokens, from the chunk start, to the chunk end, and of the chunk."""
    since = valid.to(tl.float32)
    until = since
    up_to = is_up_to(sizes.CHUNK, sizes.REVERSED)
    decayed = tl.where(up_to, 1.0, 0.0)
    total = 1.0
    if gate is not None:
        high, low, since, until, total = load_gates(gate, at, valid, sizes.REVERSED)
        decayed = pair_decays(high, low, up_to)
    return decayed, since, until, total


@triton.jit
def row_gradients(
    query, key, gate, beta, dout, updates, dvalue, states, dstates, state_rows, cu, dquery, dkey,
    dgate, dbeta, sizes, scale, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of one chunk and key head: queries, keys, gates and beta."""
    CHUNK: tl.constexpr = sizes.CHUNK
    DTYPE: tl.constexpr = sizes.DTYPE
    PRECISION: tl.constexpr = sizes.PRECISION
    kv_heads = sizes.kv_heads
    heads = sizes.heads
    program = tl.program_id(0)
    kv_head = program % kv_heads
    slot = (program // kv_heads).to(tl.int64)
    chunk = find_chunk(cu, slot, sizes)
    token = tl.arange(0, CHUNK)
    valid = token < chunk.tokens
    in_rows = token < chunk.rows
    row = token[:, None]
    column = token[None, :]
    q = load_key_rows(query, chunk, kv_head, sizes)
    k = load_key_rows(key, chunk, kv_head, sizes)
    q_factor = tl.zeros([CHUNK], tl.float32) + 1.0
    k_factor = q_factor
    if NORMALIZE:
        q_factor = reciprocal_lengths(q)
        k_factor = reciprocal_lengths(k)
        q = q.to(tl.float32) * q_factor[:, None]
        k = k.to(tl.float32) * k_factor[:, None]
    q = q.to(DTYPE)
    k = k.to(DTYPE)
    groups = heads // kv_heads
    # weights of a token for itself; ``dq`` and ``dk`` are without them until the end
    itself = tl.zeros([CHUNK], tl.float32)

    dq = tl.zeros([CHUNK, sizes.DIM], tl.float32)
    along_before = tl.zeros([CHUNK], tl.float32)
    for i in tl.range(0, groups, num_stages=1, disable_licm=True):
        head = kv_head * groups + i
        at = (chunk.base + token) * heads + head
        decayed, since, _, _ = load_decays(gate, at, valid, sizes)
        do = load_value_rows(dout, chunk, head, 0, sizes)
        u = load_value_rows(updates, chunk, head, 0, sizes)
        pairs = tl.dot(do.to(DTYPE), tl.trans(u), input_precision=PRECISION) * (decayed * scale)
        itself += tl.sum(tl.where(row == column, pairs, 0.0), 1)
        pairs = tl.where(row == column, 0.0, pairs).to(DTYPE)
        do = (do.to(tl.float32) * (since * scale)[:, None]).to(DTYPE)
        state = load_state(states, slot * heads + head, sizes)
        dq = tl.dot(do, tl.trans(state), acc=dq, input_precision=PRECISION)
        dq = tl.dot(pairs, k, acc=dq, input_precision=PRECISION)
        if dgate is not None:
            # loaded again: in registers it would stay there
            x = load_key_rows(query, chunk, kv_head, sizes)
            along = tl.sum(dq * x.to(tl.float32), 1)
            tl.store(dgate + at, (along - along_before) * q_factor, mask=in_rows)
            along_before = along
    store_gradient(
        dquery, dq, query, key, itself, q_factor, k_factor, chunk, kv_head, sizes, NORMALIZE
    )
    # what other threads stored to ``dgate`` is read below
    tl.debug_barrier()

    dk = tl.zeros([CHUNK, sizes.DIM], tl.float32)
    along_before = tl.zeros([CHUNK], tl.float32)
    for i in tl.range(0, groups, num_stages=1, disable_licm=True):
        head = kv_head * groups + i
        number = slot * heads + head
        at = (chunk.base + token) * heads + head
        decayed, since, until, total = load_decays(gate, at, valid, sizes)
        u = load_value_rows(updates, chunk, head, 0, sizes)
        dv = load_value_rows(dvalue, chunk, head, 0, sizes)
        # keys that read the state
        pairs = tl.dot(dv, tl.trans(u), input_precision=PRECISION)
        if dbeta is not None:
            strength = tl.where(valid, load_beta(beta, at, valid), 1.0)
            gain = tl.sum(tl.where(row == column, pairs, 0.0), 1)
            tl.store(dbeta + at, gain / strength / strength, mask=in_rows)
        read = tl.where(row == column, 0.0, pairs * -decayed).to(DTYPE)
        dv = (dv.to(tl.float32) * -since[:, None]).to(DTYPE)
        state = load_state(states, number, sizes)
        dk = tl.dot(dv, tl.trans(state), acc=dk, input_precision=PRECISION)
        dk = tl.dot(read, k, acc=dk, input_precision=PRECISION)
        if dgate is not None:
            x = load_key_rows(key, chunk, kv_head, sizes)
            along_read = tl.sum(dk * x.to(tl.float32), 1)
        # keys that enter it
        do = load_value_rows(dout, chunk, head, 0, sizes)
        pairs = tl.dot(do.to(DTYPE), tl.trans(u), input_precision=PRECISION) * (decayed * scale)
        pairs = tl.where(row == column, 0.0, pairs).to(DTYPE)
        u = load_value_rows(updates, chunk, head, 0, sizes)
        u = (u.to(tl.float32) * until[:, None]).to(DTYPE)
        dstate = load_state(dstates, number, sizes)
        dk = tl.dot(u, tl.trans(dstate), acc=dk, input_precision=PRECISION)
        if dgate is not None:
            x = load_key_rows(key, chunk, kv_head, sizes)
            ended = tl.sum((tl.sum(dk * x.to(tl.float32), 1) - along_read) * k_factor, 0)
        dk = tl.dot(tl.trans(pairs), q, acc=dk, input_precision=PRECISION)
        dk = tl.dot(tl.trans(read), k, acc=dk, input_precision=PRECISION)
        if dgate is not None:
            ended += total * inner_product(state_rows.before, state_rows.after, number, sizes)
            x = load_key_rows(key, chunk, kv_head, sizes)
            along = tl.sum(dk * x.to(tl.float32), 1)
            moved = tl.load(dgate + at, mask=valid, other=0.0)
            moved += (2.0 * along_read - along_before - along) * k_factor
            along_before = along
            moved = tl.cumsum(tl.where(valid, moved, 0.0), 0, reverse=not sizes.REVERSED)
            tl.store(dgate + at, tl.where(valid, moved + ended, 0.0), mask=in_rows)
    store_gradient(
        dkey, dk, key, query, itself, k_factor, q_factor, chunk, kv_head, sizes, NORMALIZE
    )


@triton.jit
def store_gradient(
    target, gradient, x, partner, itself, factor, partner_factor, chunk, kv_head, sizes,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Adds the pairs of a token with itself, takes a gradient through the normalization of x, and
    stores it."""
    partner = load_key_rows(partner, chunk, kv_head, sizes)
    gradient += (itself * partner_factor)[:, None] * partner.to(tl.float32)
    if NORMALIZE:
        # what lies along a vector does not change its direction
        x = load_key_rows(x, chunk, kv_head, sizes)
        unit = x.to(tl.float32) * factor[:, None]
        gradient = (gradient - unit * tl.sum(gradient * unit, 1)[:, None]) * factor[:, None]
    store_rows(
        target, gradient, chunk.base, chunk.rows, kv_head, sizes.kv_heads, 0, sizes.dim,
        sizes.CHUNK, sizes.DIM, sizes.MAPS,
    )  # fmt: skip


class StateRows(NamedTuple):
    """States before the chunks, and gradients of states after them, as pointers."""

    before: Any
    after: Any


class RowGradientsLaunch(ChunkLaunch):
    """Launch of ``row_gradients``.

    Results: dquery and dkey ``[batch, rows, kv_heads, dk]``, and dgate and dbeta ``[batch, rows,
    heads]`` in float32 where there are gates and beta.
    """

    kernel = row_gradients
    batching: ClassVar = dict.fromkeys(GRADIENT_OPERANDS, BATCHED)

    @property
    def columns(self) -> int:
        """All columns of the values."""
        return width(self.problem.value_dim)

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
        # operands of synchronous matmuls lie in registers, of which AMD has more
        narrow = self.problem.compute_dtype == "bfloat16"
        few = target.platform != "cuda" or (target.hopper and narrow)
        return {"num_warps": 4 if few else 8, "num_stages": 1}

    def arguments(self, target):
        rows = self.row_tiles(target, "query", "key", "dout", "updates", "dvalue")
        rows |= self.matrices(target, "states", "dstates")
        return rows | {
            "state_rows": StateRows(self.operand("states"), self.operand("dstates")),
            "sizes": self.sizes(target),
            "scale": float(self.problem.scale),
            "NORMALIZE": self.problem.normalize,
        }

    def bind(self, target):
        if not has_sm90_kernel(self.problem, self.tiles, target):
            return super().bind(target)
        from ejkernel.kernels.triton.gated_delta_rule.row_gradients_sm90 import (
            RowGradientsLaunchSm90,
        )

        launch = RowGradientsLaunchSm90(self.problem, self.tiles, self, operands=self.operands)
        return replace(launch.bind(target), stand_in=super().bind(target))

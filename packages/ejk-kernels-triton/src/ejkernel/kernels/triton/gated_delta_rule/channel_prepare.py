"""Terms of a chunk that do not depend on its values, with one gate per key channel.

With D_t, R_t and d(t, s) the decays of the channels from the chunk start through token t, from t to
the chunk end, and from s to t,

    inverse  = (I + [s before t: beta_t sum_c d(t, s)_c k_tc k_sc])^-1 diag(beta)      [C, C]
    scores   = [s up to t: scale sum_c d(t, s)_c q_tc k_sc]                            [C, C]
    reads    = scale D_t q_t and D_t k_t, which meet the state before the chunk        [C, dk]
    entering = R_t k_t, which carries updates to the chunk end                         [C, dk]

The scans of one gate per head run with these operands in place of queries and keys.

Work split: one chunk of one head a program, in a loop over blocks of channels. Decays between
tokens go level by level, see ``channel_gates``.

Bound: q, k and the gates are read, three arrays of that size, inverse and scores are written. 8192
tokens of 32 heads of 128, chunks of 64 in bfloat16 and float32 gates: 0.54 GB, 0.13 ms on an H200
(copies 4.3 TB/s). A level is four matmuls of [64, 64] by [64, 128] and an exponential an element:
six levels are 0.1 TFLOP, 0.2 ms at 500 TFLOP/s. Measured: 0.46 ms where one matmul does, 0.72 with
all levels.

Source: Kimi Team 2025, "Kimi Linear" (arXiv 2510.26692), section 3, for the form in chunks.
"""

from __future__ import annotations

from typing import ClassVar

from ejkernel.kernels.triton.gated_delta_rule.blocks import (
    BlockLaunch,
    load_block,
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
    time_order,
    total_decay,
)
from ejkernel.kernels.triton.gated_delta_rule.chunks import find_chunk
from ejkernel.kernels.triton.gated_delta_rule.prepare import (
    inverse_precision,
    load_beta,
    store_inverse,
)
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, struct


@triton.jit
def prepare_channels(
    query, key, gate, beta, cu, inverse, scores, decays, read_query, read_key, entering,
    sizes, scale, NORMALIZE: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes inverse, scores and decayed queries and keys of one chunk and value head."""
    CHUNK: tl.constexpr = sizes.CHUNK
    DTYPE: tl.constexpr = sizes.DTYPE
    heads = sizes.heads
    program = tl.program_id(0)
    head = program % heads
    slot = (program // heads).to(tl.int64)
    chunk = find_chunk(cu, slot, sizes)
    base, tokens = chunk.base, chunk.tokens
    token = tl.arange(0, CHUNK)
    valid = token < tokens
    order = time_order(CHUNK, sizes.REVERSED)
    q_factor = tl.zeros([CHUNK], tl.float32) + scale
    k_factor = tl.zeros([CHUNK], tl.float32) + 1.0
    if NORMALIZE:
        q_factor = scale * reciprocal_length(query, base, tokens, head, sizes, BLOCK)
        k_factor = reciprocal_length(key, base, tokens, head, sizes, BLOCK)
    number = slot * heads + head
    row = token[:, None]
    column = token[None, :]
    seen = tl.zeros([CHUNK, CHUNK], tl.float32)
    gram = tl.zeros([CHUNK, CHUNK], tl.float32)
    for channel in tl.range(0, sizes.DIM, BLOCK, num_stages=1):
        parts = load_channel_gates(gate, base, tokens, head, channel, sizes, BLOCK)
        d = channel + tl.arange(0, BLOCK)
        tl.store(decays + number * sizes.dim + d, total_decay(parts), mask=d < sizes.dim)
        q = load_block(query, base, tokens, head, channel, sizes, BLOCK)
        k = load_block(key, base, tokens, head, channel, sizes, BLOCK)
        since, until = decays_of_chunk(parts, order)
        read = since * q.to(tl.float32) * q_factor[:, None]
        store_block(read_query, read, base, tokens, head, channel, sizes, BLOCK)
        read = since * k.to(tl.float32) * k_factor[:, None]
        store_block(read_key, read, base, tokens, head, channel, sizes, BLOCK)
        read = until * k.to(tl.float32) * k_factor[:, None]
        store_block(entering, read, base, tokens, head, channel, sizes, BLOCK)
        itself = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
        seen += tl.where(row == column, itself[:, None], 0.0)
        direct = direct_level(parts, order, LEVELS)
        if direct >= 0:
            of_row, of_column = direct_decays(parts, order, direct)
            pair = is_in_block(order, direct)
            other = tl.trans((k.to(tl.float32) * of_column).to(DTYPE))
            q_level = (q.to(tl.float32) * of_row).to(DTYPE)
            k_level = (k.to(tl.float32) * of_row).to(DTYPE)
            at_level = tl.dot(q_level, other, input_precision=sizes.PRECISION)
            seen += tl.where(pair, at_level, 0.0)
            at_level = tl.dot(k_level, other, input_precision=sizes.PRECISION)
            gram += tl.where(pair, at_level, 0.0)
        for level in tl.range(direct + 1, LEVELS, num_stages=1):
            decayed = tl.exp2(level_exponents(parts, order, level))
            pair = is_pair(order, level)
            q_level = (q.to(tl.float32) * decayed).to(DTYPE)
            k_level = (k.to(tl.float32) * decayed).to(DTYPE)
            other = tl.trans(k_level)
            at_level = tl.dot(q_level, other, input_precision=sizes.PRECISION)
            seen += tl.where(pair, at_level, 0.0)
            at_level = tl.dot(k_level, other, input_precision=sizes.PRECISION)
            gram += tl.where(pair, at_level, 0.0)
    seen = seen * q_factor[:, None] * k_factor[None, :]
    square = scores + number * (CHUNK * CHUNK) + row * CHUNK + column
    tl.store(square, seen.to(scores.dtype.element_ty))
    strength = load_beta(beta, (base + token) * heads + head, valid)
    gram = gram * (strength * k_factor)[:, None] * k_factor[None, :]
    store_inverse(inverse, number, gram, strength, sizes, INVERSE_PRECISION)


class ChannelPrepareLaunch(BlockLaunch):
    """Launch of ``prepare_channels``.

    Results: inverse and scores ``[slots, heads, chunk, chunk]``, read_query, read_key and entering
    ``[batch, rows, heads, dk]`` in the dtype of matmuls; the decays of chunks ``[slots, heads,
    dk]`` in float32.
    """

    kernel = prepare_channels
    max_block = 64
    batching: ClassVar = dict.fromkeys(("query", "key", "gate", "beta", "cu"), BATCHED)

    def outputs(self):
        p, chunk = self.problem, self.tiles.chunk
        square = struct(p.compute_dtype, self.slots, p.heads, chunk, chunk)
        rows = struct(p.compute_dtype, p.batch, p.rows, p.heads, p.dim)
        return {
            "inverse": square,
            "scores": square,
            "decays": struct("float32", self.slots, p.heads, p.dim),
            "read_query": rows,
            "read_key": rows,
            "entering": rows,
        }

    def grid(self, target):
        return (self.slots * self.problem.heads,)

    def options(self, target):
        return {"num_warps": 4, "num_stages": 1}

    def arguments(self, target):
        return (
            super().arguments(target)
            | self.row_tiles(target, "query", "key")
            | {
                "INVERSE_PRECISION": inverse_precision(target),
            }
        )

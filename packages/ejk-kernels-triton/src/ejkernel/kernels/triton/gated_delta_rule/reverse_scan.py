"""The scan over gradients of states, from the last chunk to the first, and the gradient of values.

With dS the gradient of the state after the chunk and do that of the outputs,

    du  = scores^T do + (k decayed to the chunk end) dS                                [C, dv]
    dv  = inverse^T du                                                                 [C, dv]
    dS <- decay of the chunk * dS + (scale D q)^T do - (D k)^T dv                      [dk, dv]

Work split and bound: as in ``scan``, with a chain of three matmuls too. The gradient of the state
after every chunk is stored for ``row_gradients``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from ejkernel.kernels.triton.gated_delta_rule.chunks import (
    FACTORS,
    REVERSE_SCAN_OPERANDS,
    ChunkLaunch,
    find_chunk_of_sequence,
    find_program,
    find_sequence,
    find_state_tile,
    load_chunk_decay,
    load_factors,
    load_key_rows,
    load_square,
    load_state_tile,
    load_value_rows,
    store_value_rows,
)
from ejkernel.kernels.triton.gated_delta_rule.scan import scan_programs
from ejkernel.kernels.triton.gated_delta_rule.tiles import has_sm90_kernel
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, struct


@triton.jit
def scan_gradients(
    query, key, entering, dout, inverse, scores, factors, decays, dfinal, cu, dvalue, dstates,
    dinitial, sizes, FACTORS: tl.constexpr,
):  # fmt: skip
    """Takes columns of the gradient of a state through the chunks of a sequence, last first."""
    DTYPE: tl.constexpr = sizes.DTYPE
    PRECISION: tl.constexpr = sizes.PRECISION
    column, head, owner = find_program(sizes)
    kv_head = head // (sizes.heads // sizes.kv_heads)
    sequence = find_sequence(cu, owner, sizes)
    token = tl.arange(0, sizes.CHUNK)
    tile = find_state_tile(column, sizes)
    state_offset = (sequence.state * sizes.heads + head) * tile.size + tile.offset
    in_state = tile.inside & sequence.has_state
    dstate = load_state_tile(dfinal, state_offset, in_state, sizes)
    for i in tl.range(0, sequence.stop_piece - sequence.first_piece):
        chunk = find_chunk_of_sequence(i, sequence, head, sizes, not sizes.REVERSED)
        number = chunk.number
        q_since, k_since, k_until = load_factors(factors, number, token, sizes, FACTORS)
        decay = load_chunk_decay(decays, number, sizes, factors is None)
        k = load_key_rows(key, chunk, kv_head, sizes).to(DTYPE)
        q = load_key_rows(query, chunk, kv_head, sizes).to(DTYPE)
        do = load_value_rows(dout, chunk, head, column, sizes)
        solved = load_square(inverse, number, sizes)
        weights = load_square(scores, number, sizes)

        after = dstate.to(DTYPE)
        target = dstates + number * tile.size + tile.offset
        tl.store(target, after.to(dstates.dtype.element_ty), mask=tile.inside)
        k_entering = k
        if entering is not None:
            k_entering = load_key_rows(entering, chunk, kv_head, sizes).to(DTYPE)
        du = tl.dot(k_entering, after, input_precision=PRECISION) * k_until[:, None]
        du = tl.dot(tl.trans(weights), do.to(DTYPE), acc=du, input_precision=PRECISION)
        dv = tl.dot(tl.trans(solved), du.to(DTYPE), input_precision=PRECISION)
        do_since = (do.to(tl.float32) * q_since[:, None]).to(DTYPE)
        dstate = tl.dot(tl.trans(q), do_since, acc=dstate * decay, input_precision=PRECISION)
        dv_since = (dv * -k_since[:, None]).to(DTYPE)
        dstate = tl.dot(tl.trans(k), dv_since, acc=dstate, input_precision=PRECISION)
        store_value_rows(dvalue, dv, chunk, head, column, sizes)
    if dinitial is not None:
        tl.store(dinitial + state_offset, dstate, mask=in_state)


class ReverseScanLaunch(ChunkLaunch):
    """Launch of ``scan_gradients``.

    Results: dvalue ``[batch, rows, heads, dv]`` and the gradients of the states after every chunk
    ``[slots, heads, dk, dv]`` in the dtype of matmuls, dinitial ``[states, heads, dk, dv]``.
    """

    kernel = scan_gradients
    batching: ClassVar = dict.fromkeys(REVERSE_SCAN_OPERANDS, BATCHED)

    def outputs(self):
        p = self.problem
        size = (p.heads, p.dim, p.value_dim)
        return {
            "dvalue": struct(p.compute_dtype, p.batch, p.rows, p.heads, p.value_dim),
            "dstates": struct(p.compute_dtype, self.slots, *size),
            "dinitial": struct("float32", p.batch * p.states, *size),
        }

    def grid(self, target):
        return (scan_programs(self),)

    def arguments(self, target):
        rows = self.row_tiles(target, "query", "key", "entering", "dout")
        squares = self.matrices(target, "inverse", "scores")
        return rows | squares | {"sizes": self.sizes(target), "FACTORS": FACTORS}

    def bind(self, target):
        if not has_sm90_kernel(self.problem, self.tiles, target):
            return super().bind(target)
        from ejkernel.kernels.triton.gated_delta_rule.reverse_scan_sm90 import (
            ReverseScanLaunchSm90,
        )

        launch = ReverseScanLaunchSm90(self, operands=self.operands)
        return replace(launch.bind(target), stand_in=super().bind(target))

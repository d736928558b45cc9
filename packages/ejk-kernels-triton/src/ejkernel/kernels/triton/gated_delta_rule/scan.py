"""The scan over chunks: states, updates and outputs.

    u   = inverse (v - D k S)                           updates of a chunk                [C, dv]
    o   = (scale D q) S + scores u                                                        [C, dv]
    S  <- decay of the chunk * S + (k decayed to the chunk end)^T u                       [dk, dv]

``prepare`` made inverse, scores and factors. S and the accumulators are float32; matmuls take S, u
and v - D k S in the dtype of the keys. Keys are never scaled before a matmul: the factors of tokens
are applied to accumulators and to updates.

Work split: some columns of the state of one value head and sequence, in registers, chunk after
chunk; the next chunk's operands are loaded meanwhile. Gradients need the states before the chunks
and the updates: the same kernel then stores these, and no outputs.

Bound: a chain of three matmuls a chunk. 8192 tokens are 128 chunks; at about 900 cycles each that
is 0.06 to 0.07 ms on an H200, where 0.22 ms were measured: a multiprocessor has one program, which
waits at every step. Scans on transposed states, whose chain stays in registers, have twice the
columns and took 0.24 ms. With -inverse D k as an operand the chain has two matmuls, but a program
loads 68 KB a chunk instead of 52: 0.22 ms too, and ``prepare``, which computes it, 0.14 instead of
0.11. Operands: q, k, v, inverse and scores are read, o is written: 267 MB with 16 key and 32 value
heads of 128, 0.06 ms at 4.3 TB/s; what the programs of a head share comes from the second-level
cache, 0.85 GB in all.

Sources: Yang et al. 2024 (arXiv 2406.06484), section 3, for the form in chunks; Yang et al. 2024
(arXiv 2412.06464), section 3.3, for decays. The triangular system is applied to the errors of the
values, not multiplied into keys and values beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ejkernel.kernels.triton.gated_delta_rule.chunks import (
    FACTORS,
    SCAN_OPERANDS,
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
from ejkernel.kernels.triton.gated_delta_rule.tiles import has_sm90_kernel
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, struct


@triton.jit
def scan_chunks(
    query, key, value, entering, inverse, scores, factors, decays, initial, cu, out, final, states,
    updates, sizes, FACTORS: tl.constexpr,
):  # fmt: skip
    """Takes some columns of a state ``[dk, dv]`` through the chunks of a sequence, for one head."""
    DTYPE: tl.constexpr = sizes.DTYPE
    PRECISION: tl.constexpr = sizes.PRECISION
    column, head, owner = find_program(sizes)
    kv_head = head // (sizes.heads // sizes.kv_heads)
    sequence = find_sequence(cu, owner, sizes)
    token = tl.arange(0, sizes.CHUNK)
    tile = find_state_tile(column, sizes)
    state_offset = (sequence.state * sizes.heads + head) * tile.size + tile.offset
    in_state = tile.inside & sequence.has_state
    state = load_state_tile(initial, state_offset, in_state, sizes)
    for i in tl.range(0, sequence.stop_piece - sequence.first_piece):
        chunk = find_chunk_of_sequence(i, sequence, head, sizes, sizes.REVERSED)
        number = chunk.number
        q_since, k_since, k_until = load_factors(factors, number, token, sizes, FACTORS)
        decay = load_chunk_decay(decays, number, sizes, factors is None)
        k = load_key_rows(key, chunk, kv_head, sizes).to(DTYPE)
        v = load_value_rows(value, chunk, head, column, sizes).to(tl.float32)
        solved = load_square(inverse, number, sizes)

        before = state.to(DTYPE)
        if states is not None:
            target = states + number * tile.size + tile.offset
            tl.store(target, before.to(states.dtype.element_ty), mask=tile.inside)
        k_state = tl.dot(k, before, input_precision=PRECISION)
        error = v - k_since[:, None] * k_state
        update = tl.dot(solved, error.to(DTYPE), input_precision=PRECISION)
        k_entering = k
        if entering is not None:
            k_entering = load_key_rows(entering, chunk, kv_head, sizes).to(DTYPE)
        update_until = (k_until[:, None] * update).to(DTYPE)
        state = tl.dot(
            tl.trans(k_entering), update_until, acc=state * decay, input_precision=PRECISION
        )
        narrow = update.to(DTYPE)
        if updates is not None:
            store_value_rows(updates, narrow, chunk, head, column, sizes)
        if out is not None:
            q = load_key_rows(query, chunk, kv_head, sizes).to(DTYPE)
            weights = load_square(scores, number, sizes)
            o = tl.dot(q, before, input_precision=PRECISION) * q_since[:, None]
            o = tl.dot(weights, narrow, acc=o, input_precision=PRECISION)
            store_value_rows(out, o, chunk, head, column, sizes)
    if final is not None:
        tl.store(final + state_offset, state, mask=in_state)


@dataclass(frozen=True)
class ScanLaunch(ChunkLaunch):
    """Launch of ``scan_chunks``.

    Results: out ``[batch, rows, heads, dv]`` and final ``[states, heads, dk, dv]``; or, with
    ``for_gradients``, states before every chunk ``[slots, heads, dk, dv]`` and updates
    ``[batch, rows, heads, dv]`` in the dtype of matmuls.
    """

    kernel = scan_chunks
    batching: ClassVar = dict.fromkeys(SCAN_OPERANDS, BATCHED)

    for_gradients: bool

    def outputs(self):
        p = self.problem
        size, rows = (p.heads, p.dim, p.value_dim), (p.batch, p.rows, p.heads, p.value_dim)
        if self.for_gradients:
            return {
                "out": None,
                "final": None,
                "states": struct(p.compute_dtype, self.slots, *size),
                "updates": struct(p.compute_dtype, *rows),
            }
        return {
            "out": struct(p.out, *rows),
            "final": struct("float32", p.batch * p.states, *size),
            "states": None,
            "updates": None,
        }

    def grid(self, target):
        return (scan_programs(self),)

    def arguments(self, target):
        rows = self.row_tiles(target, "query", "key", "value", "entering")
        squares = self.matrices(target, "inverse", "scores")
        return rows | squares | {"sizes": self.sizes(target), "FACTORS": FACTORS}

    def bind(self, target):
        if not has_sm90_kernel(self.problem, self.tiles, target):
            return super().bind(target)
        from ejkernel.kernels.triton.gated_delta_rule.scan_sm90 import ScanLaunchSm90
        from ejkernel.kernels.triton.gated_delta_rule.scan_with_writer_sm90 import (
            ScanWithWriterSm90,
        )

        made = ScanWithWriterSm90 if has_writer(self) else ScanLaunchSm90
        launch = made(self, operands=self.operands)
        return replace(launch.bind(target), stand_in=super().bind(target))


def has_writer(launch: ScanLaunch) -> bool:
    """Returns whether warps of their own write for the chain of a scan on Hopper.

    Milliseconds on an H200, with them and without:

        64 programs of 8192 tokens          outputs 0.152, 0.188        states 0.166, 0.195
        2048 programs of 2048 tokens, mean  outputs 0.718, 0.837        states 0.835, 0.953

    With gates per channel there is room for two slots of copies next to what the warps hand over,
    and 64 programs take 0.176 for outputs where they take 0.133 without.
    """
    return not launch.problem.channel_gates and launch.tiles.num_stages >= 3


def scan_programs(launch: ChunkLaunch) -> int:
    """Returns the programs of a scan: columns of the states, and of rows past the last sequence."""
    p = launch.problem
    owners = p.sequences + 1 if p.sequences else 1
    return p.batch * owners * p.heads * -(-p.value_dim // launch.columns)

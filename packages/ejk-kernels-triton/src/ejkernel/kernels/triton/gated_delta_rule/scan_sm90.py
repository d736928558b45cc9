"""``scan`` on Hopper in bfloat16, with hand-placed waits.

The same results as ``scan``. With S transposed, a chunk is

    r = S k^T        p = S q^T                    [columns, dk] by [dk, C]
    u = (v^T - D r) inverse^T                     [columns, C] by [C, C]
    S = decay S + (R u) k                         [columns, C] by [C, dk]
    o = D p + u scores^T                          [columns, C] by [C, C]

The first operands are S, errors and updates in registers, as the matmuls before left them. p and o
run while the chain waits; the outputs of a chunk are stored during the first matmul of the next
one.

Bound: with 64 columns of a state of 128 channels a chunk is 1024 cycles of the tensor cores, and
56 KB to read. 8192 tokens are 128 chunks: 0.07 ms on an H200. Measured with 64 programs and gates
per channel: 0.133 ms for outputs and 0.141 for states. A warp issues in order, and with outputs
about 300 of 680 instructions a chunk are not the chain's: calls with gates per head or without
gates take ``scan_with_writer_sm90``, whose other warps have them.

In Gluon, whose names changed until Triton 3.9 (``compat.has_gluon``). Tests run it by NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.gated_delta_rule.chunks import (
    SCAN_OPERANDS,
    find_program,
    find_sequence,
)
from ejkernel.kernels.triton.gated_delta_rule.rows_sm90 import (
    CHUNK,
    COLUMNS,
    LEFT,
    LOADER_REGISTERS,
    PARTS,
    REGISTERS,
    SINCE_K,
    SINCE_Q,
    TILE,
    TOKENS,
    UNTIL,
    advance_slot,
    allocate_barriers,
    allocate_tiles,
    allocate_vectors,
    find_position,
    load_chunks,
    load_state,
    load_vectors,
    store_state,
    store_tile,
    store_vectors,
)
from ejkernel.kernels.triton.launch import BATCHED, SubstituteLaunch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def stage_tile(target, offset, staged, x, count, width, stride):
    """Stores a transposed accumulator: ``count`` rows of ``width`` columns, through ``staged``."""
    staged.permute((1, 0)).store(x)
    gl.barrier()
    store_tile(target, offset, staged, count, width, stride)


@gluon.jit
def compute_chunks(
    factors, decays, initial, cu, out, final, states, updates, tiles, staged_rows, staged_state,
    vectors, full, empty, sizes,
):  # fmt: skip
    """Loops over the chunks: the part of the first four warps of a program."""
    DIM: gl.constexpr = sizes.DIM
    PER_CHANNEL: gl.constexpr = factors is None
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    q_tiles, k_tiles, v_tiles, entering_tiles, solved_tiles, weights_tiles = tiles
    column, head, owner = find_program(sizes)
    sequence = find_sequence(cu, owner, sizes)
    steps = sequence.stop_piece - sequence.first_piece
    width = sizes.value_dim - column
    state = load_state(initial, sequence, head, column, sizes, STATE)
    position = find_position(0, sequence, head, sizes, sizes.REVERSED)
    of_q, of_k, until, decay = load_vectors(factors, decays, position.number, steps > 0, sizes)
    store_vectors(vectors, 0, of_q, of_k, until, decay, PER_CHANNEL)
    gl.barrier()
    nothing = gl.zeros([COLUMNS, CHUNK], gl.float32, TOKENS)
    stored = gl.zeros([COLUMNS, CHUNK], gl.bfloat16, TOKENS)
    stored_offset = position.base.to(gl.int64) * 0
    stored_rows = 0
    slot = 0
    phase = 0
    row_stride = sizes.heads * sizes.value_dim
    for i in range(steps):
        base, _, rows, number = find_position(i, sequence, head, sizes, sizes.REVERSED)
        row_offset = (base.to(gl.int64) * sizes.heads + head) * sizes.value_dim + column
        parity = i & 1
        chunk_decay = decay
        later = find_position(i + 1, sequence, head, sizes, sizes.REVERSED)
        of_q, of_k, until, decay = load_vectors(factors, decays, later.number, i + 1 < steps, sizes)
        before = state.to(gl.bfloat16)
        left = gl.convert_layout(before, LEFT)
        mbarrier.wait(full.index(slot), phase)
        k = k_tiles.index(slot)
        read = warpgroup_mma(left, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        if out is not None:
            q = q_tiles.index(slot)
            o = warpgroup_mma(left, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
            stage_tile(out, stored_offset, staged_rows, stored, stored_rows, width, row_stride)
        if states is not None:
            offset = number * (sizes.dim * sizes.value_dim) + column
            stage_tile(states, offset, staged_state, before, sizes.dim, width, sizes.value_dim)
        # before the wait, which no load passes
        error = v_tiles.index(slot).permute((1, 0)).load(TOKENS).to(gl.float32)
        if not PER_CHANNEL:
            since = vectors.index(parity * PARTS + SINCE_K).load(COLUMN)[None, :]
        if out is not None:
            read = warpgroup_mma_wait(1, deps=[read])
        else:
            read = warpgroup_mma_wait(0, deps=[read])
        if not PER_CHANNEL:
            read = since * read
        left = gl.convert_layout((error - read).to(gl.bfloat16), LEFT)
        solved = solved_tiles.index(slot)
        update = warpgroup_mma(left, solved.permute((1, 0)), nothing, use_acc=False, is_async=True)
        if PER_CHANNEL:
            state = state * vectors.index(parity).load(gl.SliceLayout(0, STATE))[None, :]
        else:
            state = state * chunk_decay
            of_end = vectors.index(parity * PARTS + UNTIL).load(COLUMN)[None, :]
        if out is not None:
            update, o = warpgroup_mma_wait(0, deps=[update, o])
        else:
            update = warpgroup_mma_wait(0, deps=[update])
        narrow = update.to(gl.bfloat16)
        added = narrow
        if not PER_CHANNEL:
            added = (update * of_end).to(gl.bfloat16)
        left = gl.convert_layout(added, LEFT)
        state = warpgroup_mma(left, entering_tiles.index(slot), state, is_async=True)
        if out is not None:
            if not PER_CHANNEL:
                o = o * vectors.index(parity * PARTS + SINCE_Q).load(COLUMN)[None, :]
            left = gl.convert_layout(narrow, LEFT)
            weights = weights_tiles.index(slot)
            o = warpgroup_mma(left, weights.permute((1, 0)), o, is_async=True)
        if updates is not None:
            stage_tile(updates, row_offset, staged_rows, narrow, rows, width, row_stride)
        store_vectors(vectors, 1 - parity, of_q, of_k, until, decay, PER_CHANNEL)
        if out is not None:
            state, o = warpgroup_mma_wait(0, deps=[state, o])
            stored = o.to(gl.bfloat16)
            stored_offset = row_offset
            stored_rows = rows
        else:
            state = warpgroup_mma_wait(0, deps=[state])
        # the compiler puts a barrier of the four warps before this
        mbarrier.arrive(empty.index(slot))
        slot, phase = advance_slot(slot, phase, full.shape[0])
    if out is not None:
        stage_tile(out, stored_offset, staged_rows, stored, stored_rows, width, row_stride)
    store_state(final, state, sequence, head, column, sizes, STATE)


@gluon.jit
def scan_chunks_sm90(
    query, key, value, entering, inverse, scores, factors, decays, initial, cu, out, final, states,
    updates, sizes, STAGES: gl.constexpr,
):  # fmt: skip
    DIM: gl.constexpr = sizes.DIM
    staged_rows = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, COLUMNS], TILE)
    staged_state = staged_rows
    if states is not None:
        staged_state = gl.allocate_shared_memory(gl.bfloat16, [DIM, COLUMNS], TILE)
    tiles = allocate_tiles(query, entering, sizes, STAGES)
    vectors = allocate_vectors(factors, sizes)
    full = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute_chunks, (
                factors, decays, initial, cu, out, final, states, updates, tiles, staged_rows,
                staged_state, vectors, full, empty, sizes,
            )),
            (load_chunks, (
                query, key, value, entering, inverse, scores, cu, tiles, full, empty, sizes,
                sizes.REVERSED,
            )),
        ],
        [1],
        [LOADER_REGISTERS],
    )  # fmt: skip


@dataclass(frozen=True)
class ScanLaunchSm90(SubstituteLaunch):
    """Launch of ``scan_chunks_sm90`` in the place of ``general``, a launch of ``scan_chunks`` with
    64 columns."""

    kernel = scan_chunks_sm90
    batching: ClassVar = dict.fromkeys(SCAN_OPERANDS, BATCHED)

    def options(self, target):
        return {"num_warps": 4, "num_stages": 1, "maxnreg": REGISTERS}

    def arguments(self, target):
        general = dict(self.general.arguments(target))
        general.pop("FACTORS")
        return general | {"STAGES": min(self.general.tiles.num_stages, 3)}

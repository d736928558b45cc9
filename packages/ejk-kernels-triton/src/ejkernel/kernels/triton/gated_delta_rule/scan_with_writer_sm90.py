"""``scan_sm90`` with a second warpgroup that writes, for gates per head and no gates.

The same results and bits as ``scan_sm90``. The warps of the chain hand S and u over through shared
memory to four others, which compute and store the outputs, or store states and updates. What they
do would delay the chain, because a warp issues its instructions in order. ``scan.has_writer`` has
the times of both.

In Gluon, whose names changed until Triton 3.9 (``compat.has_gluon``). Tests run it by NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass

from ejkernel.kernels.triton.gated_delta_rule.chunks import find_program, find_sequence
from ejkernel.kernels.triton.gated_delta_rule.rows_sm90 import (
    CHUNK,
    COLUMNS,
    FACTORS,
    LEFT,
    LOADER_REGISTERS,
    PARTS,
    SINCE_K,
    TILE,
    TOKENS,
    UNTIL,
    WRITER_REGISTERS,
    advance_slot,
    allocate_barriers,
    allocate_tiles,
    allocate_vectors,
    find_position,
    load_chunks,
    load_decay,
    load_state,
    load_vectors,
    store_all_vectors,
    store_state,
    store_tile,
)
from ejkernel.kernels.triton.gated_delta_rule.scan_sm90 import ScanLaunchSm90
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def compute_chunks(
    initial, cu, final, tiles, state_tiles, update_tiles, vectors, full, handed, taken, sizes
):
    """Loops over the chunks and hands states and updates over: the part of the first four warps."""
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.DIM, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    k_tiles = tiles[1]
    v_tiles = tiles[2]
    solved_tiles = tiles[4]
    column, head, owner = find_program(sizes)
    sequence = find_sequence(cu, owner, sizes)
    state = load_state(initial, sequence, head, column, sizes, STATE)
    nothing = gl.zeros([COLUMNS, CHUNK], gl.float32, TOKENS)
    slot = 0
    phase = 0
    for i in range(sequence.stop_piece - sequence.first_piece):
        parity = i & 1
        before = state.to(gl.bfloat16)
        left = gl.convert_layout(before, LEFT)
        mbarrier.wait(full.index(slot), phase)
        k = k_tiles.index(slot)
        read = warpgroup_mma(left, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        error = v_tiles.index(slot).permute((1, 0)).load(TOKENS).to(gl.float32)
        mbarrier.wait(taken.index(parity), i >> 1 & 1)
        state_tiles.index(parity).permute((1, 0)).store(before)
        # before the wait, which no load passes
        decay = load_decay(vectors, parity, STATE, False)
        since = vectors.index(parity * PARTS + SINCE_K).load(COLUMN)[None, :]
        until = vectors.index(parity * PARTS + UNTIL).load(COLUMN)[None, :]
        read = warpgroup_mma_wait(0, deps=[read])
        state = state * decay
        left = gl.convert_layout((error - since * read).to(gl.bfloat16), LEFT)
        solved = solved_tiles.index(slot)
        update = warpgroup_mma(left, solved.permute((1, 0)), nothing, use_acc=False, is_async=True)
        update = warpgroup_mma_wait(0, deps=[update])
        narrow = update.to(gl.bfloat16)
        left = gl.convert_layout((update * until).to(gl.bfloat16), LEFT)
        state = warpgroup_mma(left, k, state, is_async=True)
        update_tiles.index(parity).permute((1, 0)).store(narrow)
        fence_async_shared()
        # the compiler puts a barrier of the four warps before this
        mbarrier.arrive(handed.index(parity))
        state = warpgroup_mma_wait(0, deps=[state])
        slot, phase = advance_slot(slot, phase, full.shape[0])
    store_state(final, state, sequence, head, column, sizes, STATE)


@gluon.jit
def start_writer(factors, decays, sequence, head, vectors, taken, sizes):
    """Stores the vectors of the first two chunks, and says that their tiles are free."""
    for i in gl.static_range(2):
        number = find_position(i, sequence, head, sizes, sizes.REVERSED).number
        pred = i < sequence.stop_piece - sequence.first_piece
        of_q, of_k, until, decay = load_vectors(factors, decays, number, pred, sizes)
        store_all_vectors(vectors, i, of_q, of_k, until, decay, False)
        mbarrier.arrive(taken.index(i))


@gluon.jit
def write_chunks(
    factors, decays, cu, out, states, updates, tiles, state_tiles, update_tiles, vectors, full,
    empty, handed, taken, sizes,
):  # fmt: skip
    """Writes what the chain hands over chunk after chunk: the part of the next four warps.

    Computes and stores the outputs, or stores states and updates where ``out`` is None. These warps
    also load the vectors of the chunk after the next one, which the chain has no time for.
    """
    token = gl.arange(0, CHUNK, gl.SliceLayout(1, TOKENS))
    column, head, owner = find_program(sizes)
    sequence = find_sequence(cu, owner, sizes)
    steps = sequence.stop_piece - sequence.first_piece
    width = sizes.value_dim - column
    row_stride = sizes.heads * sizes.value_dim
    start_writer(factors, decays, sequence, head, vectors, taken, sizes)
    slot = 0
    phase = 0
    last_slot = 0
    for i in range(steps):
        base, _, rows, number = find_position(i, sequence, head, sizes, sizes.REVERSED)
        row_offset = (base.to(gl.int64) * sizes.heads + head) * sizes.value_dim + column
        parity = i & 1
        update_tile = update_tiles.index(parity)
        later = find_position(i + 2, sequence, head, sizes, sizes.REVERSED).number
        of_q, of_k, until, decay = load_vectors(factors, decays, later, i + 2 < steps, sizes)
        if out is not None:
            since = gl.load(factors + number * (FACTORS * CHUNK) + token)
        mbarrier.wait(handed.index(parity), i >> 1 & 1)
        # the chain has read the chunk before the one that it hands over
        mbarrier.arrive(empty.index(last_slot), pred=i > 0)
        if out is not None:
            mbarrier.wait(full.index(slot), phase)
            compute_outputs(tiles, slot, state_tiles.index(parity), update_tile, since)
            store_tile(out, row_offset, update_tile, rows, width, row_stride)
        else:
            state_offset = number * (sizes.dim * sizes.value_dim) + column
            state_tile = state_tiles.index(parity)
            store_tile(states, state_offset, state_tile, sizes.dim, width, sizes.value_dim)
            store_tile(updates, row_offset, update_tile, rows, width, row_stride)
        store_all_vectors(vectors, parity, of_q, of_k, until, decay, False)
        mbarrier.arrive(taken.index(parity))
        last_slot = slot
        slot, phase = advance_slot(slot, phase, empty.shape[0])


@gluon.jit
def compute_outputs(tiles, slot, state_tile, update_tile, since):
    """Computes the outputs of a chunk, ``since`` q S + scores u, in the tile of its updates u."""
    q_tiles = tiles[0]
    weights_tiles = tiles[5]
    nothing = gl.zeros([CHUNK, COLUMNS], gl.float32, TOKENS)
    q = q_tiles.index(slot)
    o = warpgroup_mma(q, state_tile, nothing, use_acc=False, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    o = o * since[:, None]
    o = warpgroup_mma(weights_tiles.index(slot), update_tile, o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    # every warp has read the updates, whose tile takes the outputs
    gl.barrier()
    update_tile.store(o.to(gl.bfloat16))
    gl.barrier()


@gluon.jit
def scan_with_writer_sm90(
    query, key, value, entering, inverse, scores, factors, decays, initial, cu, out, final, states,
    updates, sizes, STAGES: gl.constexpr,
):  # fmt: skip
    tiles = allocate_tiles(query, entering, sizes, STAGES)
    state_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, sizes.DIM, COLUMNS], TILE)
    update_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, COLUMNS], TILE)
    vectors = allocate_vectors(factors, sizes)
    full = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    handed = allocate_barriers(2)
    taken = allocate_barriers(2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute_chunks, (
                initial, cu, final, tiles, state_tiles, update_tiles, vectors, full, handed, taken,
                sizes,
            )),
            (write_chunks, (
                factors, decays, cu, out, states, updates, tiles, state_tiles, update_tiles,
                vectors, full, empty, handed, taken, sizes,
            )),
            (load_chunks, (
                query, key, value, entering, inverse, scores, cu, tiles, full, empty, sizes,
                sizes.REVERSED,
            )),
        ],
        [4, 1],
        [WRITER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@dataclass(frozen=True)
class ScanWithWriterSm90(ScanLaunchSm90):
    """Launch of ``scan_with_writer_sm90``, which needs three slots for copies."""

    kernel = scan_with_writer_sm90

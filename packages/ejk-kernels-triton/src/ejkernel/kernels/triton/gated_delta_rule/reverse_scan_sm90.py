"""``reverse_scan`` on Hopper in bfloat16, with hand-placed waits.

The same results as ``reverse_scan``. With dS transposed, a chunk is

    du = R (dS k^T) + do^T scores                 [columns, dk] by [dk, C], [columns, C] by [C, C]
    dv = du inverse                               [columns, C] by [C, C]
    dS = decay dS + (D do^T) q - (D dv) k         [columns, C] by [C, dk]

The first operands lie in registers, see ``rows_sm90``; scores and queries are multiplied while the
chain waits. Four other warps multiply gradients of outputs by the factors of their tokens, and
store gradients of states and values.

Bound: as of ``scan_sm90``, and the gradients of the states are written. Measured on an H200 with 64
programs of 8192 tokens: 0.207 ms (``reverse_scan`` 0.234 with 128 of 32 columns; where the warps of
the chain did all of it 0.273). With 2048 programs of 2048 tokens on average in packed sequences
1.10, where the warps of the chain did all of it 1.30.

In Gluon, whose names changed until Triton 3.9 (``compat.has_gluon``). Tests run it by NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.gated_delta_rule.chunks import (
    REVERSE_SCAN_OPERANDS,
    find_program,
    find_sequence,
)
from ejkernel.kernels.triton.gated_delta_rule.rows_sm90 import (
    CHUNK,
    COLUMNS,
    FACTORS,
    LEFT,
    LOADER_REGISTERS,
    PARTS,
    REGISTERS,
    SINCE_K,
    STORED,
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
from ejkernel.kernels.triton.launch import BATCHED, SubstituteLaunch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# with so few slots the chain says itself that it has read a chunk. It has to wait for its four
# warps then; with more slots the warps that store say so, a part of a chunk later
FEW_STAGES = gl.constexpr(2)


@gluon.jit
def compute_gradients(
    dfinal, cu, dinitial, tiles, state_tiles, row_tiles, vectors, full, empty, handed,
    taken, sizes, PER_CHANNEL: gl.constexpr,
):  # fmt: skip
    """Loops over the chunks and hands gradients over: the part of the first four warps."""
    DIM: gl.constexpr = sizes.DIM
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    q_tiles, k_tiles, do_tiles, entering_tiles, solved_tiles, weights_tiles = tiles
    column, head, owner = find_program(sizes)
    sequence = find_sequence(cu, owner, sizes)
    steps = sequence.stop_piece - sequence.first_piece
    dstate = load_state(dfinal, sequence, head, column, sizes, STATE)
    nothing = gl.zeros([COLUMNS, CHUNK], gl.float32, TOKENS)
    slot = 0
    phase = 0
    for i in range(steps):
        parity = i & 1
        after = dstate.to(gl.bfloat16)
        left = gl.convert_layout(after, LEFT)
        mbarrier.wait(full.index(slot), phase)
        k_entering = entering_tiles.index(slot)
        du = warpgroup_mma(left, k_entering.permute((1, 0)), nothing, use_acc=False, is_async=True)
        left = do_tiles.index(slot).permute((1, 0)).load(LEFT)
        weights = weights_tiles.index(slot)
        seen = warpgroup_mma(left, weights, nothing, use_acc=False, is_async=True)
        mbarrier.wait(taken.index(parity), i >> 1 & 1)
        state_tiles.index(parity).permute((1, 0)).store(after)
        # before the wait, which no load passes
        if PER_CHANNEL:
            reading_do = do_tiles.index(slot).permute((1, 0)).load(LEFT)
        else:
            decay = load_decay(vectors, parity, STATE, PER_CHANNEL)
            until = vectors.index(parity * PARTS + UNTIL).load(COLUMN)[None, :]
            reading_do = row_tiles.index(parity).permute((1, 0)).load(LEFT)
        du, seen = warpgroup_mma_wait(0, deps=[du, seen])
        if PER_CHANNEL:
            # registers are short before
            decay = load_decay(vectors, parity, STATE, PER_CHANNEL)
        dstate = dstate * decay
        if not PER_CHANNEL:
            du = du * until
        left = gl.convert_layout((du + seen).to(gl.bfloat16), LEFT)
        dv = warpgroup_mma(left, solved_tiles.index(slot), nothing, use_acc=False, is_async=True)
        dstate = warpgroup_mma(reading_do, q_tiles.index(slot), dstate, is_async=True)
        if not PER_CHANNEL:
            since = vectors.index(parity * PARTS + SINCE_K).load(COLUMN)[None, :]
        dv = warpgroup_mma_wait(1, deps=[dv])
        reading = -dv
        if not PER_CHANNEL:
            reading = reading * since
        left = gl.convert_layout(reading.to(gl.bfloat16), LEFT)
        dstate = warpgroup_mma(left, k_tiles.index(slot), dstate, is_async=True)
        row_tiles.index(parity).permute((1, 0)).store(dv.to(gl.bfloat16))
        # the compiler puts a barrier of the four warps before this
        mbarrier.arrive(handed.index(parity))
        dstate = warpgroup_mma_wait(0, deps=[dstate])
        if empty.shape[0] <= FEW_STAGES:
            mbarrier.arrive(empty.index(slot))
        slot, phase = advance_slot(slot, phase, full.shape[0])
    store_state(dinitial, dstate, sequence, head, column, sizes, STATE)


@gluon.jit
def store_gradients(
    factors, decays, cu, dvalue, dstates, tiles, state_tiles, row_tiles, vectors,
    full, empty, handed, taken, sizes,
):  # fmt: skip
    """Stores what the chain hands over chunk after chunk: the part of the next four warps.

    Before that they give it what it needs for the next chunk: vectors, and the gradients of the
    outputs times the factors of their tokens, in the tile that takes gradients of values later.
    """
    BACKWARDS: gl.constexpr = not sizes.REVERSED
    PER_CHANNEL: gl.constexpr = factors is None
    do_tiles = tiles[2]
    column, head, owner = find_program(sizes)
    sequence = find_sequence(cu, owner, sizes)
    steps = sequence.stop_piece - sequence.first_piece
    width = sizes.value_dim - column
    row_stride = sizes.heads * sizes.value_dim
    token = gl.arange(0, CHUNK, gl.SliceLayout(1, STORED))
    slot = 0
    phase = 0
    last_slot = 0
    # a round before the first chunk, which only gives it
    for n in range(steps + 1):
        i = n - 1
        parity = n & 1
        later = find_position(n, sequence, head, sizes, BACKWARDS).number
        pred = n < steps
        of_q, of_k, until, decay = load_vectors(factors, decays, later, pred, sizes)
        if not PER_CHANNEL:
            since = gl.load(factors + later * (FACTORS * CHUNK) + token, mask=pred, other=0.0)
        if n > 0:
            mbarrier.wait(handed.index(1 - parity), i >> 1 & 1)
        if empty.shape[0] > FEW_STAGES:
            # the chain has read the chunk before the one that it hands over
            mbarrier.arrive(empty.index(last_slot), pred=n > 1)
            if n > 1:
                last_slot = (last_slot + 1) % empty.shape[0]
        store_all_vectors(vectors, parity, of_q, of_k, until, decay, PER_CHANNEL)
        if not PER_CHANNEL:
            if pred:
                mbarrier.wait(full.index(slot), phase)
                do = do_tiles.index(slot).load(STORED).to(gl.float32) * since[:, None]
                row_tiles.index(parity).store(do.to(gl.bfloat16))
        mbarrier.arrive(taken.index(parity))
        if n > 0:
            base, _, rows, number = find_position(i, sequence, head, sizes, BACKWARDS)
            offset = number * (sizes.dim * sizes.value_dim) + column
            tile = state_tiles.index(1 - parity)
            store_tile(dstates, offset, tile, sizes.dim, width, sizes.value_dim)
            offset = (base.to(gl.int64) * sizes.heads + head) * sizes.value_dim + column
            tile = row_tiles.index(1 - parity)
            store_tile(dvalue, offset, tile, rows, width, row_stride)
        slot, phase = advance_slot(slot, phase, full.shape[0])


@gluon.jit
def scan_gradients_sm90(
    query, key, entering, dout, inverse, scores, factors, decays, dfinal, cu, dvalue, dstates,
    dinitial, sizes, STAGES: gl.constexpr,
):  # fmt: skip
    DIM: gl.constexpr = sizes.DIM
    tiles = allocate_tiles(query, entering, sizes, STAGES)
    state_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, DIM, COLUMNS], TILE)
    row_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, COLUMNS], TILE)
    vectors = allocate_vectors(factors, sizes)
    full = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    handed = allocate_barriers(2)
    taken = allocate_barriers(2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute_gradients, (
                dfinal, cu, dinitial, tiles, state_tiles, row_tiles, vectors, full,
                empty, handed, taken, sizes, factors is None,
            )),
            (store_gradients, (
                factors, decays, cu, dvalue, dstates, tiles, state_tiles, row_tiles,
                vectors, full, empty, handed, taken, sizes,
            )),
            (load_chunks, (
                query, key, dout, entering, inverse, scores, cu, tiles, full, empty, sizes,
                not sizes.REVERSED,
            )),
        ],
        [4, 1],
        [WRITER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@dataclass(frozen=True)
class ReverseScanLaunchSm90(SubstituteLaunch):
    """Launch of ``scan_gradients_sm90`` in the place of ``general``, of ``scan_gradients`` with 64
    columns."""

    kernel = scan_gradients_sm90
    batching: ClassVar = dict.fromkeys(REVERSE_SCAN_OPERANDS, BATCHED)

    def options(self, target):
        return {"num_warps": 4, "num_stages": 1, "maxnreg": REGISTERS}

    def arguments(self, target):
        general = dict(self.general.arguments(target))
        general.pop("FACTORS")
        # a fourth array of 128 channels a chunk leaves room for two chunks
        most = 2 if general["entering"] is not None and self.general.problem.dim == 128 else 3
        return general | {"STAGES": min(self.general.tiles.num_stages, most)}

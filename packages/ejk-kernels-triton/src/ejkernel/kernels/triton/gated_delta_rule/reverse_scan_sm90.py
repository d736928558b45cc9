"""``reverse_scan`` on Hopper in bfloat16, with hand-placed waits.

The same results as ``reverse_scan``. With dS transposed, a chunk is

    du = R (dS k^T) + do^T scores                 [columns, dk] by [dk, C], [columns, C] by [C, C]
    dv = du inverse                               [columns, C] by [C, C]
    dS = decay dS + (D do^T) q - (D dv) k         [columns, C] by [C, dk]

The first operands lie in registers, see ``rows_sm90``; scores and queries are multiplied while the
chain waits.

Bound: as of ``scan_sm90``, and the gradients of the states are written. Measured on an H200 with
2048 programs of 2048 tokens: 1.28 ms (``reverse_scan`` 1.91 with 32 columns). With 64 programs it
is slower, 0.273 for 0.234, and not taken.

In Gluon, whose names changed until Triton 3.9 (``compat.has_gluon``). Tests run it by NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.gated_delta_rule.chunks import REVERSE_SCAN_OPERANDS
from ejkernel.kernels.triton.gated_delta_rule.rows_sm90 import (
    CHUNK,
    COLUMNS,
    FACTORS,
    LEFT,
    LOADER_REGISTERS,
    REGISTERS,
    TILE,
    TOKENS,
    VECTORS,
    advance_slot,
    find_position,
    find_program,
    load_chunks,
    load_vectors,
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
def compute_gradients(
    factors, decays, dfinal, cu, dvalue, dstates, dinitial, tiles, staged_rows, staged_state,
    vectors, full, empty, sizes,
):  # fmt: skip
    """Loops over the chunks: the part of the first four warps of a program."""
    DIM: gl.constexpr = sizes.DIM
    BACKWARDS: gl.constexpr = not sizes.REVERSED
    PER_CHANNEL: gl.constexpr = factors is None
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, TOKENS)
    q_tiles, k_tiles, do_tiles, entering_tiles, solved_tiles, weights_tiles = tiles
    column, head, sequence = find_program(cu, sizes)
    has_state = sequence[2]
    steps = sequence[6] - sequence[5]
    width = sizes.value_dim - column
    c = gl.arange(0, COLUMNS, gl.SliceLayout(1, STATE))[:, None]
    d = gl.arange(0, DIM, gl.SliceLayout(0, STATE))[None, :]
    state_size = sizes.dim * sizes.value_dim
    state_offset = (sequence[1] * sizes.heads + head) * state_size + column
    in_state = (d < sizes.dim) & (c < width) & has_state
    dstate = gl.zeros([COLUMNS, DIM], gl.float32, STATE)
    if dfinal is not None:
        element = dfinal + state_offset + d * sizes.value_dim + c
        dstate = gl.load(element, mask=in_state, other=0.0).to(gl.float32)
    position = find_position(0, sequence, head, sizes, BACKWARDS)
    of_q, of_k, until, decay = load_vectors(factors, decays, position[3], steps > 0, sizes)
    store_vectors(vectors, 0, of_q, of_k, until, decay, PER_CHANNEL)
    gl.barrier()
    nothing = gl.zeros([COLUMNS, CHUNK], gl.float32, TOKENS)
    slot = 0
    phase = 0
    row_stride = sizes.heads * sizes.value_dim
    for i in range(steps):
        base, _, rows, number = find_position(i, sequence, head, sizes, BACKWARDS)
        row_offset = (base.to(gl.int64) * sizes.heads + head) * sizes.value_dim + column
        parity = i & 1
        chunk_decay = decay
        later = find_position(i + 1, sequence, head, sizes, BACKWARDS)
        of_q, of_k, until, decay = load_vectors(factors, decays, later[3], i + 1 < steps, sizes)
        after = dstate.to(gl.bfloat16)
        left = gl.convert_layout(after, LEFT)
        mbarrier.wait(full.index(slot), phase)
        q = q_tiles.index(slot)
        k = k_tiles.index(slot)
        k_entering = entering_tiles.index(slot)
        du = warpgroup_mma(left, k_entering.permute((1, 0)), nothing, use_acc=False, is_async=True)
        do = do_tiles.index(slot).permute((1, 0)).load(TOKENS)
        weights = weights_tiles.index(slot)
        left = gl.convert_layout(do, LEFT)
        seen = warpgroup_mma(left, weights, nothing, use_acc=False, is_async=True)
        chunk_offset = number * state_size + column
        store_tile(dstates, chunk_offset, staged_state, after, sizes.dim, width, sizes.value_dim)
        if PER_CHANNEL:
            dstate = dstate * vectors.index(parity).load(gl.SliceLayout(0, STATE))[None, :]
        else:
            dstate = dstate * chunk_decay
            # before the wait, which no load passes
            of_end = vectors.index(parity * FACTORS + 2).load(COLUMN)[None, :]
        du, seen = warpgroup_mma_wait(0, deps=[du, seen])
        if not PER_CHANNEL:
            du = du * of_end
        left = gl.convert_layout((du + seen).to(gl.bfloat16), LEFT)
        dv = warpgroup_mma(left, solved_tiles.index(slot), nothing, use_acc=False, is_async=True)
        # loaded again: registers are short
        do = do_tiles.index(slot).permute((1, 0)).load(TOKENS)
        if not PER_CHANNEL:
            since = vectors.index(parity * FACTORS).load(COLUMN)[None, :]
            do = (do.to(gl.float32) * since).to(gl.bfloat16)
        left = gl.convert_layout(do, LEFT)
        dstate = warpgroup_mma(left, q, dstate, is_async=True)
        store_vectors(vectors, 1 - parity, of_q, of_k, until, decay, PER_CHANNEL)
        if not PER_CHANNEL:
            since = vectors.index(parity * FACTORS + 1).load(COLUMN)[None, :]
        dv = warpgroup_mma_wait(1, deps=[dv])
        reading = -dv
        if not PER_CHANNEL:
            reading = reading * since
        left = gl.convert_layout(reading.to(gl.bfloat16), LEFT)
        dstate = warpgroup_mma(left, k, dstate, is_async=True)
        narrow = dv.to(gl.bfloat16)
        store_tile(dvalue, row_offset, staged_rows, narrow, rows, width, row_stride)
        dstate = warpgroup_mma_wait(0, deps=[dstate])
        # the compiler puts a barrier of the four warps before this
        mbarrier.arrive(empty.index(slot))
        slot, phase = advance_slot(slot, phase, full.shape[0])
    if dinitial is not None:
        element = dinitial + state_offset + d * sizes.value_dim + c
        gl.store(element, dstate, mask=in_state)


@gluon.jit
def scan_gradients_sm90(
    query, key, entering, dout, inverse, scores, factors, decays, dfinal, cu, dvalue, dstates,
    dinitial, sizes, STAGES: gl.constexpr,
):  # fmt: skip
    DIM: gl.constexpr = sizes.DIM
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, DIM], TILE)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, DIM], TILE)
    do_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, COLUMNS], TILE)
    solved_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, CHUNK], TILE)
    weights_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, CHUNK], TILE)
    entering_tiles = k_tiles
    if entering is not None:
        entering_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, DIM], TILE)
    tiles = (q_tiles, k_tiles, do_tiles, entering_tiles, solved_tiles, weights_tiles)
    staged_rows = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, COLUMNS], TILE)
    staged_state = gl.allocate_shared_memory(gl.bfloat16, [DIM, COLUMNS], TILE)
    if factors is None:
        vectors = gl.allocate_shared_memory(gl.float32, [2, DIM], VECTORS)
    else:
        vectors = gl.allocate_shared_memory(gl.float32, [2 * FACTORS, CHUNK], VECTORS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute_gradients, (
                factors, decays, dfinal, cu, dvalue, dstates, dinitial, tiles, staged_rows,
                staged_state, vectors, full, empty, sizes,
            )),
            (load_chunks, (
                query, key, dout, entering, inverse, scores, cu, tiles, full, empty, sizes,
                not sizes.REVERSED,
            )),
        ],
        [1],
        [LOADER_REGISTERS],
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

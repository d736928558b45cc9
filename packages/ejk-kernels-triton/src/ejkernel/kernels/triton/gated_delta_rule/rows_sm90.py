"""Chunks of the scans on Hopper in Gluon: copies, layouts and stores.

A scan holds its state transposed, [columns, dk]: 64 columns are the rows of one asynchronous matmul
of four warps, whose first operand may lie in registers. So what one matmul of the chain gives is
the first operand of the next without a way through shared memory, and every second operand is a
tile that the copy engine brought. The last warp of a program starts the copies, which have two
barriers a slot: ``full`` and ``empty``. ``scan_sm90``, ``scan_with_writer_sm90`` and
``reverse_scan_sm90`` are the scans.

In the last two, four more warps do what the chain need not wait for. The chain hands its tiles over
with two barriers for every other chunk: ``handed`` when it has stored them, ``taken`` when it may
store them again and the vectors of the chunk lie in shared memory.
"""

from __future__ import annotations

from ejkernel.kernels.triton.bound_launch import MAP_ROWS as _MAP_ROWS
from ejkernel.kernels.triton.common.sequences import sequence_start
from ejkernel.kernels.triton.gated_delta_rule.chunks import (
    ChunkPosition,
    find_chunk_of_sequence,
    find_program,
    find_sequence,
)
from ejkernel.kernels.triton.linear_attention import tiles as linear_tiles
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

MAP_ROWS = gl.constexpr(_MAP_ROWS)
FULL = gl.constexpr(linear_tiles.FULL)
# registers that a thread starts with; what remains to the warps that store, and to the one that
# loads. The others go to the warps of the chain
REGISTERS = 136
WRITER_REGISTERS = gl.constexpr(144)
LOADER_REGISTERS = gl.constexpr(24)
COLUMNS = gl.constexpr(64)
CHUNK = gl.constexpr(64)
FACTORS = gl.constexpr(3)
# vectors of a chunk: three factors of the tokens, and the decay of the chunk in every element
SINCE_Q, SINCE_K, UNTIL, DECAY, PARTS = (gl.constexpr(i) for i in range(5))
# accumulators [columns, tokens], and first operands in registers
TOKENS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, TOKENS.value, 2))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
VECTORS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# stores to memory: 16 bytes a thread, 128 a row
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def find_sequence_of(cu, sizes, piece):
    """Returns the sequence that has a piece, see ``common.sequences.find_piece``."""
    LANE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    count = 0
    for at in range(0, sizes.sequences + 1, sizes.LANES):
        m = at + gl.arange(0, sizes.LANES, LANE)
        first = sequence_start(cu, m, sizes.sequences, sizes.rows) // CHUNK + m
        count += gl.sum(((first <= piece) & (m <= sizes.sequences)).to(gl.int32), 0)
    return gl.maximum(count - 1, 0)


@gluon.jit
def find_item(item, items, cu, sizes):
    """Returns (first row, tokens, rows, number of the chunk, key head) of an item of the work.

    Rows and tokens as of ``chunks.find_chunk``.
    """
    item = gl.minimum(item, items - 1)
    slot = item // sizes.kv_heads
    batch = slot // sizes.pieces
    piece = slot % sizes.pieces
    begin = piece * CHUNK
    end = gl.minimum(sizes.rows, begin + CHUNK)
    used = end
    if cu is not None:
        cu += batch * (sizes.sequences + 1)
        sequence = find_sequence_of(cu, sizes, piece)
        start = sequence_start(cu, sequence, sizes.sequences, sizes.rows)
        end = sequence_start(cu, sequence + 1, sizes.sequences, sizes.rows)
        begin = (piece - sequence) * CHUNK
        end = gl.minimum(end, begin + CHUNK)
        begin = gl.maximum(begin, start)
        used = gl.where(sequence < sizes.sequences, end, begin)
        # empty pieces may begin past the array
        begin = gl.minimum(begin, sizes.rows)
    base = batch.to(gl.int64) * sizes.rows + begin
    tokens = gl.maximum(used - begin, 0)
    return base, tokens, gl.maximum(end - begin, 0), slot.to(gl.int64), item % sizes.kv_heads


@gluon.jit
def find_position(i, sequence, head, sizes, BACKWARDS: gl.constexpr):
    """Returns the ``ChunkPosition`` of a sequence's i-th chunk, with a base for the copy engine."""
    position = find_chunk_of_sequence(i, sequence, head, sizes, BACKWARDS)
    base = position.base.to(gl.int32)
    return ChunkPosition(base, position.tokens, position.rows, position.number)


@gluon.jit
def start_rows(source, buffer, barrier, base, tokens, column, pred, sizes):
    """Starts the copy of the rows of a chunk; those past its tokens become 0."""
    if sizes.MAPS == FULL:
        tma.async_load(source, [base, column], barrier, buffer, pred=pred)
    else:
        at = [MAP_ROWS, base + tokens, MAP_ROWS - tokens, column]
        run = buffer.reinterpret(source.dtype, source.block_shape, source.layout)
        tma.async_load(source, at, barrier, run, pred=pred)


@gluon.jit
def start_square(source, buffer, barrier, number, pred):
    """Starts the copy of a matrix of ``[count, CHUNK, CHUNK]``."""
    tma.async_load(source, [(number * CHUNK).to(gl.int32), 0], barrier, buffer, pred=pred)


@gluon.jit
def start_chunk(
    query, key, value, entering, inverse, scores, tiles, slot, barrier, position, head, column,
    pred, sizes,
):  # fmt: skip
    """Starts the copies of a chunk."""
    q, k, v, k_entering, solved, weights = tiles
    base, tokens, _, number = position
    at = head // (sizes.heads // sizes.kv_heads) * sizes.dim
    size: gl.constexpr = k.nbytes_per_cta // k.shape[0]
    square: gl.constexpr = solved.nbytes_per_cta // solved.shape[0]
    expected: gl.constexpr = (
        size
        + (size if query is not None else 0)
        + (size if entering is not None else 0)
        + 2 * square
        + (square if scores is not None else 0)
    )
    mbarrier.expect(barrier, expected, pred=pred)
    start_rows(key, k.index(slot), barrier, base, tokens, at, pred, sizes)
    v_at = head * sizes.value_dim + column
    start_rows(value, v.index(slot), barrier, base, tokens, v_at, pred, sizes)
    start_square(inverse, solved.index(slot), barrier, number, pred)
    if entering is not None:
        start_rows(entering, k_entering.index(slot), barrier, base, tokens, at, pred, sizes)
    if query is not None:
        start_rows(query, q.index(slot), barrier, base, tokens, at, pred, sizes)
        start_square(scores, weights.index(slot), barrier, number, pred)


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr):
    """Returns barriers of one arrival a phase."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(COUNT):
        mbarrier.init(barriers.index(n), count=1)
    return barriers


@gluon.jit
def allocate_tiles(query, entering, sizes, STAGES: gl.constexpr):
    """Returns the tiles of ``start_chunk``, ``STAGES`` for each operand that is given."""
    DIM: gl.constexpr = sizes.DIM
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, DIM], TILE)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, COLUMNS], TILE)
    solved_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, CHUNK], TILE)
    entering_tiles = k_tiles
    if entering is not None:
        entering_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, DIM], TILE)
    q_tiles = k_tiles
    weights_tiles = solved_tiles
    if query is not None:
        q_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, DIM], TILE)
        weights_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, CHUNK], TILE)
    return q_tiles, k_tiles, v_tiles, entering_tiles, solved_tiles, weights_tiles


@gluon.jit
def allocate_vectors(factors, sizes):
    """Returns the places of the vectors of two chunks, see ``store_vectors``."""
    if factors is None:
        return gl.allocate_shared_memory(gl.float32, [2, sizes.DIM], VECTORS)
    else:
        return gl.allocate_shared_memory(gl.float32, [2 * PARTS, CHUNK], VECTORS)


@gluon.jit
def find_state(states, sequence, head, column, sizes, STATE: gl.constexpr):
    """Returns (elements, whether they are inside) of the state of a program, transposed."""
    c = gl.arange(0, COLUMNS, gl.SliceLayout(1, STATE))[:, None]
    d = gl.arange(0, sizes.DIM, gl.SliceLayout(0, STATE))[None, :]
    state_size = sizes.dim * sizes.value_dim
    state_offset = (sequence.state * sizes.heads + head) * state_size + column
    inside = (d < sizes.dim) & (c < sizes.value_dim - column) & sequence.has_state
    return states + state_offset + d * sizes.value_dim + c, inside


@gluon.jit
def load_state(source, sequence, head, column, sizes, STATE: gl.constexpr):
    """Loads the state of a program before its first chunk; zeros where none is given."""
    state = gl.zeros([COLUMNS, sizes.DIM], gl.float32, STATE)
    if source is not None:
        element, inside = find_state(source, sequence, head, column, sizes, STATE)
        state = gl.load(element, mask=inside, other=0.0).to(gl.float32)
    return state


@gluon.jit
def store_state(target, state, sequence, head, column, sizes, STATE: gl.constexpr):
    """Stores the state of a program after its last chunk, where it is asked for."""
    if target is not None:
        element, inside = find_state(target, sequence, head, column, sizes, STATE)
        gl.store(element, state, mask=inside)


@gluon.jit
def advance_slot(slot, phase, STAGES: gl.constexpr):
    """Returns (slot, phase) of the next chunk; the phase flips when the ring begins again."""
    slot = (gl.to_tensor(slot) + 1) % STAGES
    return slot, phase ^ (slot == 0).to(gl.int32)


@gluon.jit
def load_chunks(
    query, key, value, entering, inverse, scores, cu, tiles, full, empty, sizes,
    BACKWARDS: gl.constexpr,
):  # fmt: skip
    """Copies chunk after chunk: the part of the last warp of a program."""
    column, head, owner = find_program(sizes)
    sequence = find_sequence(cu, owner, sizes)
    slot = 0
    phase = 1  # the slots of the first round are empty
    for i in range(sequence.stop_piece - sequence.first_piece):
        mbarrier.wait(empty.index(slot), phase)
        start_chunk(
            query, key, value, entering, inverse, scores, tiles, slot, full.index(slot),
            find_position(i, sequence, head, sizes, BACKWARDS), head, column, True, sizes,
        )  # fmt: skip
        slot, phase = advance_slot(slot, phase, full.shape[0])


@gluon.jit
def load_vectors(factors, decays, number, pred, sizes):
    """Loads (three factors of the tokens, decay of the chunk); a decay per channel is a vector.

    It has no factors.
    """
    if factors is None:
        d = gl.arange(0, sizes.DIM, VECTOR)
        decay = gl.load(decays + number * sizes.dim + d, mask=(d < sizes.dim) & pred, other=1.0)
        return decay, decay, decay, decay
    else:
        factor = factors + number * (FACTORS * CHUNK) + gl.arange(0, CHUNK, VECTOR)
        of_q = gl.load(factor, mask=pred, other=0.0)
        of_k = gl.load(factor + CHUNK, mask=pred, other=0.0)
        until = gl.load(factor + 2 * CHUNK, mask=pred, other=0.0)
        return of_q, of_k, until, gl.load(decays + number, mask=pred, other=1.0)


@gluon.jit
def store_vectors(vectors, parity, of_q, of_k, until, decay, PER_CHANNEL: gl.constexpr):
    """Stores the vectors of ``load_vectors`` to shared memory, a place for every other chunk."""
    if PER_CHANNEL:
        vectors.index(parity).store(decay)
    else:
        vectors.index(parity * PARTS + SINCE_Q).store(of_q)
        vectors.index(parity * PARTS + SINCE_K).store(of_k)
        vectors.index(parity * PARTS + UNTIL).store(until)


@gluon.jit
def store_all_vectors(vectors, parity, of_q, of_k, until, decay, PER_CHANNEL: gl.constexpr):
    """Stores the vectors of ``load_vectors``, and the decay of all channels, for other warps."""
    store_vectors(vectors, parity, of_q, of_k, until, decay, PER_CHANNEL)
    if not PER_CHANNEL:
        decay = gl.zeros([CHUNK], gl.float32, VECTOR) + decay
        vectors.index(parity * PARTS + DECAY).store(decay)


@gluon.jit
def load_decay(vectors, parity, STATE: gl.constexpr, PER_CHANNEL: gl.constexpr):
    """Loads the decay of a chunk as a factor of a transposed state."""
    if PER_CHANNEL:
        return vectors.index(parity).load(gl.SliceLayout(0, STATE))[None, :]
    else:
        return vectors.index(parity * PARTS + DECAY).load(gl.SliceLayout(1, STATE))[:, None]


@gluon.jit
def store_tile(target, offset, tile, count, width, stride):
    """Stores ``count`` rows of ``width`` columns of a tile in shared memory."""
    HEIGHT: gl.constexpr = tile.shape[0]
    r = gl.arange(0, HEIGHT, gl.SliceLayout(1, STORED))[:, None]
    c = gl.arange(0, COLUMNS, gl.SliceLayout(0, STORED))[None, :]
    inside = (r < count) & (c < width)
    gl.store(target + offset + r * stride + c, tile.load(STORED), mask=inside)

"""``row_gradients`` on Hopper in bfloat16, in one pass over the states.

The same results as ``row_gradients``. A program takes chunk after chunk of a key head. For
every value head of it, 64 columns of the values at a time,

    A = do u^T    B = dv u^T                      [C, columns] by [columns, C]
    X = do S^T    Y = dv S^T    Z = u dS^T        [C, columns] by [columns, dk]

add up in registers while a ninth warp brings the next columns, of the next head or chunk too. The
decays of tokens are applied to these sums; then the pairs add what they have:

    dq = scale D X + A k        reading = -D Y + B k        entering = R Z + A^T q + B^T k

Bound: states and their gradients, updates, do and dv are read once. 8192 tokens, 16 key and 32
value heads of 128: 0.6 GB, 0.14 ms on an H200 (copies 4.3 TB/s). Measured: 0.248 ms, where
``row_gradients`` takes 0.453; with copies started by the computing warps 0.295.

In Gluon, whose names changed until Triton 3.9 (``compat.has_gluon``). Tests run it by NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ejkernel.kernels.triton.bound_launch import TensorMap
from ejkernel.kernels.triton.gated_delta_rule.chunks import GRADIENT_OPERANDS, ChunkLaunch
from ejkernel.kernels.triton.gated_delta_rule.gates import load_gates
from ejkernel.kernels.triton.gated_delta_rule.prepare import EPSILON, load_beta, reciprocal_root
from ejkernel.kernels.triton.gated_delta_rule.rows_sm90 import (
    CHUNK,
    COLUMNS,
    LOADER_REGISTERS,
    TILE,
    VECTORS,
    advance_slot,
    find_item,
    start_rows,
)
from ejkernel.kernels.triton.language import tl
from ejkernel.kernels.triton.launch import BATCHED, Launch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# two warpgroups: each has half of the columns of an accumulator
PAIR = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
# one element of every pair of tokens in a warp, the same in all
TOKEN = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
STAGES = gl.constexpr(3)
# of the 65536 a thread of twelve warps
REGISTERS = 168
HIGH, LOW, SINCE, UNTIL, Q_FACTOR, K_FACTOR, PARTS = (gl.constexpr(i) for i in range(7))


class ColumnTiles(NamedTuple):
    """Shared memory for 64 columns of a value head, STAGES of each; states before and after."""

    do: Any
    u: Any
    dv: Any
    before: Any
    after: Any


class KeyTiles(NamedTuple):
    """Shared memory for the queries and keys of a chunk."""

    q: Any
    k: Any


class Barriers(NamedTuple):
    """Barriers of the slots of ``ColumnTiles``, and of the ``KeyTiles``."""

    full: Any
    empty: Any
    keys_full: Any
    keys_empty: Any


@gluon.jit
def start_columns(
    dout, updates, dvalue, states, dstates, tiles, slot, barrier, position, i, part, sizes
):
    """Starts the copies of 64 columns of a value head."""
    base, tokens, _, chunk, kv_head = position
    head = kv_head * (sizes.heads // sizes.kv_heads) + i
    column = part * COLUMNS
    at = head * sizes.value_dim + column
    row = ((chunk * sizes.heads + head) * sizes.dim).to(gl.int32)
    expected: gl.constexpr = 3 * CHUNK * COLUMNS * 2 + 2 * sizes.DIM * COLUMNS * 2
    mbarrier.expect(barrier, expected)
    base = base.to(gl.int32)
    start_rows(dout, tiles.do.index(slot), barrier, base, tokens, at, True, sizes)
    start_rows(updates, tiles.u.index(slot), barrier, base, tokens, at, True, sizes)
    start_rows(dvalue, tiles.dv.index(slot), barrier, base, tokens, at, True, sizes)
    tma.async_load(states, [row, column], barrier, tiles.before.index(slot))
    tma.async_load(dstates, [row, column], barrier, tiles.after.index(slot))


@gluon.jit
def start_keys(query, key, key_tiles, barrier, position, sizes):
    """Starts the copies of the queries and keys of a chunk."""
    base, tokens, _, _, kv_head = position
    mbarrier.expect(barrier, 2 * CHUNK * sizes.DIM * 2)
    at = kv_head * sizes.dim
    start_rows(query, key_tiles.q, barrier, base.to(gl.int32), tokens, at, True, sizes)
    start_rows(key, key_tiles.k, barrier, base.to(gl.int32), tokens, at, True, sizes)


@gluon.jit
def normalize_tile(tile, factors, number: gl.constexpr, ROWS: gl.constexpr):
    """Divides rows in shared memory by their lengths, and stores 1 / length."""
    x = tile.load(ROWS).to(gl.float32)
    factor = reciprocal_root(gl.sum(x * x, 1) + EPSILON)
    factors.index(number).store(factor)
    tile.store((x * factor[:, None]).to(gl.bfloat16))


@gluon.jit
def store_gradient(
    target, source, gradient, tile, factors, number: gl.constexpr, position, sizes,
    NORMALIZE: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Takes a gradient through the normalization of ``source`` and stores it through ``tile``."""
    base, tokens, rows, _, kv_head = position
    at = (base * sizes.kv_heads + kv_head) * sizes.dim
    stride = sizes.kv_heads * sizes.dim
    if NORMALIZE:
        r = gl.arange(0, CHUNK, gl.SliceLayout(1, ROWS))[:, None]
        d = gl.arange(0, sizes.DIM, gl.SliceLayout(0, ROWS))[None, :]
        x = gl.load(source + at + r * stride + d, mask=r < tokens, other=0.0).to(gl.float32)
        factor = factors.index(number).load(gl.SliceLayout(1, ROWS))[:, None]
        unit = x * factor
        # what lies along a vector does not change its direction
        gradient = (gradient - unit * gl.sum(gradient * unit, 1)[:, None]) * factor
    tile.store(gradient.to(gl.bfloat16))
    gl.barrier()
    r = gl.arange(0, CHUNK, gl.SliceLayout(1, STORED))[:, None]
    d = gl.arange(0, sizes.DIM, gl.SliceLayout(0, STORED))[None, :]
    gl.store(target + at + r * stride + d, tile.load(STORED), mask=r < rows)


@gluon.jit
def load_items(
    query, key, dout, updates, dvalue, states, dstates, cu, tiles, key_tiles, barriers, items,
    programs, sizes, GROUPS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Copies the operands of chunk after chunk: the part of the ninth warp of a program."""
    slot = 0
    phase = 1  # the slots of the first round are empty
    n = 0
    for item in range(gl.program_id(0), items, programs):
        position = find_item(item, items, cu, sizes)
        for i in range(GROUPS):
            for part in gl.static_range(HALVES):
                mbarrier.wait(barriers.empty.index(slot), phase)
                start_columns(
                    dout, updates, dvalue, states, dstates, tiles, slot, barriers.full.index(slot),
                    position, i, part, sizes,
                )  # fmt: skip
                slot, phase = advance_slot(slot, phase, STAGES)
            if i == 0:
                mbarrier.wait(barriers.keys_empty, (n & 1) ^ 1)
                start_keys(query, key, key_tiles, barriers.keys_full, position, sizes)
        n += 1


@gluon.jit
def compute_items(
    gate, beta, raw_query, raw_key, cu, dquery, dkey, dgate, dbeta, tiles, key_tiles, seen_tile,
    read_tile, vectors, barriers, items, programs, sizes, scale, NORMALIZE: gl.constexpr,
    GROUPS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Computes chunk after chunk: the part of the first eight warps of a program."""
    DIM: gl.constexpr = sizes.DIM
    ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DIM // 2, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, ROWS)
    STATE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    PAIR_ROW: gl.constexpr = gl.SliceLayout(1, PAIR)
    PAIR_COLUMN: gl.constexpr = gl.SliceLayout(0, PAIR)
    q_tile = key_tiles.q
    k_tile = key_tiles.k
    program = gl.program_id(0)
    count = (items - program + programs - 1) // programs
    token = gl.arange(0, CHUNK, TOKEN)
    row = gl.arange(0, CHUNK, PAIR_ROW)[:, None]
    column = gl.arange(0, CHUNK, PAIR_COLUMN)[None, :]
    if sizes.REVERSED:
        up_to = column >= row
    else:
        up_to = column <= row
    no_pairs = gl.zeros([CHUNK, CHUNK], gl.float32, PAIR)
    no_rows = gl.zeros([CHUNK, DIM], gl.float32, ROWS)
    slot = 0
    phase = 0
    for n in tl.range(0, count, disable_licm=True):
        position = find_item(program + n * programs, items, cu, sizes)
        base, tokens, rows, _, kv_head = position
        valid = token < tokens
        dq = no_rows
        dk = no_rows
        itself = gl.zeros([CHUNK], gl.float32, PAIR_ROW)
        for i in tl.range(0, GROUPS, disable_licm=True):
            head = kv_head * GROUPS + i
            at = (base + token) * sizes.heads + head
            total = 1.0
            if gate is not None:
                high, low, since, until, total = load_gates(gate, at, valid, sizes.REVERSED)
                vectors.index(HIGH).store(high)
                vectors.index(LOW).store(low)
            else:
                since = valid.to(gl.float32)
                until = since
            vectors.index(SINCE).store(since)
            vectors.index(UNTIL).store(until)
            seen = no_pairs
            read = no_pairs
            x = no_rows
            y = no_rows
            z = no_rows
            ended = gl.zeros([DIM], gl.float32, gl.SliceLayout(1, STATE))
            for part in gl.static_range(HALVES):
                mbarrier.wait(barriers.full.index(slot), phase)
                do = tiles.do.index(slot)
                u = tiles.u.index(slot).permute((1, 0))
                dv = tiles.dv.index(slot)
                before = tiles.before.index(slot)
                after = tiles.after.index(slot)
                seen = warpgroup_mma(do, u, seen, use_acc=part > 0, is_async=True)
                read = warpgroup_mma(dv, u, read, use_acc=part > 0, is_async=True)
                x = warpgroup_mma(do, before.permute((1, 0)), x, use_acc=part > 0, is_async=True)
                y = warpgroup_mma(dv, before.permute((1, 0)), y, use_acc=part > 0, is_async=True)
                z = warpgroup_mma(
                    tiles.u.index(slot), after.permute((1, 0)), z, use_acc=part > 0, is_async=True
                )
                if dgate is not None:
                    products = before.load(STATE).to(gl.float32) * after.load(STATE).to(gl.float32)
                    ended += gl.sum(products, 1)
                seen, read, x, y, z = warpgroup_mma_wait(0, deps=[seen, read, x, y, z])
                # the compiler puts a barrier of the eight warps before this
                mbarrier.arrive(barriers.empty.index(slot))
                slot, phase = advance_slot(slot, phase, STAGES)

            if i == 0:
                mbarrier.wait(barriers.keys_full, n & 1)
                if NORMALIZE:
                    normalize_tile(q_tile, vectors, Q_FACTOR, ROWS)
                    normalize_tile(k_tile, vectors, K_FACTOR, ROWS)
            decayed = gl.where(up_to, 1.0, 0.0)
            if gate is not None:
                exponent = vectors.index(HIGH).load(PAIR_ROW)[:, None]
                exponent = exponent - vectors.index(HIGH).load(PAIR_COLUMN)[None, :]
                fine = vectors.index(LOW).load(PAIR_ROW)[:, None]
                exponent += fine - vectors.index(LOW).load(PAIR_COLUMN)[None, :]
                decayed = gl.exp2(gl.where(up_to, exponent, float("-inf")))
            if dbeta is not None:
                gain = gl.sum(gl.where(row == column, read, 0.0), 1)
                gain = gl.convert_layout(gain, TOKEN)
                strength = gl.where(valid, load_beta(beta, at, valid), 1.0)
                gl.store(dbeta + at, gain / strength / strength, mask=token < rows)
            seen = seen * (decayed * scale)
            itself += gl.sum(gl.where(row == column, seen, 0.0), 1)
            seen_tile.store(gl.where(row == column, 0.0, seen).to(gl.bfloat16))
            read_tile.store(gl.where(row == column, 0.0, read * -decayed).to(gl.bfloat16))
            since = vectors.index(SINCE).load(ROW)[:, None]
            x = x * (since * scale)
            y = y * -since
            z = z * vectors.index(UNTIL).load(ROW)[:, None]
            fence_async_shared()
            gl.barrier()
            x = warpgroup_mma(seen_tile, k_tile, x, is_async=True)
            y = warpgroup_mma(read_tile, k_tile, y, is_async=True)
            if dgate is not None:
                entered = gl.sum(gl.sum(k_tile.load(ROWS).to(gl.float32) * z, 1), 0)
                entered += total * gl.sum(ended, 0)
            z = warpgroup_mma(seen_tile.permute((1, 0)), q_tile, z, is_async=True)
            z = warpgroup_mma(read_tile.permute((1, 0)), k_tile, z, is_async=True)
            x, y, z = warpgroup_mma_wait(0, deps=[x, y, z])
            if dgate is not None:
                moved = q_tile.load(ROWS).to(gl.float32) * x
                moved += k_tile.load(ROWS).to(gl.float32) * (y - z)
                moved = gl.convert_layout(gl.sum(moved, 1), TOKEN)
                moved = gl.where(valid, moved, 0.0)
                moved = tl.cumsum(moved, 0, reverse=not sizes.REVERSED) + entered
                gl.store(dgate + at, gl.where(valid, moved, 0.0), mask=token < rows)
            dq += x
            dk += y + z
            # every warp has read the vectors and the pairs
            gl.barrier()
        weight = gl.convert_layout(itself, ROW)[:, None]
        dq += weight * k_tile.load(ROWS).to(gl.float32)
        dk += weight * q_tile.load(ROWS).to(gl.float32)
        gl.barrier()
        store_gradient(
            dquery, raw_query, dq, q_tile, vectors, Q_FACTOR, position, sizes, NORMALIZE, ROWS
        )
        store_gradient(
            dkey, raw_key, dk, k_tile, vectors, K_FACTOR, position, sizes, NORMALIZE, ROWS
        )
        # the tiles were written by threads, and are written by the copy engine next
        fence_async_shared()
        mbarrier.arrive(barriers.keys_empty)


@gluon.jit
def row_gradients_sm90(
    query, key, gate, beta, dout, updates, dvalue, states, dstates, raw_query, raw_key, cu, dquery,
    dkey, dgate, dbeta, sizes, scale, items, programs, NORMALIZE: gl.constexpr,
    GROUPS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    DIM: gl.constexpr = sizes.DIM
    do_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, COLUMNS], TILE)
    u_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, COLUMNS], TILE)
    dv_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, COLUMNS], TILE)
    before_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, DIM, COLUMNS], TILE)
    after_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, DIM, COLUMNS], TILE)
    tiles = ColumnTiles(do_tiles, u_tiles, dv_tiles, before_tiles, after_tiles)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, DIM], TILE)
    k_tile = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, DIM], TILE)
    key_tiles = KeyTiles(q_tile, k_tile)
    seen_tile = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], TILE)
    read_tile = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], TILE)
    vectors = gl.allocate_shared_memory(gl.float32, [PARTS, CHUNK], VECTORS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES + 1):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=1)
    fence_async_shared()
    barriers = Barriers(full, empty, full.index(STAGES), empty.index(STAGES))
    gl.warp_specialize(
        [
            (compute_items, (
                gate, beta, raw_query, raw_key, cu, dquery, dkey, dgate, dbeta, tiles, key_tiles,
                seen_tile, read_tile, vectors, barriers, items, programs, sizes, scale, NORMALIZE,
                GROUPS, HALVES,
            )),
            (load_items, (
                query, key, dout, updates, dvalue, states, dstates, cu, tiles, key_tiles, barriers,
                items, programs, sizes, GROUPS, HALVES,
            )),
        ],
        [1],
        [LOADER_REGISTERS],
    )  # fmt: skip


@dataclass(frozen=True)
class RowGradientsLaunchSm90(ChunkLaunch):
    """Launch of ``row_gradients_sm90`` in the place of ``general``, of ``row_gradients``."""

    kernel = row_gradients_sm90
    batching: ClassVar = dict.fromkeys(GRADIENT_OPERANDS, BATCHED)

    general: Launch

    @property
    def columns(self) -> int:
        """Columns of the values that are loaded together."""
        return 64

    def outputs(self):
        return self.general.outputs()

    def programs(self, target) -> int:
        """Programs of the launch, one a multiprocessor."""
        return min(target.cores, self.slots * self.problem.kv_heads)

    def grid(self, target):
        return (self.programs(target),)

    def options(self, target):
        return {"num_warps": 8, "num_stages": 1, "maxnreg": REGISTERS}

    def arguments(self, target):
        p = self.problem
        of_states = {
            name: TensorMap(
                self.operand(name).index,
                (self.slots * p.heads * p.dim, p.value_dim),
                (p.dim, self.columns),
            )
            for name in ("states", "dstates")
        }
        rows = self.row_tiles(target, "query", "key", "dout", "updates", "dvalue")
        return (
            rows
            | of_states
            | {
                "raw_query": self.operand("query") if p.normalize else None,
                "raw_key": self.operand("key") if p.normalize else None,
                "sizes": self.sizes(target),
                "scale": float(p.scale),
                "items": self.slots * p.kv_heads,
                "programs": self.programs(target),
                "NORMALIZE": p.normalize,
                "GROUPS": p.heads // p.kv_heads,
                "HALVES": p.value_dim // self.columns,
            }
        )

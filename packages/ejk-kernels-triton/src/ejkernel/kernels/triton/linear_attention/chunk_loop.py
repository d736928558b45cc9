"""Linear attention along a segment: a loop over its chunks, the state in registers.

For every row t of a head, d being the decays of the state (``gates``), accumulated in float32:

    H_t = d_t H_{t-1} + k_t v_t^T          o_t = scale q_t H_t

Inside a chunk these are two matmuls of rows with rows; the state stands for all rows before it:

    o = (scale q k^T . D) v + scale exp(since) q H;   H <- exp(chunk) H + k^T (exp(until) v)

D[t, s] is the decay between two rows, ``since`` the decay of a row since the state before the
chunk, ``until`` its decay until the state after it.

Decays per channel are applied to the arrays that have these channels, and to the scores of their
rows, before the loop (``decay_channels``). Outputs per decaying channel come from
``channel_gradient`` instead.

*One core.* Gradients are the same loop in other passes. With dH running from the last row to the
first over dH_t = d_{t+1} dH_{t+1} + scale q_t^T do_t,

    dq_t = scale do_t H_t^T: query do, key v, value k      dv_s = k_s dH_s: query k, key q, value do
    dk_s = v_s dH_s^T: query v, key do, value q, transposed states

and the decay between two rows is the same whichever of them reads. LATER loops from the last row.
Where one program holds a full state, the last two are one loop (``backward_kv``).

Work split: a *segment* of some chunks, one head, some columns of the values. Segments start from
states that ``state_scan`` passes between them; before it, this kernel without a query gives what a
segment adds to a state. So only one state a segment goes through memory, in float32, and a single
sequence fills the GPU. Segments of packed sequences are the pieces of ``common.sequences``: no
chunk has rows of two, and every reset is seen. Two calls give the same bits.

A chunk has five steps that wait for each other (scores, their decays, state to shared memory, two
matmuls), so the limits are the number of chunks in flight and how often a chunk waits: two programs
a multiprocessor, prefix sums of gates from outside (``gates``; for a constant of the head, once for
all chunks), 64 columns a program, which fit its registers and read q and k twice from the cache.

Bound, bfloat16 on an H200 (700 TFLOP/s, copies 4.3 TB/s), 2 x 8192 rows, 16 heads of 128, chunks of
64 in segments of 1024: q, k, v, o are 268 MB, k and v once more 134 MB, states 4 x 17 MB: 0.11 ms.
64 columns at a time repeat the scores: 30 GFLOP = 0.043 ms. Measured: the states 0.043 ms, o 0.113
ms, with constant decays 0.04 and 0.106 ms; dq 0.151 ms with its part of the gate's gradient; in
float32 (split matmuls) the states 0.083 ms, o 0.40 ms; full chunks have ``chunk_loop_sm90``.

Float32 matmuls on Hopper are three of bfloat16. A value is a bfloat16 value and the remainder,
rounded to one: 16 bits. Of two such values

    a b = high high + high low + low high        to 2^-16

where one matmul in TF32 has 2^-11. Asynchronous matmuls read TF32 operands from shared memory only
along the contracted axis, so that arrays which are contracted over their rows would be transposed
value by value; bfloat16 ones are read either way. So the three take less time there than the one.

Sources: Yang et al. 2023, "Gated linear attention transformers" (arXiv 2312.06635), section 4; Qin
et al. 2024, "Lightning Attention-2" (arXiv 2401.04658), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from ejkernel.kernels.triton import compat
from ejkernel.kernels.triton.common.sequences import find_segment
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, SHARED, struct
from ejkernel.kernels.triton.linear_attention.gates import (
    constant_sums,
    load_chunk_sums,
    pair_decays,
)
from ejkernel.kernels.triton.linear_attention.launch import GATE_SUMS, LinearLaunch, Operand
from ejkernel.kernels.triton.linear_attention.passes import ARRAYS, Pass
from ejkernel.kernels.triton.linear_attention.rows import (
    ChunkOfSegment,
    HeadRows,
    load_chunk_rows,
    store_chunk_rows,
)
from ejkernel.kernels.triton.linear_attention.tiles import (
    FULL,
    Tiles,
    maps_of,
    split_tiles,
    states_options,
    width,
)
from ejkernel.kernels.triton.targets import Target


@triton.jit
def split_float32(x, tile):
    """Returns x as operands of ``split_dot``: a bfloat16 value and the remainder with SPLIT."""
    if tile.SPLIT:
        # rounded as an integer: converting there and back goes value by value, at a quarter of the
        # rate of a conversion of pairs
        bits = (x.to(tl.float32).to(tl.int32, bitcast=True) + 0x8000) & -65536
        high = bits.to(tl.float32, bitcast=True)
        low = (x - high).to(tl.bfloat16)
        high = high.to(tl.bfloat16)
    else:
        high = x.to(tile.DTYPE)
        low = high
    return high, low


@triton.jit
def split_dot(a, a_low, b, b_low, total, tile):
    """Returns a b, added to ``total`` unless that is None."""
    if tile.SPLIT:  # the small terms first
        total = tl.dot(a_low, b, total)
        total = tl.dot(a, b_low, total)
        total = tl.dot(a, b, total)
    else:
        total = tl.dot(a, b, total, input_precision=tile.PRECISION)
    return total


@triton.jit
def row_weights(q, k, pairs, square, high, low, tile):
    """Returns the decayed score of every pair of rows; ``pairs`` has them where channels decay."""
    CHUNK: tl.constexpr = tile.CHUNK
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    if pairs is not None:
        pairs += square * (CHUNK * CHUNK)
        if tile.TRANSPOSED:
            weights = tl.load(pairs + j * CHUNK + i).to(tl.float32)
        else:
            weights = tl.load(pairs + i * CHUNK + j).to(tl.float32)
    else:
        weights = tl.dot(q, tl.trans(k), input_precision=tile.PRECISION)
        if high is not None:
            weights = weights * pair_decays(high, low, tile.LATER, CHUNK)
        elif tile.LATER:
            weights = tl.where(i <= j, weights, 0.0)
        else:
            weights = tl.where(i >= j, weights, 0.0)
    return weights


@triton.jit
def decay_rows(x, until, scale, tile):
    """Returns rows decayed until the end of the chunk, as operands of ``split_dot``."""
    return split_float32(x.to(tl.float32) * (tl.exp(until) * scale)[:, None], tile)


@triton.jit
def add_intra_chunk(o, weights, v, v_low, scale, tile):
    """Adds the output from inside a chunk to the output from before it."""
    if tile.ASYNCHRONOUS:
        # a matmul of its own: an accumulator of both would lie in registers twice, for eight warps
        weights, low = split_float32(weights, tile)
        o += split_dot(weights, low, v, v_low, None, tile) * scale
    else:
        weights, low = split_float32(weights * scale, tile)
        o = split_dot(weights, low, v, v_low, o, tile)
    return o


class Gates(NamedTuple):
    """One log decay a row and head as prefix sums, or a constant one a head."""

    high_sums: Operand
    low_sums: Operand
    totals: Operand
    constant: Operand


class Decayed(NamedTuple):
    """Results of ``decay_channels``: scores of pairs of rows, and decays of chunks by channel."""

    pairs: Operand
    totals: Operand
    value_totals: Operand


class SegmentEnds(NamedTuple):
    """States after segments and the decays of segments, by row, key channel or value channel."""

    states: Operand
    decays: Operand
    key_decays: Operand
    value_decays: Operand


class Sizes(NamedTuple):
    """Sizes of a pass: ``dim`` channels of query and key, ``columns`` of the value."""

    rows: int
    heads: int
    query_heads: int
    key_heads: int
    value_heads: int
    dot_heads: int
    dim: int
    columns: int
    sequences: int
    pieces: int


class Tile(NamedTuple):
    """Constants of a pass.

    SWAPPED: states are stored as ``[columns, dim]``. LATER: the loop runs from the last chunk to
    the first. TRANSPOSED: ``pairs`` are. AHEAD: the state goes on before the output is computed.
    SPLIT: float32 matmuls are split into three of bfloat16.
    """

    REVERSED: bool
    SWAPPED: bool
    LATER: bool
    CHUNK: int
    SEGMENT: int
    DIM: int
    COLUMNS: int
    LANES: int
    TRANSPOSED: bool
    ASYNCHRONOUS: bool
    AHEAD: bool
    MAPS: int
    DTYPE: Any
    SPLIT: bool
    PRECISION: str


@triton.jit
def load_decays(gates, gate, chunk, chunk_slot, head, heads, tile):
    """Returns ``gates.in_loop_order`` of a chunk."""
    count = chunk.length - chunk.at
    if gates.constant is not None:
        high, low, since, until, total = constant_sums(
            gate, count, tile.LATER, tile.REVERSED, tile.CHUNK, tile.MAPS
        )
    else:
        high, low, since, until, total = load_chunk_sums(
            gates.high_sums, gates.low_sums, gates.totals, chunk.row * heads + head, chunk_slot,
            head, heads, count, tile.LATER, tile.CHUNK, tile.MAPS,
        )  # fmt: skip
    return high, low, since, until, total


@triton.jit
def decay_by_channel(state, key_total, value_total, decayed, chunk_head, column, sizes, tile):
    """Decays a state by its channels over one chunk, and adds the log decays to the totals."""
    if decayed.totals is not None:
        d = tl.arange(0, tile.DIM)
        decay = tl.load(decayed.totals + chunk_head * sizes.dim + d, mask=d < sizes.dim, other=0.0)
        key_total += decay
        state = state * tl.exp(decay)[:, None]
    if decayed.value_totals is not None:
        c = tl.arange(0, tile.COLUMNS)
        total_at = decayed.value_totals + chunk_head * sizes.columns + column + c
        decay = tl.load(total_at, mask=c < sizes.columns - column, other=0.0)
        value_total += decay
        state = state * tl.exp(decay)[None, :]
    return state, key_total, value_total


@triton.jit
def store_row_dots(target, stride, o, rows, chunk, column, tile):
    """Stores dot products of rows of o with ``HeadRows``, ``stride`` elements from each other."""
    r = tl.arange(0, tile.CHUNK)
    other = load_chunk_rows(rows, chunk, column, tile.CHUNK, tile.COLUMNS, tile.MAPS)
    dots = tl.sum(o * other.to(tl.float32), 1)
    tl.store(target + r * stride, dots, mask=r < chunk.size - chunk.at)


@triton.jit
def store_segment_decays(ends, total, key_total, value_total, segment_head, column, sizes, tile):
    """Stores the log decays of a segment: of rows and keys only with the first columns."""
    if column == 0:
        if ends.decays is not None:
            tl.store(ends.decays + segment_head, total)
        if ends.key_decays is not None:
            d = tl.arange(0, tile.DIM)
            key_at = ends.key_decays + segment_head * sizes.dim
            tl.store(key_at + d, key_total, mask=d < sizes.dim)
    if ends.value_decays is not None:
        c = tl.arange(0, tile.COLUMNS)
        value_at = ends.value_decays + segment_head * sizes.columns + column
        tl.store(value_at + c, value_total, mask=c < sizes.columns - column)


@triton.jit
def chunk_loop(
    query, key, value, gates, decayed, dot_with, cu, starts, out, ends, states, state_dots,
    sizes, scale_in, scale_out, constant_stride, tile,
):  # fmt: skip
    """Loops over the chunks of a segment, for some columns of one head.

    ``states``: the state before every chunk. ``state_dots``: of every row and block of columns, the
    dot product of ``dot_with`` with what the row gets from rows before its chunk.
    """
    CHUNK: tl.constexpr = tile.CHUNK
    SEGMENT: tl.constexpr = tile.SEGMENT
    DIM: tl.constexpr = tile.DIM
    COLUMNS: tl.constexpr = tile.COLUMNS
    LATER: tl.constexpr = tile.LATER
    ASYNCHRONOUS: tl.constexpr = tile.ASYNCHRONOUS
    MAPS: tl.constexpr = tile.MAPS
    DTYPE: tl.constexpr = tile.DTYPE
    SPLIT: tl.constexpr = tile.SPLIT
    PRECISION: tl.constexpr = tile.PRECISION
    rows, heads, dim, columns = sizes.rows, sizes.heads, sizes.dim, sizes.columns
    across = (columns + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    column = program % across * COLUMNS
    head = program // across % heads
    slot = (program // across // heads).to(tl.int64)
    batch, begin, end, used = find_segment(
        cu, slot, sizes.pieces, rows, sizes.sequences, SEGMENT, tile.LANES
    )
    steps = tl.maximum((end - begin + CHUNK - 1) // CHUNK, 0)

    d = tl.arange(0, DIM)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    if tile.SWAPPED:
        element = (column + c) * dim + d
    else:
        element = d * columns + column + c
    inside = (d < dim) & (c < columns - column)
    segment_head = slot * heads + head
    state_at = segment_head * dim * columns
    state = tl.zeros([DIM, COLUMNS], tl.float32)
    if starts is not None:
        valid = inside & (d < tl.where(used > begin, dim, 0))
        state = tl.load(starts + state_at + element, mask=valid, other=0.0)
    total = 0.0
    key_total = tl.zeros([DIM], tl.float32)
    value_total = tl.zeros([COLUMNS], tl.float32)
    gate = None
    if gates.constant is not None:
        gate = tl.load(gates.constant + batch * constant_stride + head).to(tl.float32)
    base = batch * rows + begin
    DECAYS: tl.constexpr = gates.high_sums is not None or gates.constant is not None
    q_rows = HeadRows(query, head // (heads // sizes.query_heads), sizes.query_heads, dim)
    k_rows = HeadRows(key, head // (heads // sizes.key_heads), sizes.key_heads, dim)
    v_rows = HeadRows(value, head // (heads // sizes.value_heads), sizes.value_heads, columns)
    dot_rows = HeadRows(dot_with, head // (heads // sizes.dot_heads), sizes.dot_heads, columns)
    out_rows = HeadRows(out, head, heads, columns)
    for t in tl.range(0, steps):
        if LATER:
            at = (steps - 1 - t) * CHUNK
        else:
            at = t * CHUNK
        chunk = ChunkOfSegment(base, used - begin, at, base + at, end - begin)
        chunk_slot = slot * (SEGMENT // CHUNK) + at // CHUNK
        chunk_head = chunk_slot * heads + head
        if not SPLIT:
            k = load_chunk_rows(k_rows, chunk, 0, CHUNK, DIM, MAPS).to(DTYPE)
        v_float = load_chunk_rows(v_rows, chunk, column, CHUNK, COLUMNS, MAPS)
        v, v_low = split_float32(v_float, tile)
        high = None
        low = None
        if DECAYS:
            high, low, since, until, chunk_decay = load_decays(
                gates, gate, chunk, chunk_slot, head, heads, tile
            )
        v_end, v_end_low = v, v_low
        if SPLIT:
            # both operands of the state's matmul in registers at once would spill
            if DECAYS:
                v_end, v_end_low = decay_rows(v_float, until, scale_in, tile)
            k = load_chunk_rows(k_rows, chunk, 0, CHUNK, DIM, MAPS).to(DTYPE)
        if states is not None:
            chunk_state = states + chunk_head * dim * columns
            tl.store(chunk_state + element, state.to(states.dtype.element_ty), mask=inside)
        # Rows in registers are read from shared memory where they are loaded, and would wait there
        # for the output: where matmuls are asynchronous the state goes on first. Not if it is
        # stored, which takes registers of its own.
        before = state
        if query is not None:
            if not tile.AHEAD:
                q = load_chunk_rows(q_rows, chunk, 0, CHUNK, DIM, MAPS).to(DTYPE)
                if not ASYNCHRONOUS:  # scores are small again before the output takes registers
                    weights = row_weights(q, k, decayed.pairs, chunk_head, high, low, tile)
                o = tl.dot(q, state.to(DTYPE), input_precision=PRECISION)
        kt, kt_low = split_float32(tl.trans(k), tile)
        state, key_total, value_total = decay_by_channel(
            state, key_total, value_total, decayed, chunk_head, column, sizes, tile
        )
        if DECAYS:
            if not SPLIT:
                v_end, v_end_low = decay_rows(v_float, until, scale_in, tile)
            state = state * tl.exp(chunk_decay)
            total += chunk_decay
            state = split_dot(kt, kt_low, v_end, v_end_low, state, tile)
        else:
            added = split_dot(kt, kt_low, v_end, v_end_low, None, tile)
            state += added * scale_in

        if query is not None:
            if tile.AHEAD:
                q = load_chunk_rows(q_rows, chunk, 0, CHUNK, DIM, MAPS).to(DTYPE)
                o = tl.dot(q, before.to(DTYPE), input_precision=PRECISION)
            if DECAYS:
                o = o * (tl.exp(since) * scale_out)[:, None]
            else:
                o = o * scale_out
            if dot_with is not None:
                first_dot = state_dots + (chunk.row * heads + head) * across + column // COLUMNS
                store_row_dots(first_dot, heads * across, o, dot_rows, chunk, column, tile)
            if ASYNCHRONOUS:
                weights = row_weights(q, k, decayed.pairs, chunk_head, high, low, tile)
            o = add_intra_chunk(o, weights, v, v_low, scale_in * scale_out, tile)
            store_chunk_rows(out_rows, o, chunk, column, CHUNK, COLUMNS, MAPS)
    if ends.states is not None:
        tl.store(ends.states + state_at + element, state, mask=inside)
        store_segment_decays(ends, total, key_total, value_total, segment_head, column, sizes, tile)


@dataclass(frozen=True)
class ChunkLoop(LinearLaunch):
    """Launch of ``chunk_loop`` in one pass over a call."""

    kernel = chunk_loop
    batching: ClassVar = {
        **dict.fromkeys(("query", "key", "value", *GATE_SUMS, "dot_with"), BATCHED),
        **dict.fromkeys(("pairs", "totals", "value_totals", "cu", "starts"), BATCHED),
        "constant": SHARED,
    }

    spec: Pass

    def is_split(self, target: Target) -> bool:
        """Returns whether float32 matmuls are split into three of bfloat16."""
        return target.hopper and self.problem.compute_dtype == "float32" and self.tiles.chunk >= 64

    def block(self, target: Target) -> int:
        """Returns the columns of a program."""
        p, (dim, columns) = self.problem, self.spec.sizes(self.problem)
        if self.is_split(target) and not self.spec.query and width(dim) <= 128:
            return min(128, width(columns))  # without a query registers are left
        # registers that decays between rows would take are free where pairs are loaded
        return min(self.tiles.columns * (2 if p.key_parts or p.value_parts else 1), width(columns))

    def adapted_tiles(self, target: Target) -> Tiles:
        """Returns the tiles of this pass."""
        if not self.is_split(target):
            return self.tiles
        wide = min(self.block(target), width(self.spec.sizes(self.problem)[0])) == 128
        reads, stores = bool(self.spec.query), self.spec.states
        return split_tiles(self.tiles, reads=reads, stores_states=stores, wide=wide)

    def maps(self, target: Target) -> int:
        """Returns how rows are loaded, see ``tiles.maps_of``."""
        dim, columns = self.spec.sizes(self.problem)
        blocks = ((dim, width(dim)), (columns, self.block(target)))
        return maps_of(self.problem, self.tiles.chunk, blocks, target)

    def outputs(self):
        p, spec, columns = self.problem, self.spec, self.spec.sizes(self.problem)[1]
        state, segments = (p.heads, p.dim, p.value_dim), self.segments
        results = {
            "out": spec.query and struct(spec.out, p.batch, p.rows, p.heads, columns),
            "ends": spec.ends and struct("float32", segments, *state),
            "decays": spec.ends and p.scalar and struct("float32", segments, p.heads),
            "key_decays": spec.ends and p.key_parts and struct("float32", segments, p.heads, p.dim),
            "value_decays": spec.ends
            and p.value_parts
            and struct("float32", segments, p.heads, p.value_dim),
            "states": spec.states and struct(p.compute_dtype, self.chunks, *state),
            "state_dots": spec.dot_with
            and struct("float32", p.batch, p.rows, p.heads, -(-columns // self.tiles.columns)),
        }
        return {name: kind or None for name, kind in results.items()}

    def grid(self, target):
        columns = self.spec.sizes(self.problem)[1]
        return (self.segments * self.problem.heads * -(-columns // self.block(target)),)

    def options(self, target):
        t = self.adapted_tiles(target)
        options = {"num_warps": t.num_warps, "num_stages": t.num_stages}
        if self.spec.query or self.spec.states:
            return options
        return options | states_options(self.problem, t, target)

    def arguments(self, target):
        p, t, spec = self.problem, self.tiles, self.spec
        (dim, columns), block, maps = spec.sizes(p), self.block(target), self.maps(target)
        query_heads, key_heads, value_heads = spec.heads(p)
        dot_heads = p.kv_heads if ARRAYS[spec.dot_with or "q"][1] else p.heads
        key, value = (dim, width(dim)), (columns, block)
        return {
            "query": self.rows_of("query", query_heads, *key, maps),
            "key": self.rows_of("key", key_heads, *key, maps),
            "value": self.rows_of("value", value_heads, *value, maps),
            "gates": Gates(*map(self.operand, (*GATE_SUMS, "constant"))),
            "decayed": Decayed(*map(self.operand, ("pairs", "totals", "value_totals"))),
            "dot_with": self.rows_of("dot_with", dot_heads, *value, maps),
            "ends": SegmentEnds(
                *map(self.result, ("ends", "decays", "key_decays", "value_decays"))
            ),
            "sizes": Sizes(
                p.rows, p.heads, query_heads, key_heads, value_heads, dot_heads, dim, columns,
                p.sequences, self.pieces,
            ),
            "scale_in": p.scale if spec.later else 1.0,
            "scale_out": 1.0 if spec.later else p.scale,
            "constant_stride": self.constant_stride,
            "tile": Tile(
                REVERSED=p.reverse,
                SWAPPED=spec.swapped,
                LATER=spec.later != p.reverse,
                CHUNK=t.chunk,
                SEGMENT=t.segment,
                DIM=width(dim),
                COLUMNS=block,
                LANES=self.lanes,
                TRANSPOSED=spec.later,
                ASYNCHRONOUS=target.hopper,
                AHEAD=target.hopper and not spec.states,
                MAPS=maps,
                DTYPE=self.compute_dtype,
                SPLIT=self.is_split(target),
                PRECISION=self.precision(target),
            ),
        }  # fmt: skip

    def interpreter_arguments(self, target):
        # float32 matmuls are exact there
        return {"tile": self.arguments(target)["tile"]._replace(SPLIT=False)}

    def bind(self, target):
        if not self.has_sm90_kernel(target):
            return super().bind(target)
        from ejkernel.kernels.triton.linear_attention.chunk_loop_sm90 import ChunkLoopSm90

        launch = ChunkLoopSm90(self, operands=self.operands)
        return replace(launch.bind(target), stand_in=super().bind(target))

    def has_sm90_kernel(self, target: Target) -> bool:
        """Returns whether ``chunk_loop_sm90`` computes this pass."""
        p, t, spec = self.problem, self.tiles, self.spec
        default = (t.num_warps, t.num_stages) == (8, 2)  # not from a config
        plain = spec.query and p.scalar and not (spec.dot_with or spec.ends)
        float32 = {p.dtype, p.out, p.narrowest} == {"float32"}  # and not float16 promoted
        dim, block = width(spec.sizes(p)[0]), self.block(target)
        fits = t.chunk == 64 and block == 64 and dim in (64, 128) and self.maps(target) == FULL
        supported = self.is_split(target) and default and plain and float32 and fits
        return bool(supported and compat.has_gluon())

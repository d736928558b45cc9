"""Gradients of arrays that meet through decaying channels, of keys or of values, and of the gate.

Where channels of values decay, the forward output comes from here as well: o_t is da_t with the
values as b, and needs neither a nor dH.

With a the array that reads through the decaying channels and b the one that is read (q and k for
keys, do and v for values), c and d the other two, P[t, s] = scale c_t d_s, H the state before the
chunk, dH the gradient of the one after it, and D[t, s] the decay between two rows,

    da_t = sum over s of P[t, s] D[t, s] b_s + scale exp(since_t) c_t H
    db_s = sum over t of P[t, s] D[t, s] a_t + exp(until_s) d_s dH

channel by channel. The gate of row r is in the exponents of all pairs around it:

    dg_r = sum over t >= r of a_t da_t - sum over s >= r of b_s db_s, in the chunk
         + sum over s of exp(until_s) b_s (d_s dH) + exp(chunk) sum of H . dH

*Near* chunks (``channels``) compute just this: one matmul for da, one for db, one with a matrix of
0 and 1 for the sums over rows. The first two take the same rounded values, so that the difference
errs like a float32 accumulation, by 2^-24 of its terms, and no accumulation runs past a chunk.
Against float64 and with bfloat16 inputs dg errs by 0.0034 to 0.0036 of its size this way and by
0.0024 to 0.0030 by halving, as q and k are rounded once more, whether the gates of half a chunk sum
up to 1.3 or to 38.

Others go by halving. A row of a cut's later half is reached through e_t a_t, one of its earlier
half through e_s b_s; one matmul with all pairs of that cut, in both directions, gives the part of
da for the former and of db for the latter. That part times a or b is the gradient of an exponent,
and goes back through the transposed matrix of 0 and 1 that made it. Nothing is subtracted: gates of
any strength lose nothing.

Work split: some channels of one chunk of one head a program; P again for each.

Bound: q, k, v, do, the gate and two states a chunk are read, three gradients written: 2 x 8192
rows, 16 heads of 128, chunks of 64, bfloat16: 336 + 268 + 201 MB = 0.19 ms on an H200. The limit is
instructions: 2,800 a warp of 16,384 programs, 0.20 ms if none ever waited. Measured: near chunks
0.44 ms, by halving 1.5 ms; the forward output alone, 0.21 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ejkernel.kernels.triton.bound_launch import In, TensorMap
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, struct
from ejkernel.kernels.triton.linear_attention.channels import (
    decay_from_middle,
    gates_to_cut,
    is_reader,
    load_cut_matrix,
    matrix_sums,
    meets_at_cut,
    near_limit,
    visible_rows,
)
from ejkernel.kernels.triton.linear_attention.launch import LinearLaunch
from ejkernel.kernels.triton.linear_attention.rows import (
    POINTERS,
    HeadRows,
    find_chunk,
    load_chunk_rows,
)
from ejkernel.kernels.triton.linear_attention.tiles import CHANNELS, channel_options, maps_of, width
from ejkernel.kernels.triton.targets import Target

# ``scores``: matmul of the other two arrays, of rows that read with the rows they see and
# themselves. ``reached``, ``leaving``: contributions of the state before the chunk, and of the
# gradient of the one after it, not yet decayed. ``outside``: contribution of both to every gate of
# the chunk. Without ``dsource`` only dreader is computed.


@triton.jit
def store_tile(pointer, offsets, x, written):
    tl.store(pointer + offsets, x.to(pointer.dtype.element_ty), mask=written)


@triton.jit
def gradients_of_near_chunk(
    a, b, since, before, after, scores, reached, leaving, outside, offsets, written, dreader,
    dsource, dgate, cut_matrices, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores the gradients of a near chunk, with one matmul for each."""
    CHUNK: tl.constexpr = b.shape[0]
    reader_decay = tl.exp(since)
    source_decay = tl.exp(-since)
    entering = (b.to(tl.float32) * source_decay).to(scores.dtype)
    read = tl.dot(scores, entering, input_precision=PRECISION)
    read += reached * tl.exp(before)[None, :]
    if dreader is not None:
        store_tile(dreader, offsets, reader_decay * read, written)
    if dsource is not None:
        reading = (a.to(tl.float32) * reader_decay).to(scores.dtype)
        sent = tl.dot(tl.trans(scores), reading, input_precision=PRECISION)
        leaving = leaving * tl.exp(after)[None, :]
        sent += leaving
        store_tile(dsource, offsets, source_decay * sent, written)
        # the diagonal, which no gate decays, is in both
        entering = entering.to(tl.float32)
        dg = reading.to(tl.float32) * read - entering * sent
        dg = matrix_sums(load_cut_matrix(cut_matrices, 3, CHUNK), dg, 3)
        dg += (outside + tl.sum(entering * leaving, 0))[None, :]
        store_tile(dgate, offsets, dg, written)


@triton.jit
def gradients_by_halves(
    a, b, gate, scores, reached, leaving, outside, offsets, written, dreader, dsource, dgate,
    cut_matrices, REVERSED: tl.constexpr, PARTS: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores the gradients of a chunk cut by cut, without a difference."""
    CHUNK: tl.constexpr = b.shape[0]
    r = tl.arange(0, CHUNK)
    diagonal = tl.where(r[:, None] == r[None, :], scores, 0.0)
    da = tl.exp(matrix_sums(load_cut_matrix(cut_matrices, 1, CHUNK), gate, PARTS)) * reached
    if dsource is not None:
        db = tl.exp(matrix_sums(load_cut_matrix(cut_matrices, 2, CHUNK), gate, PARTS)) * leaving
        since_start = load_cut_matrix(cut_matrices, 3, CHUNK)
        dg = matrix_sums(since_start, a.to(tl.float32) * da, 3) + outside[None, :]
        dg += matrix_sums(1.0 - since_start, b.to(tl.float32) * db, 3)
        db += tl.dot(diagonal, a.to(scores.dtype), input_precision=PRECISION)
    da += tl.dot(diagonal, b.to(scores.dtype), input_precision=PRECISION)
    scores = tl.where(visible_rows(REVERSED, CHUNK), scores, 0.0)
    if dsource is not None:
        scores += tl.trans(scores)  # every pair of rows both ways round
    for level in tl.range(0, LEVELS):
        cut = gates_to_cut(level, REVERSED, CHUNK)
        e = tl.exp(matrix_sums(cut, gate, PARTS))
        reader = is_reader(level, REVERSED, CHUNK)
        row = b.to(tl.float32)
        if dsource is not None:
            row = tl.where(reader, a, b).to(tl.float32)
        pairs = tl.where(meets_at_cut(level, CHUNK), scores, 0.0)
        gradient = e * tl.dot(pairs, (row * e).to(scores.dtype), input_precision=PRECISION)
        da += tl.where(reader, gradient, 0.0)
        if dsource is not None:
            db += tl.where(reader, 0.0, gradient)
            dg += matrix_sums(tl.trans(cut), gradient * row, 3)
    if dreader is not None:
        store_tile(dreader, offsets, da, written)
    if dsource is not None:
        store_tile(dsource, offsets, db, written)
        store_tile(dgate, offsets, dg, written)


@triton.jit
def _load_state_tile(
    states, index, dim, columns, row, column, exists, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    MAPS: tl.constexpr,
):  # fmt: skip
    """Loads a tile at ``row`` and ``column`` of a state ``[dim, columns]``, if it ``exists``."""
    if MAPS:
        tile = states.load([(index * dim + row).to(tl.int32), column])
    else:
        r = tl.arange(0, ROWS)[:, None]
        c = tl.arange(0, WIDTH)[None, :]
        states += (index * dim + row) * columns + column
        inside = (r < tl.where(exists, dim - row, 0)) & (c < columns - column)
        tile = tl.load(states + r * columns + c, mask=inside, other=0.0)
    return tile


@triton.jit
def load_state(states, index, channel, other, exists, sizes, tile):
    """Loads ``[OTHERS, CHANNELS]`` of a state, if it ``exists``."""
    channels, others = sizes.channels, sizes.others
    if tile.OF_VALUES:
        h = _load_state_tile(
            states, index, others, channels, other, channel, exists, tile.OTHERS, tile.CHANNELS,
            tile.MAPS,
        )  # fmt: skip
    else:
        h = _load_state_tile(
            states, index, channels, others, channel, other, exists, tile.CHANNELS, tile.OTHERS,
            tile.MAPS,
        )  # fmt: skip
        h = tl.trans(h)
    return h


class Sizes(NamedTuple):
    """Sizes of a call: ``channels`` that decay, ``others`` that do not."""

    rows: int
    heads: int
    reader_heads: int
    source_heads: int
    reader_other_heads: int
    source_other_heads: int
    channels: int
    others: int
    sequences: int
    pieces: int


class Tile(NamedTuple):
    """Constants; PARTS: bfloat16 parts of a gate, NEAR: see ``channels.near_limit``."""

    OF_VALUES: bool
    REVERSED: bool
    CHUNK: int
    SEGMENT: int
    CHANNELS: int
    OTHERS: int
    LANES: int
    LEVELS: int
    NEAR: float
    PARTS: int
    MAPS: int
    DTYPE: Any
    PRECISION: str


@triton.jit
def multiply_others(
    c_rows, d_rows, chunk, index, channel, pairs, totals, states, dstates, sizes, tile
):
    """Returns the matmul c d^T of a chunk, or ``pairs``, then c H, d dH, and the sum of H . dH.

    ``index``: of the chunk and head. The last three are ``reached``, ``leaving`` and ``outside``.
    """
    CHUNK: tl.constexpr = tile.CHUNK
    CHANNELS: tl.constexpr = tile.CHANNELS
    OTHERS: tl.constexpr = tile.OTHERS
    MAPS: tl.constexpr = tile.MAPS
    DTYPE: tl.constexpr = tile.DTYPE
    PRECISION: tl.constexpr = tile.PRECISION
    others = sizes.others
    chunk_row = tl.arange(0, CHUNK)
    m = tl.arange(0, OTHERS)
    if pairs is not None:
        square = pairs + index * (CHUNK * CHUNK)
        products = tl.load(square + chunk_row[:, None] * CHUNK + chunk_row[None, :]).to(tl.float32)
    else:
        products = tl.zeros([CHUNK, CHUNK], tl.float32)
    reached = tl.zeros([CHUNK, CHANNELS], tl.float32)
    leaving = tl.zeros([CHUNK, CHANNELS], tl.float32)
    outside = tl.zeros([CHANNELS], tl.float32)
    exists = chunk.at < chunk.length  # chunks without rows have no states
    for other in tl.range(0, others, OTHERS):
        c = load_chunk_rows(c_rows, chunk, other, CHUNK, OTHERS, MAPS).to(DTYPE)
        d = load_chunk_rows(d_rows, chunk, other, CHUNK, OTHERS, MAPS).to(DTYPE)
        h = load_state(states, index, channel, other, exists, sizes, tile)
        reached = tl.dot(c, h.to(DTYPE), reached, input_precision=PRECISION)
        if pairs is None:
            products = tl.dot(c, tl.trans(d), products, input_precision=PRECISION)
        if dstates is not None:
            dh = load_state(dstates, index, channel, other, exists, sizes, tile)
            leaving = tl.dot(d, dh.to(DTYPE), leaving, input_precision=PRECISION)
            both = h.to(tl.float32) * dh.to(tl.float32)
            if totals is not None:
                total_at = totals + index * others + other
                chunk_decay = tl.exp(tl.load(total_at + m, mask=m < others - other, other=0.0))
                both = both * chunk_decay[:, None]
            outside += tl.sum(both, 0)
    return products, reached, leaving, outside


@triton.jit
def channel_gradient(
    reader, source, reader_other, source_other, gate, halves, cut_matrices, pairs, totals, states,
    dstates, cu, dreader, dsource, dgate, sizes, scale, tile,
):  # fmt: skip
    """Writes the gradients of some channels of one chunk and head.

    a, b, c, d are reader, source, reader_other, source_other; with ``pairs`` and ``totals`` the
    last two are decayed. Without ``dsource`` only dreader is computed.
    """
    REVERSED: tl.constexpr = tile.REVERSED
    CHUNK: tl.constexpr = tile.CHUNK
    CHANNELS: tl.constexpr = tile.CHANNELS
    DTYPE: tl.constexpr = tile.DTYPE
    PRECISION: tl.constexpr = tile.PRECISION
    heads, channels, others = sizes.heads, sizes.channels, sizes.others
    across = (channels + CHANNELS - 1) // CHANNELS
    program = tl.program_id(0)
    channel = program % across * CHANNELS
    head = program // across % heads
    slot = (program // across // heads).to(tl.int64)
    chunk = find_chunk(cu, slot, sizes, CHUNK, tile.SEGMENT, tile.LANES)
    index = slot * heads + head
    chunk_row = tl.arange(0, CHUNK)
    a_head = head // (heads // sizes.reader_heads)
    b_head = head // (heads // sizes.source_heads)
    c_head = head // (heads // sizes.reader_other_heads)
    d_head = head // (heads // sizes.source_other_heads)
    a_rows = HeadRows(reader, a_head, sizes.reader_heads, channels)
    b_rows = HeadRows(source, b_head, sizes.source_heads, channels)
    c_rows = HeadRows(reader_other, c_head, sizes.reader_other_heads, others)
    d_rows = HeadRows(source_other, d_head, sizes.source_other_heads, others)
    gate_rows = HeadRows(gate, head, heads, channels)

    n = tl.arange(0, CHANNELS)
    # by address: all three are in flight at once
    a = None
    if reader is not None:
        a = load_chunk_rows(a_rows, chunk, channel, CHUNK, CHANNELS, POINTERS)
    b = load_chunk_rows(b_rows, chunk, channel, CHUNK, CHANNELS, POINTERS)
    g = load_chunk_rows(gate_rows, chunk, channel, CHUNK, CHANNELS, POINTERS)
    products, reached, leaving, outside = multiply_others(
        c_rows, d_rows, chunk, index, channel, pairs, totals, states, dstates, sizes, tile
    )

    written = (chunk_row < chunk.size - chunk.at)[:, None] & (n < channels - channel)[None, :]
    element = (chunk.row * heads + head) * channels + channel
    offsets = chunk_row[:, None] * (heads * channels) + n[None, :]
    visible = visible_rows(REVERSED, CHUNK) | (chunk_row[:, None] == chunk_row[None, :])
    scores = tl.where(visible, products * scale, 0.0).to(DTYPE)
    reached = reached * scale
    g = tl.maximum(g.to(tl.float32), -128.0)
    since, is_near = decay_from_middle(
        load_cut_matrix(cut_matrices, 0, CHUNK), g, REVERSED, tile.PARTS, tile.LEVELS, tile.NEAR
    )
    half = halves + index * (2 * channels) + channel + n
    before = tl.load(half, mask=n < channels - channel, other=0.0)
    after = tl.load(half + channels, mask=n < channels - channel, other=0.0)
    outside = outside * tl.exp(before + after)
    if dreader is not None:
        dreader += element
    if dsource is not None:
        dsource += element
        dgate += element
    if is_near:
        gradients_of_near_chunk(
            a, b, since, before, after, scores, reached, leaving, outside, offsets, written,
            dreader, dsource, dgate, cut_matrices, PRECISION,
        )  # fmt: skip
    else:
        gradients_by_halves(
            a, b, g, scores, reached, leaving, outside, offsets, written, dreader, dsource, dgate,
            cut_matrices, REVERSED, tile.PARTS, tile.LEVELS, PRECISION,
        )  # fmt: skip


@dataclass(frozen=True)
class ChannelGradient(LinearLaunch):
    """Launch of ``channel_gradient``.

    ``results``: dtypes of dreader, dsource and dgate, "" for a result left out. dreader alone is
    the forward output, and needs neither ``reader`` nor ``dstates``.
    """

    kernel = channel_gradient
    batching: ClassVar = {
        **dict.fromkeys(("reader", "source", "reader_other", "source_other"), BATCHED),
        **dict.fromkeys(("gate", "halves", "cut_matrices", "pairs", "totals"), BATCHED),
        **dict.fromkeys(("states", "dstates", "cu"), BATCHED),
    }

    of_values: bool
    results: tuple[str, str, str]

    @property
    def channels(self) -> tuple[int, int]:
        """Channels that decay, and channels of the other two arrays."""
        p = self.problem
        return (p.value_dim, p.dim) if self.of_values else (p.dim, p.value_dim)

    @property
    def parts(self) -> tuple[int, int]:
        """Bfloat16 parts of the gate, and of the gate of the other channels (0 = none)."""
        p = self.problem
        parts = (p.key_parts, p.value_parts)
        return parts[::-1] if self.of_values else parts

    @property
    def is_backward(self) -> bool:
        """True unless the result is the forward output."""
        return self.results[1] != ""

    @property
    def blocks(self) -> tuple[int, int]:
        """Channels of a program, and channels of the others in a step."""
        channels, others = self.channels
        block = CHANNELS if self.is_backward else 2 * CHANNELS
        other_block = 64 if self.problem.compute_dtype == "bfloat16" else 32
        return min(block, width(channels)), min(other_block, width(others))

    def outputs(self):
        p = self.problem
        return {
            name: struct(dtype, p.batch, p.rows, p.heads, self.channels[0]) if dtype else None
            for name, dtype in zip(("dreader", "dsource", "dgate"), self.results, strict=True)
        }

    def grid(self, target):
        return (self.chunks * self.problem.heads * -(-self.channels[0] // self.blocks[0]),)

    def options(self, target):
        bounds = channel_options(self.problem, self.parts[0], target) if self.is_backward else {}
        return {**super().options(target), **bounds}

    def state_operand(self, name: str, maps: int) -> In | TensorMap | None:
        """Returns states before every chunk as ``load_state`` takes them."""
        p, operand, block = self.problem, self.operand(name), self.blocks
        if operand is None or not maps:
            return operand
        block = block[::-1] if self.of_values else block
        return TensorMap(operand.index, (self.chunks * p.heads * p.dim, p.value_dim), block)

    def arguments(self, target: Target):
        p, t = self.problem, self.tiles
        (channels, others), (block, other_block) = self.channels, self.blocks
        maps = maps_of(p, t.chunk, ((channels, block), (others, other_block)), target)
        # a, b, c, d of keys are q, k, do, v; of values do, v, q, k; decayed ones have all heads
        source_other_heads = p.heads if self.parts[1] else p.kv_heads
        other = (others, other_block, maps)
        return {
            "reader_other": self.rows_of("reader_other", p.heads, *other),
            "source_other": self.rows_of("source_other", source_other_heads, *other),
            "states": self.state_operand("states", maps),
            "dstates": self.state_operand("dstates", maps),
            "sizes": Sizes(
                p.rows, p.heads, p.heads, p.kv_heads, p.heads, source_other_heads, channels,
                others, p.sequences, self.pieces,
            ),
            "scale": float(p.scale),
            "tile": Tile(
                OF_VALUES=self.of_values,
                REVERSED=p.reverse,
                CHUNK=t.chunk,
                SEGMENT=t.segment,
                CHANNELS=block,
                OTHERS=other_block,
                LANES=self.lanes,
                LEVELS=self.levels,
                NEAR=near_limit(p, subtracts=self.is_backward),
                PARTS=self.parts[0],
                MAPS=maps,
                DTYPE=self.compute_dtype,
                PRECISION=self.precision(target),
            ),
        }  # fmt: skip

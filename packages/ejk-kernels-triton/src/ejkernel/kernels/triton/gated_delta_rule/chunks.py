"""Launches of the gated delta rule over chunks: their common sizes, operands and loads.

A chunk is a piece of ``common.sequences``: the tokens of one sequence in a tile of CHUNK rows. Its
number among all of the call is its slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ejkernel.kernels.triton.bound_launch import In, TensorMap, runs_map
from ejkernel.kernels.triton.common.sequences import (
    find_segment,
    lane_count,
    piece_count,
    pieces_of,
    sequence_start,
)
from ejkernel.kernels.triton.gated_delta_rule.problem import Problem
from ejkernel.kernels.triton.gated_delta_rule.tiles import Tiles
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import Launch
from ejkernel.kernels.triton.linear_attention import tiles as linear_tiles
from ejkernel.kernels.triton.linear_attention.rows import POINTERS, load_rows, store_rows
from ejkernel.kernels.triton.targets import Target

SCAN_OPERANDS = (
    "query", "key", "value", "entering", "inverse", "scores", "factors", "decays", "initial", "cu",
)  # fmt: skip
REVERSE_SCAN_OPERANDS = (
    "query", "key", "entering", "dout", "inverse", "scores", "factors", "decays", "dfinal", "cu",
)  # fmt: skip
GRADIENT_OPERANDS = (
    "query", "key", "gate", "beta", "dout", "updates", "dvalue", "states", "dstates", "cu",
)  # fmt: skip
FACTORS = 3
"""Factors of a token: of q and k that read the state before the chunk, and of k that enters the
state after it."""


class Sizes(NamedTuple):
    """Sizes of a call; fields in capitals are constants of a compiled kernel.

    Attributes:
        pieces: chunks of a batch row, empty ones included.
        DIM, COLUMNS: padded channels of a key; columns of the values that a program has.
        LANES: sequences searched together.
        MAPS: how rows are loaded, see ``linear_attention.rows``.
        DTYPE: dtype of the operands of matmuls.
        PRECISION: precision of float32 matmuls.
    """

    rows: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    sequences: int
    pieces: int
    CHUNK: int
    DIM: int
    COLUMNS: int
    LANES: int
    REVERSED: bool
    MAPS: int
    DTYPE: Any
    PRECISION: str


@dataclass(frozen=True)
class ChunkLaunch(Launch):
    """A launch over the chunks of a call."""

    problem: Problem
    tiles: Tiles

    @property
    def pieces(self) -> int:
        """Chunks of a batch row, empty ones included."""
        return piece_count(self.problem.rows, self.problem.sequences, self.tiles.chunk)

    @property
    def slots(self) -> int:
        """Chunks of all batch rows."""
        return self.problem.batch * self.pieces

    @property
    def key_width(self) -> int:
        """Channels of queries and keys that are loaded together."""
        return linear_tiles.width(self.problem.dim)

    @property
    def columns(self) -> int:
        """Columns of the values that a program has."""
        return min(self.tiles.columns, linear_tiles.width(self.problem.value_dim))

    def maps(self, target: Target) -> int:
        """Returns how rows are loaded: through the copy engine where there is one."""
        p, t = self.problem, self.tiles
        keys, values = (p.dim, linear_tiles.width(p.dim)), (p.value_dim, self.columns)
        return linear_tiles.maps_of(p, t.chunk, (keys, values), target)

    def sizes(self, target: Target) -> Sizes:
        p = self.problem
        return Sizes(
            p.rows,
            p.heads,
            p.kv_heads,
            p.dim,
            p.value_dim,
            p.sequences,
            self.pieces,
            CHUNK=self.tiles.chunk,
            DIM=linear_tiles.width(p.dim),
            COLUMNS=self.columns,
            LANES=lane_count(p.sequences),
            REVERSED=p.reverse,
            MAPS=self.maps(target),
            DTYPE=getattr(tl, p.compute_dtype),
            PRECISION=p.precision if target.platform == "cuda" else "ieee",
        )

    def row_tiles(self, target: Target, *names: str) -> dict[str, In | TensorMap | None]:
        """Returns operands ``[batch, rows, heads, channels]`` by name, loaded a chunk at a time."""
        return {name: self._rows(name, target) for name in names}

    def _rows(self, name: str, target: Target) -> In | TensorMap | None:
        operand, shape, maps = self.operand(name), self.shape(name), self.maps(target)
        if operand is None or shape is None or not maps:
            return operand
        batch, rows, heads, channels = shape
        width = self.key_width if name in ("query", "key", "entering") else self.columns
        block = (self.tiles.chunk, width)
        if maps == linear_tiles.FULL:
            return TensorMap(operand.index, (batch * rows, heads * channels), block)
        return runs_map(operand.index, heads * channels, block)

    def matrices(self, target: Target, *names: str) -> dict[str, In | TensorMap | None]:
        """Returns operands ``[slots, heads, height, width]`` by name, loaded a matrix at a time."""
        return {name: self._matrices(name, target) for name in names}

    def _matrices(self, name: str, target: Target) -> In | TensorMap | None:
        operand, shape = self.operand(name), self.shape(name)
        if operand is None or shape is None or not self.maps(target):
            return operand
        slots, heads, height, width = shape
        rows = self.key_width if height == self.problem.dim else height
        return TensorMap(operand.index, (slots * heads * height, width), (rows, width))


class ChunkRows(NamedTuple):
    """The rows of a chunk.

    Attributes:
        base: its first row, counted over all batch rows.
        tokens: its rows that belong to a sequence with a state.
        rows: its rows.
    """

    base: Any
    tokens: Any
    rows: Any


@triton.jit
def find_chunk(cu, slot, sizes):
    """Returns the ``ChunkRows`` of a slot."""
    batch, begin, end, used = find_segment(
        cu, slot, sizes.pieces, sizes.rows, sizes.sequences, sizes.CHUNK, sizes.LANES
    )
    # empty pieces may begin past the array
    begin = tl.minimum(begin, sizes.rows)
    base = batch * sizes.rows + begin
    return ChunkRows(base, tl.maximum(used - begin, 0), tl.maximum(end - begin, 0))


class SequencePosition(NamedTuple):
    """The position of a sequence and of its state.

    Attributes:
        batch: batch row.
        state: number of its state.
        has_state: whether it has one: rows past the last sequence are one more, which has none.
        start, stop: its first row in the batch row, and the row past its last.
        first_piece, stop_piece: its first piece in the batch row, and the piece past its last.
        gap: pieces minus tiles of CHUNK rows before it.
    """

    batch: Any
    state: Any
    has_state: Any
    start: Any
    stop: Any
    first_piece: Any
    stop_piece: Any
    gap: Any


@triton.jit
def find_sequence(cu, owner, sizes):
    """Returns the ``SequencePosition`` of a sequence, counted over all batch rows."""
    if cu is None:
        return SequencePosition(owner, owner, owner >= 0, 0, sizes.rows, 0, sizes.pieces, 0)
    else:
        batch = owner // (sizes.sequences + 1)
        sequence = (owner % (sizes.sequences + 1)).to(tl.int32)
        cu += batch * (sizes.sequences + 1)
        start = sequence_start(cu, sequence, sizes.sequences, sizes.rows)
        stop = sequence_start(cu, sequence + 1, sizes.sequences, sizes.rows)
        first, last, _ = pieces_of(cu, sequence, sizes.sequences, sizes.rows, sizes.CHUNK)
        state = batch * sizes.sequences + sequence
        has_state = sequence < sizes.sequences
        return SequencePosition(batch, state, has_state, start, stop, first, last, sequence)


@triton.jit
def find_program(sizes):
    """Returns (first column, head, number of the sequence) of a program of a scan."""
    across = (sizes.value_dim + sizes.COLUMNS - 1) // sizes.COLUMNS
    program = tl.program_id(0)
    column = program % across * sizes.COLUMNS
    head = program // across % sizes.heads
    return column, head, (program // across // sizes.heads).to(tl.int64)


class ChunkPosition(NamedTuple):
    """The position of a chunk of one head: ``ChunkRows``, and its number of all heads' chunks."""

    base: Any
    tokens: Any
    rows: Any
    number: Any


@triton.jit
def find_chunk_of_sequence(i, sequence, head, sizes, BACKWARDS: tl.constexpr):
    """Returns the ``ChunkPosition`` of a sequence's i-th chunk, with BACKWARDS from its end."""
    if BACKWARDS:
        piece = sequence.stop_piece - 1 - i
    else:
        piece = sequence.first_piece + i
    tile = piece - sequence.gap
    begin = tl.maximum(tile * sizes.CHUNK, sequence.start)
    rows = tl.minimum(sequence.stop, (tile + 1) * sizes.CHUNK) - begin
    tokens = tl.where(sequence.has_state, rows, 0)
    base = sequence.batch * sizes.rows + begin
    number = (sequence.batch * sizes.pieces + piece) * sizes.heads + head
    return ChunkPosition(base, tokens, rows, number)


@triton.jit
def load_key_rows(x, chunk, kv_head, sizes):
    """Loads the queries or keys ``[CHUNK, DIM]`` of a chunk, 0 past its tokens."""
    return load_rows(
        x, chunk.base, chunk.tokens, 0, kv_head, sizes.kv_heads, 0, sizes.dim, sizes.CHUNK,
        sizes.DIM, sizes.MAPS,
    )  # fmt: skip


@triton.jit
def load_value_rows(x, chunk, head, column, sizes):
    """Loads COLUMNS columns of rows like the values of a chunk, 0 past its tokens."""
    return load_rows(
        x, chunk.base, chunk.tokens, 0, head, sizes.heads, column, sizes.value_dim, sizes.CHUNK,
        sizes.COLUMNS, sizes.MAPS,
    )  # fmt: skip


@triton.jit
def store_value_rows(target, x, chunk, head, column, sizes):
    """Stores COLUMNS columns of all rows of a chunk, to an array like the values."""
    store_rows(
        target, x, chunk.base, chunk.rows, head, sizes.heads, column, sizes.value_dim, sizes.CHUNK,
        sizes.COLUMNS, sizes.MAPS,
    )  # fmt: skip


class StateTile(NamedTuple):
    """The columns of a state that a program of a scan has, ``[DIM, COLUMNS]``.

    Attributes:
        offset: of every element in the state.
        inside: whether it is one.
        size: elements of a state.
    """

    offset: Any
    inside: Any
    size: Any


@triton.jit
def find_state_tile(column, sizes):
    """Returns the ``StateTile`` of the columns that begin at ``column``."""
    d = tl.arange(0, sizes.DIM)[:, None]
    c = tl.arange(0, sizes.COLUMNS)[None, :]
    offset = column + d * sizes.value_dim + c
    inside = (d < sizes.dim) & (c < sizes.value_dim - column)
    return StateTile(offset, inside, sizes.dim * sizes.value_dim)


@triton.jit
def load_state_tile(states, offset, mask, sizes):
    """Loads a state ``[DIM, COLUMNS]`` in float32, zeros where none is given."""
    state = tl.zeros([sizes.DIM, sizes.COLUMNS], tl.float32)
    if states is not None:
        state = tl.load(states + offset, mask=mask, other=0.0).to(tl.float32)
    return state


@triton.jit
def load_factors(factors, number, token, sizes, FACTORS: tl.constexpr):
    """Loads the factors of the tokens of a chunk, see ``FACTORS``; None stands for ones."""
    if factors is None:
        ones = tl.full([sizes.CHUNK], 1.0, tl.float32)
        return ones, ones, ones
    else:
        factor = factors + number * (FACTORS * sizes.CHUNK) + token
        return tl.load(factor), tl.load(factor + sizes.CHUNK), tl.load(factor + 2 * sizes.CHUNK)


@triton.jit
def load_chunk_decay(decays, number, sizes, PER_CHANNEL: tl.constexpr):
    """Loads the decay of a chunk: a scalar, or with PER_CHANNEL ``[DIM, 1]``."""
    if PER_CHANNEL:
        d = tl.arange(0, sizes.DIM)[:, None]
        return tl.load(decays + number * sizes.dim + d, mask=d < sizes.dim, other=1.0)
    else:
        return tl.load(decays + number)


@triton.jit
def load_matrix(
    x, number, height, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MAPS: tl.constexpr
):
    """Loads a matrix of ``[count, height, width]``, padded with zeros."""
    if MAPS == POINTERS:
        row = tl.arange(0, HEIGHT)[:, None]
        column = tl.arange(0, WIDTH)[None, :]
        offset = number * height * width + row * width + column
        tile = tl.load(x + offset, mask=(row < height) & (column < width), other=0.0)
    else:
        tile = x.load([(number * height).to(tl.int32), 0])
    return tile


@triton.jit
def load_square(x, number, sizes):
    """Loads a matrix of ``[count, CHUNK, CHUNK]``."""
    return load_matrix(x, number, sizes.CHUNK, sizes.CHUNK, sizes.CHUNK, sizes.CHUNK, sizes.MAPS)

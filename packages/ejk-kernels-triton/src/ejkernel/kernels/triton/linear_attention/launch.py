"""Grids, sizes and loads of rows of all launches of linear attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ejkernel.kernels.triton.bound_launch import In, TensorMap, runs_map
from ejkernel.kernels.triton.common.sequences import lane_count, piece_count
from ejkernel.kernels.triton.language import tl
from ejkernel.kernels.triton.launch import BATCHED, Launch
from ejkernel.kernels.triton.linear_attention.problem import Problem
from ejkernel.kernels.triton.linear_attention.tiles import FULL, Tiles, maps_of, width
from ejkernel.kernels.triton.targets import Target

GATE_SUMS = ("high_sums", "low_sums", "gate_totals")  # results of ``gate_prefix_sums``
Operand = Any  # an operand of a launch; in a kernel a pointer or a descriptor


@dataclass(frozen=True)
class LinearLaunch(Launch):
    """Common to the kernels here; a batch row has its own rows, heads and packed sequences."""

    problem: Problem
    tiles: Tiles

    @property
    def pieces(self) -> int:
        """Segments of a batch row, empty ones included."""
        return piece_count(self.problem.rows, self.problem.sequences, self.tiles.segment)

    @property
    def segments(self) -> int:
        """Segments of all batch rows."""
        return self.problem.batch * self.pieces

    @property
    def chunks(self) -> int:
        """Chunks of all segments."""
        return self.segments * (self.tiles.segment // self.tiles.chunk)

    @property
    def lanes(self) -> int:
        """Sequences that a program looks at at once."""
        return lane_count(self.problem.sequences)

    @property
    def levels(self) -> int:
        """Halvings of a chunk down to single rows."""
        return self.tiles.chunk.bit_length() - 1

    @property
    def compute_dtype(self) -> Any:
        """Triton's type of the operands of a matmul."""
        return getattr(tl, self.problem.compute_dtype)

    @property
    def constant_stride(self) -> int:
        """Elements from one batch row of the operand ``constant`` to the next, 0 if shared."""
        rows, heads = self.shape("constant") or (1, 0)
        return heads if rows > 1 else 0

    def precision(self, target: Target) -> str:
        """Returns the precision of float32 matmuls."""
        return "tf32" if target.platform == "cuda" else "ieee"

    def rows_of(
        self, name: str, heads: int, columns: int, block: int, maps: int
    ) -> In | TensorMap | None:
        """Returns an operand ``[batch, rows, heads, columns]`` as ``rows.load_rows`` takes it.

        It is loaded by ``block`` columns of a chunk.
        """
        p, operand = self.problem, self.operand(name)
        if operand is None or not maps:
            return operand
        if maps == FULL:
            shape = (p.batch * p.rows, heads * columns)
            return TensorMap(operand.index, shape, (self.tiles.chunk, block))
        return runs_map(operand.index, heads * columns, (self.tiles.chunk, block))


class ChunkInputs(NamedTuple):
    """Rows of q, k, v, do of all heads and sums of their gates, sizes, and how rows are loaded."""

    query: Operand
    key: Operand
    value: Operand
    dout: Operand
    high_sums: Operand
    low_sums: Operand
    gate_totals: Operand
    rows: int
    heads: int
    kv_heads: int
    dim: int
    columns: int
    sequences: int
    pieces: int
    scale: float
    REVERSED: bool
    CHUNK: int
    SEGMENT: int
    DIM: int
    COLUMNS: int
    LANES: int
    MAPS: int
    DTYPE: Any
    PRECISION: str


@dataclass(frozen=True)
class ScalarGradientLaunch(LinearLaunch):
    """A kernel that reads q, k, v, do and sums of one log decay a row and head."""

    batching = dict.fromkeys(("query", "key", "value", "dout", *GATE_SUMS, "cu"), BATCHED)

    def chunk_inputs(self, target: Target, block: int) -> ChunkInputs:
        """Returns the operands that such kernels share; values are loaded by ``block`` columns."""
        p, t = self.problem, self.tiles
        key, value = (p.dim, width(p.dim)), (p.value_dim, block)
        maps = maps_of(p, t.chunk, (key, value), target)
        return ChunkInputs(
            query=self.rows_of("query", p.heads, *key, maps),
            key=self.rows_of("key", p.kv_heads, *key, maps),
            value=self.rows_of("value", p.kv_heads, *value, maps),
            dout=self.rows_of("dout", p.heads, *value, maps),
            high_sums=self.operand("high_sums"),
            low_sums=self.operand("low_sums"),
            gate_totals=self.operand("gate_totals"),
            rows=p.rows,
            heads=p.heads,
            kv_heads=p.kv_heads,
            dim=p.dim,
            columns=p.value_dim,
            sequences=p.sequences,
            pieces=self.pieces,
            scale=float(p.scale),
            REVERSED=p.reverse,
            CHUNK=t.chunk,
            SEGMENT=t.segment,
            DIM=width(p.dim),
            COLUMNS=block,
            LANES=self.lanes,
            MAPS=maps,
            DTYPE=self.compute_dtype,
            PRECISION=self.precision(target),
        )

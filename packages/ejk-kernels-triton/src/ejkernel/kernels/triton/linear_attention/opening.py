"""What kernels are launched with, whatever they make of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from ejkernel.kernels.triton.bound_launch import In
from ejkernel.kernels.triton.common.pieces import lane_count, piece_count
from ejkernel.kernels.triton.language import tl
from ejkernel.kernels.triton.linear_attention.problem import Problem
from ejkernel.kernels.triton.linear_attention.rows import row_operand
from ejkernel.kernels.triton.linear_attention.tiles import Tiles, maps_of, width
from ejkernel.kernels.triton.plan import filled
from ejkernel.kernels.triton.targets import Target

Given = Any  # an operand of a launch; in a kernel a pointer or a descriptor


def kernel_params(p: Problem, t: Tiles, target: Target) -> dict[str, Any]:
    """Numbers and constants of a call, which kernels ask for by these names."""
    return {
        "rows": p.rows,
        "heads": p.heads,
        "kv_heads": p.kv_heads,
        "dim": p.dim,
        "columns": p.value_dim,
        "sequences": p.sequences,
        "pieces": piece_count(p.rows, p.sequences, t.segment),
        "scale": float(p.scale),
        "REVERSED": p.reverse,
        "CHUNK": t.chunk,
        "SEGMENT": t.segment,
        "DIM": width(p.dim),
        "LANES": lane_count(p.sequences),
        "LEVELS": t.chunk.bit_length() - 1,
        "OPERAND": getattr(tl, p.operand),
        "PRECISION": "tf32" if target.platform == "cuda" else "ieee",
    }


class Opening(NamedTuple):
    """Rows of q, k, v, do of all heads and sums of their gates, sizes, and how rows are read.

    Fields in capitals are constants of a compiled kernel.
    """

    query: Given
    key: Given
    value: Given
    dout: Given
    high_sums: Given
    low_sums: Given
    gate_totals: Given
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
    OPERAND: Any
    PRECISION: str


def opening(p: Problem, t: Tiles, target: Target, block: int) -> Opening:
    """Operands 0 to 3 are q, k, v, do, then come the sums where there are gates; values are read by
    ``block`` columns."""
    dim, columns = (p.dim, width(p.dim)), (p.value_dim, block)
    maps = maps_of(p, t.chunk, (dim, columns), target)
    heads = (p.heads, p.kv_heads, p.kv_heads, p.heads)
    rows = (
        row_operand(i, p, t.chunk, count, *size, maps)
        for i, (count, size) in enumerate(zip(heads, (dim, dim, columns, columns), strict=True))
    )
    known = kernel_params(p, t, target) | {"COLUMNS": block, "MAPS": maps}
    return filled(Opening, known, *rows, *(In(4 + i) if p.scalar else None for i in range(3)))

"""What kernels that read q, k, v and do of one head are launched with, whatever they make of it."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from ejkernel.kernels.triton.common.sequences import lane_count, piece_count
from ejkernel.kernels.triton.linear_attention.problem import Problem
from ejkernel.kernels.triton.linear_attention.rows import maps_of, row_operand
from ejkernel.kernels.triton.linear_attention.tiles import Tiles, width
from ejkernel.kernels.triton.targets import Target

ROWS = ("query", "key", "value", "dout")


def opening(
    p: Problem, t: Tiles, target: Target, block: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments, constants): operands 0 to 3 are ROWS, those of values read by ``block``
    columns."""
    dim, columns = (p.dim, width(p.dim)), (p.value_dim, block)
    maps = maps_of(p, t.chunk, (dim, columns), target)
    heads = (p.heads, p.kv_heads, p.kv_heads, p.heads)
    arguments: dict[str, Any] = {
        name: row_operand(i, p, t.chunk, count, *size, maps)
        for i, (name, count, size) in enumerate(
            zip(ROWS, heads, (dim, dim, columns, columns), strict=True)
        )
    }
    arguments |= {
        "rows": p.rows,
        "heads": p.heads,
        "kv_heads": p.kv_heads,
        "dim": p.dim,
        "columns": p.value_dim,
        "sequences": p.sequences,
        "pieces": piece_count(p.rows, p.sequences, t.segment),
        "scale": float(p.scale),
    }
    constants = {
        "REVERSED": p.reverse,
        "CHUNK": t.chunk,
        "SEGMENT": t.segment,
        "DIM": dim[1],
        "COLUMNS": block,
        "LANES": lane_count(p.sequences),
        "MAPS": maps,
        "OPERAND": getattr(tl, p.operand),
        "PRECISION": "tf32" if target.platform == "cuda" else "ieee",
    }
    return arguments, constants

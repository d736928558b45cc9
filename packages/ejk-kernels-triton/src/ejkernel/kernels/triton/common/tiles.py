"""Reading and writing tiles of ``[tokens, heads * dim]`` arrays.

A head dim is held as one power of two, or as two (80 = 64 + 16, 192 = 128 + 64): the second is
the *rest*. Only dims with more than two bits set are padded, and then columns are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(
    source,
    token,
    first,
    length,
    column,
    stride,
    used,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
    CHECK_COLUMNS: tl.constexpr,
):
    """Rows first .. first + ROWS of the sequence that starts at ``token``, from ``column`` on.

    ``source`` is a pointer or, with TMA, a descriptor whose block is [ROWS, COLUMNS]. Rows at or
    past ``length`` and columns at or past ``used`` read as 0 where they are checked; a descriptor
    checks neither (the rows that follow belong to the next sequence).
    """
    if TMA:
        tile = source.load([(token + first).to(tl.int32), column])
    else:
        row = tl.arange(0, ROWS)
        col = tl.arange(0, COLUMNS)
        base = source + (token + first).to(tl.int64) * stride + column
        pointers = base + row[:, None] * stride + col[None, :]
        rows_inside = (first + row < length)[:, None]
        columns_inside = (col < used)[None, :]
        if CHECK_ROWS and CHECK_COLUMNS:
            tile = tl.load(pointers, mask=rows_inside & columns_inside, other=0.0)
        elif CHECK_ROWS:
            tile = tl.load(pointers, mask=rows_inside, other=0.0)
        elif CHECK_COLUMNS:
            tile = tl.load(pointers, mask=columns_inside, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(
    target,
    value,
    token,
    first,
    length,
    column,
    stride,
    used,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The inverse of ``load_tile`` by pointer; always checked."""
    row = tl.arange(0, ROWS)
    col = tl.arange(0, COLUMNS)
    base = target + (token + first).to(tl.int64) * stride + column
    pointers = base + row[:, None] * stride + col[None, :]
    inside = (first + row < length)[:, None] & (col < used)[None, :]
    tl.store(pointers, value.to(target.dtype.element_ty), mask=inside)

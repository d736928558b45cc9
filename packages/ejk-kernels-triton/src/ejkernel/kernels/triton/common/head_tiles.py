"""Loads and stores of tiles of ``[tokens, heads * dim]`` arrays, and their matmuls.

A head dim is one power of two or the sum of two (80 = 64 + 16, 192 = 128 + 64): its *parts*, with
one tile each. Only dims with more than two bits set are padded, and then columns are masked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ejkernel.kernels.triton.language import tl, triton


class TilePosition(NamedTuple):
    """Rows of the sequence that starts at ``token``, in one of ``heads`` heads."""

    token: Any
    length: Any
    head: Any
    heads: Any


@triton.jit
def load_tile(source, PART: tl.constexpr, position, first, CHECK: tl.constexpr):
    """Loads a part of rows first .. first + source.ROWS; ``source``: see ``Heads``.

    CHECK: rows past the end of the sequence read as 0. Padding columns always do.
    """
    column = position.head * source.ALL + source.PARTS[PART].FIRST
    row = tl.arange(0, source.ROWS)
    if source.STRIDE:
        tile = _load_transposed(source, PART, position, first, CHECK)
    elif source.TMA:
        # TMA reads on into the next sequence, and 0 * inf is NaN
        tile = source.arrays[PART].load([(position.token + first).to(tl.int32), column])
        if CHECK:
            tile = tl.where((first + row < position.length)[:, None], tile, 0.0)
    else:
        stride = position.heads * source.ALL
        col = tl.arange(0, source.PARTS[PART].WIDTH)
        base = source.arrays[PART] + (position.token + first).to(tl.int64) * stride + column
        pointers = base + row[:, None] * stride + col[None, :]
        rows_inside = (first + row < position.length)[:, None]
        columns_inside = (col < source.PARTS[PART].USED)[None, :]
        if CHECK and source.PARTS[PART].PADDED:
            tile = tl.load(pointers, mask=rows_inside & columns_inside, other=0.0)
        elif CHECK:
            tile = tl.load(pointers, mask=rows_inside, other=0.0)
        elif source.PARTS[PART].PADDED:
            tile = tl.load(pointers, mask=columns_inside, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def _load_transposed(source, PART: tl.constexpr, position, first, CHECK: tl.constexpr):
    """Loads rows of an array whose tokens are innermost, as 8-bit matmuls sum over them."""
    PADDED: tl.constexpr = source.PARTS[PART].PADDED
    row, col = tl.arange(0, source.ROWS), tl.arange(0, source.PARTS[PART].WIDTH)
    # ``position.token`` is a multiple of the length
    head = (position.token // position.length) * position.heads + position.head
    columns = head * source.ALL + source.PARTS[PART].FIRST + col
    pointers = source.arrays[PART] + columns[:, None] * source.STRIDE + (first + row)[None, :]
    rows_inside = (first + row < position.length)[None, :]
    columns_inside = (col < source.PARTS[PART].USED)[:, None]
    if CHECK and PADDED:
        tile = tl.load(pointers, mask=rows_inside & columns_inside, other=0.0)
    elif CHECK:
        tile = tl.load(pointers, mask=rows_inside, other=0.0)
    elif PADDED:
        tile = tl.load(pointers, mask=columns_inside, other=0.0)
    else:
        tile = tl.load(pointers)
    return tl.trans(tile)


@triton.jit
def load_tiles(source, position, first, CHECK: tl.constexpr):
    """Loads all parts, see ``load_tile``."""
    tiles = ()
    for n in tl.static_range(len(source.PARTS)):
        tiles += (load_tile(source, n, position, first, CHECK),)
    return tiles


@triton.jit
def matmul_parts(a, b, source, position, first, CHECK: tl.constexpr, PRECISION: tl.constexpr):
    """Returns a b^T of two heads in parts, and b with its missing parts.

    These are loaded here, during the previous matmul: loading all first would take registers.
    """
    s = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    for n in tl.static_range(1, len(a)):
        if n == len(b):
            b += (load_tile(source, n, position, first, CHECK),)
        s = tl.dot(a[n], tl.trans(b[n]), s, input_precision=PRECISION)
    return s, b


@triton.jit
def add_matmul_parts(
    acc, p, b, source, position, first, CHECK: tl.constexpr, PRECISION: tl.constexpr
):
    """Returns acc + p b of a head in parts; loads missing parts of b as ``matmul_parts`` does."""
    new = ()
    for n in tl.static_range(len(acc)):
        if n == len(b):
            b += (load_tile(source, n, position, first, CHECK),)
        new += (tl.dot(p, b[n], acc[n], input_precision=PRECISION),)
    return new


@triton.jit
def zero_tiles(source, ROWS: tl.constexpr):
    """Returns zeroed accumulators of ROWS rows with the parts of ``source``."""
    return [tl.zeros([ROWS, part.WIDTH], tl.float32) for part in source.PARTS]


@triton.jit
def store_tile(target, tile, source, PART: tl.constexpr, position, first):
    """Stores a tile by pointer to an array like ``source``; always checks rows and columns."""
    row = tl.arange(0, tile.shape[0])
    col = tl.arange(0, source.PARTS[PART].WIDTH)
    stride = position.heads * source.ALL
    column = position.head * source.ALL + source.PARTS[PART].FIRST
    base = target + (position.token + first).to(tl.int64) * stride + column
    pointers = base + row[:, None] * stride + col[None, :]
    inside = (first + row < position.length)[:, None] & (col < source.PARTS[PART].USED)[None, :]
    tl.store(pointers, tile.to(target.dtype.element_ty), mask=inside)


@triton.jit
def store_tiles(target, tiles, source, position, first):
    """Stores all parts, see ``store_tile``."""
    for n in tl.static_range(len(source.PARTS)):
        store_tile(target, tiles[n], source, n, position, first)

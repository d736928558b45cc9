"""Reading and writing tiles of ``[tokens, heads * dim]`` arrays, and products of them.

A head dim is held as one power of two, or as two (80 = 64 + 16, 192 = 128 + 64): its *parts*, for
which there is a tuple of tiles. Only dims with more than two bits set are padded, and then columns
are masked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ejkernel.kernels.triton.language import tl, triton


class Place(NamedTuple):
    """Where rows are: those of the sequence that starts at ``token``, of one of ``heads`` heads."""

    token: Any
    length: Any
    head: Any
    heads: Any


@triton.jit
def load_tile(source, PART: tl.constexpr, place, first, CHECK: tl.constexpr):
    """A part of rows first .. first + source.ROWS at a ``Place``; ``source``: see ``Heads``.

    CHECK: rows past the last of the sequence read as 0. Columns that are not there always do.
    """
    column = place.head * source.ALL + source.PARTS[PART].FIRST
    row = tl.arange(0, source.ROWS)
    if source.TMA:
        # a descriptor reads on into the next sequence, and 0 * inf is not 0
        tile = source.arrays[PART].load([(place.token + first).to(tl.int32), column])
        if CHECK:
            tile = tl.where((first + row < place.length)[:, None], tile, 0.0)
    else:
        stride = place.heads * source.ALL
        col = tl.arange(0, source.PARTS[PART].WIDTH)
        base = source.arrays[PART] + (place.token + first).to(tl.int64) * stride + column
        pointers = base + row[:, None] * stride + col[None, :]
        rows_inside = (first + row < place.length)[:, None]
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
def load_tiles(source, place, first, CHECK: tl.constexpr):
    """All parts, see ``load_tile``."""
    tiles = ()
    for n in tl.static_range(len(source.PARTS)):
        tiles += (load_tile(source, n, place, first, CHECK),)
    return tiles


@triton.jit
def products(a, b, source, place, first, CHECK: tl.constexpr, PRECISION: tl.constexpr):
    """a b^T of two heads in parts, and b with the parts that it has not yet.

    Those are read here, beside the product before: where all are read first, they take registers.
    """
    s = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    for n in tl.static_range(1, len(a)):
        if n == len(b):
            b += (load_tile(source, n, place, first, CHECK),)
        s = tl.dot(a[n], tl.trans(b[n]), s, input_precision=PRECISION)
    return s, b


@triton.jit
def add_products(sums, p, b, source, place, first, CHECK: tl.constexpr, PRECISION: tl.constexpr):
    """sums + p b of a head in parts, those of b that it has not yet as in ``products``."""
    new = ()
    for n in tl.static_range(len(sums)):
        if n == len(b):
            b += (load_tile(source, n, place, first, CHECK),)
        new += (tl.dot(p, b[n], sums[n], input_precision=PRECISION),)
    return new


@triton.jit
def zero_tiles(source, ROWS: tl.constexpr):
    """What sums start from: ROWS rows of a head like those of ``source``."""
    return [tl.zeros([ROWS, part.WIDTH], tl.float32) for part in source.PARTS]


@triton.jit
def store_tile(target, tile, source, PART: tl.constexpr, place, first):
    """The inverse of ``load_tile`` by pointer, to an array like ``source``; always checked."""
    row = tl.arange(0, tile.shape[0])
    col = tl.arange(0, source.PARTS[PART].WIDTH)
    stride = place.heads * source.ALL
    column = place.head * source.ALL + source.PARTS[PART].FIRST
    base = target + (place.token + first).to(tl.int64) * stride + column
    pointers = base + row[:, None] * stride + col[None, :]
    inside = (first + row < place.length)[:, None] & (col < source.PARTS[PART].USED)[None, :]
    tl.store(pointers, tile.to(target.dtype.element_ty), mask=inside)


@triton.jit
def store_tiles(target, tiles, source, place, first):
    """All parts, see ``store_tile``."""
    for n in tl.static_range(len(source.PARTS)):
        store_tile(target, tiles[n], source, n, place, first)

"""Chunks of segments, and the rows of one head of ``[rows, heads, columns]`` in them.

They come through the copy engine where the chip has one: addresses of tiles would take the
registers that states need. Rows past a run read as 0: where runs are full chunks nothing has to be
done for that, otherwise the descriptor is one of runs (``bound_launch.runs_map``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ejkernel.kernels.triton.bound_launch import MAP_ROWS as _MAP_ROWS
from ejkernel.kernels.triton.common.sequences import find_segment
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.linear_attention import tiles

MAP_ROWS = tl.constexpr(_MAP_ROWS)
POINTERS, FULL, RUN = (tl.constexpr(i) for i in (tiles.POINTERS, tiles.FULL, tiles.RUN))


class ChunkOfSegment(NamedTuple):
    """The position of a chunk in its segment.

    Attributes:
        base: first row of the segment, counted over all batch rows. Chunks past the segment may
            not even start in the array: then the first row of the segment less ``at``.
        length: rows of the segment that are in use.
        at: first row of the chunk in the segment.
        row: first row of the chunk, counted over all batch rows.
        size: rows of the segment, also those not in use.
    """

    base: Any
    length: Any
    at: Any
    row: Any
    size: Any


@triton.jit
def find_chunk(
    cu, slot, sizes, CHUNK: tl.constexpr, SEGMENT: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Returns the position of chunk ``slot``, counted over all segments."""
    segment = slot // (SEGMENT // CHUNK)
    at = (slot % (SEGMENT // CHUNK)).to(tl.int32) * CHUNK
    batch, begin, end, used = find_segment(
        cu, segment, sizes.pieces, sizes.rows, sizes.sequences, SEGMENT, LANES
    )
    length = used - begin
    base = batch * sizes.rows + begin
    row = base + at
    base = tl.where(at < length, base, base - at)
    return ChunkOfSegment(base, length, at, row, end - begin)


class HeadRows(NamedTuple):
    """The rows of one of the ``heads`` of an array ``[rows, heads, columns]`` or its descriptor."""

    array: Any
    head: Any
    heads: Any
    columns: Any


@triton.jit
def load_chunk_rows(
    rows, chunk, column, CHUNK: tl.constexpr, WIDTH: tl.constexpr, MAPS: tl.constexpr
):
    """Loads WIDTH columns of ``HeadRows`` at ``column``, in a ``ChunkOfSegment``: ``load_rows``."""
    return load_rows(
        rows.array, chunk.base, chunk.length, chunk.at, rows.head, rows.heads, column, rows.columns,
        CHUNK, WIDTH, MAPS,
    )  # fmt: skip


@triton.jit
def store_chunk_rows(
    rows, x, chunk, column, CHUNK: tl.constexpr, WIDTH: tl.constexpr, MAPS: tl.constexpr
):
    """Stores what ``load_chunk_rows`` loads, and the rows that are not in use."""
    store_rows(
        rows.array, x, chunk.row, chunk.size - chunk.at, rows.head, rows.heads, column,
        rows.columns, CHUNK, WIDTH, MAPS,
    )  # fmt: skip


@triton.jit
def load_rows(
    source,
    base,
    length,
    at,
    head,
    heads,
    column,
    columns,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    MAPS: tl.constexpr,
):
    """Loads ROWS rows of a run at row ``at``, and WIDTH columns at ``column``.

    The run has ``length`` rows and starts at row ``base``. Elements past the run or past
    ``columns`` read as 0.
    """
    if MAPS == FULL:
        tile = source.load([(base + at).to(tl.int32), head * columns + column])
    elif MAPS == RUN:
        end = (base + length).to(tl.int32)
        tile = source.load([MAP_ROWS, end, at - length + MAP_ROWS, head * columns + column])
        tile = tl.reshape(tile, (ROWS, WIDTH))
    else:
        row = tl.arange(0, ROWS)[:, None]
        c = tl.arange(0, WIDTH)[None, :]
        # only the first address has 64 bits
        source += ((base + at) * heads + head) * columns + column
        inside = (row < length - at) & (c < columns - column)
        tile = tl.load(source + row * (heads * columns) + c, mask=inside, other=0.0)
    return tile


@triton.jit
def store_rows(
    target,
    x,
    row,
    count,
    head,
    heads,
    column,
    columns,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    MAPS: tl.constexpr,
):
    """Stores ``count`` rows at ``row``, as far as they have columns."""
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, WIDTH)[None, :]
    target += (row * heads + head) * columns + column
    target += r * (heads * columns) + c
    x = x.to(target.dtype.element_ty)
    if MAPS == FULL:
        tl.store(target, x)
    else:
        tl.store(target, x, mask=(r < count) & (c < columns - column))

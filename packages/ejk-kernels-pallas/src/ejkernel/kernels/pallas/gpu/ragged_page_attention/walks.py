"""The queue of tiles: which one a number of it is.

Programs take one tile of one query head after the other. Which tiles there are, from starts and
lengths that only the device knows, and in which order the schedule says (``WorkTile``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel.types.serving.schedule import DecodeRow, WorkTile, columns_of

TILE = columns_of(WorkTile)
DECODE = columns_of(DecodeRow)


def tile_of(number: Any, line: Callable[[Any, int], Any], last: int, heads: int) -> tuple[Any, ...]:
    """(query head, sequence, row, first, last, length) of a number of the queue.

    ``line(m, column)`` is the queue, ``last`` its last line. The head is -1 past the last tile.
    """
    m = jnp.minimum(lax.div(number, heads), last)
    before, tiles, some = (line(m, c) for c in (TILE.tiles_before, TILE.tiles, TILE.heads))
    inside = number - before * heads
    each = jnp.maximum(tiles * some, 1)
    group = lax.div(inside, each)
    inside = inside - group * each
    m = jnp.minimum(before + lax.div(inside, some), last)
    head = jnp.where(tiles > 0, group * some + lax.rem(inside, some), -1)
    columns = (TILE.sequence, TILE.row, TILE.first_row, TILE.end_row, TILE.kv_len)
    return (head, *(line(m, column) for column in columns))

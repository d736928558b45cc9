"""The queue of tiles: which one a number of it is.

Programs take one tile of one query head after the other. Which tiles there are, from starts and
lengths that only the device knows, and in which order the schedule says (``LongRows``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

SEQUENCE, ROW, FIRST, LAST, LENGTH, BEFORE, TILES, HEADS = range(8)  # of a line of the queue
OWN_ROW, OWN_LENGTH, PROGRAMS = range(3)  # of a line of decoded sequences


def tile_of(number: Any, line: Callable[[Any, int], Any], last: int, heads: int) -> tuple[Any, ...]:
    """(query head, sequence, row, first, last, length) of a number of the queue.

    ``line(m, column)`` is the queue, ``last`` its last line. The head is -1 past the last tile.
    """
    m = jnp.minimum(lax.div(number, heads), last)
    before, tiles, some = line(m, BEFORE), line(m, TILES), line(m, HEADS)
    inside = number - before * heads
    each = jnp.maximum(tiles * some, 1)
    group = lax.div(inside, each)
    inside = inside - group * each
    m = jnp.minimum(before + lax.div(inside, some), last)
    head = jnp.where(tiles > 0, group * some + lax.rem(inside, some), -1)
    return (head, *(line(m, column) for column in (SEQUENCE, ROW, FIRST, LAST, LENGTH)))

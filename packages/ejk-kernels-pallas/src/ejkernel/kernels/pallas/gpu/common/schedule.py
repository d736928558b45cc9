"""Which tiles a multiprocessor computes, and which key blocks each tile visits.

A persistent kernel starts one program a multiprocessor. Tiles are numbered so that those of one
group of heads, whose keys and values fit the L2 cache together, follow each other, the longest
first under a causal mask; the programs take them in waves, every other wave in reverse order, so
that each program's sum comes out nearly the same.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.types.structure import Band

Scalar = jax.Array | int


class Tile(NamedTuple):
    """One query block and the key blocks it visits: [start, stop), from the last to the first.

    Blocks in [full_start, full_stop) are visible to every row.
    """

    batch: Scalar
    head: Scalar
    block: Scalar
    start: Scalar
    full_start: Scalar
    full_stop: Scalar
    stop: Scalar

    def masked(self, j: Scalar) -> jax.Array:
        return (j < self.full_start) | (j >= self.full_stop)


def tiles_of(program: Scalar, programs: int, tiles: int) -> jax.Array:
    """How many tiles a program computes."""
    whole, rest = divmod(tiles, programs)
    # the last wave is short: it goes to the first programs, or to the last if it runs in reverse
    extra = program < rest if whole % 2 == 0 else program >= programs - rest
    return whole + jnp.asarray(extra, jnp.int32)


def tile_number(i: Scalar, program: Scalar, programs: int) -> jax.Array:
    """Number of the i-th tile of a program."""
    reverse = lax.rem(i, 2)
    return i * programs + jnp.where(reverse == 1, programs - 1 - program, program)


def locate(number: Scalar, rows: int, blocks: int, group: int) -> tuple[jax.Array, jax.Array]:
    """(row, block): the row of batch and head, and its query block, longest first in a group.

    ``rows`` is batch * heads, ``group`` how many of them are worked on together.
    """
    per_group = group * blocks
    first = lax.div(number, per_group) * group
    size = jnp.minimum(group, rows - first)  # the last group may be smaller
    rest = lax.rem(number, per_group)
    return first + lax.rem(rest, size), blocks - 1 - lax.div(rest, size)


def band_blocks(first: Scalar, last: Scalar, length: int, band: Band, block: int):
    """(start, full_start, full_stop, stop) of the key blocks seen from rows first..last.

    At least one block is visited; what it hides is masked.
    """
    blocks = -(-length // block)
    start: Scalar = 0
    full_start: Scalar = 0
    stop: Scalar = blocks
    full_stop: Scalar = length // block
    if band.lo is not None:
        start = lax.div(jnp.maximum(first + band.lo, 0), block)
        full_start = lax.div(jnp.maximum(last + band.lo, 0) + block - 1, block)
    if band.hi is not None:
        stop = jnp.minimum(blocks, lax.div(jnp.maximum(last + band.hi + block, 0), block))
        full_stop = jnp.minimum(full_stop, lax.div(jnp.maximum(first + band.hi + 1, 0), block))
    stop = jnp.maximum(jnp.asarray(stop, jnp.int32), 1)
    start = jnp.minimum(jnp.asarray(start, jnp.int32), stop - 1)
    return start, jnp.asarray(full_start, jnp.int32), jnp.asarray(full_stop, jnp.int32), stop

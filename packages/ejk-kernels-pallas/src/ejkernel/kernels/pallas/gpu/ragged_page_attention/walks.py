"""Which tiles the kernel on pages computes, and in which order, from starts and lengths that only
the device knows.

Programs take one tile of one query head after the other from a queue. Its order is that of what
they read: sequence by sequence, that with the longest walk first; of a sequence as many key heads
at a time as the near L2 holds, and of these tile by tile, the longest first. So the programs that
run together read the same keys, and the last ones taken are short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.pallas.gpu.common.tma import GROUP

NEAR = 16 << 20  # bytes of keys and values that programs walk over together
SEQUENCE, ROW, FIRST, LAST, LENGTH, BEFORE, TILES, HEADS = range(8)  # of a line of the queue
OWN_ROW, OWN_LENGTH, PROGRAMS = range(3)  # of a line of decoded sequences
EARLY = 2.0  # programs that decode, over those that would take as long as all others


class Sizes(NamedTuple):
    """``most`` tiles; rows and keys of blocks; heads of queries and keys; bytes of a token and key
    head; ``programs`` of the launch."""

    most: int
    block_q: int
    block_kv: int
    heads: int
    kv_heads: int
    token_bytes: int
    programs: int


def most_tiles(rows: int, sequences: int, least: int, block_q: int) -> int:
    """Tiles of any mix of sequences of at least ``least`` rows: one more for either end."""
    return rows // block_q + 2 * min(sequences, rows // least)


def walks(
    first: jax.Array, last: jax.Array, length: jax.Array, long: jax.Array, alone: jax.Array,
    sizes: Sizes,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(the queue, int32 ``[most + 1, 8]``; decoded sequences, int32 ``[n, 3]``).

    Of sequences that are ``long``, rows first .. last; a tile begins at a multiple of 8 rows. A
    line of the queue is a tile: sequence, row, first and last row of the sequence, its length;
    tiles before its sequence and of it; query heads that are worked on together. Lines without a
    tile have TILES 0, and so has the last. Sequences that are ``alone`` have one row: this, its
    length, 0 for all others, and how many programs decode.
    """
    block_q, block_kv = sizes.block_q, sizes.block_kv
    begin = first // GROUP * GROUP
    mine = jnp.where(long, -(-(last - begin) // block_q), 0)
    blocks = -(-length // block_kv)
    n = jnp.arange(len(first), dtype=jnp.int32)
    # the numbers of each sequence along the last axis, sums over all sequences
    longer = (blocks[:, None] > blocks) | ((blocks[:, None] == blocks) & (n[:, None] < n))
    before = jnp.sum(jnp.where(longer, mine[:, None], 0), axis=0, dtype=jnp.int32)
    walked = sizes.heads * mine * (blocks - 0.5 * mine + 1.0)
    decoded = jnp.where(alone, 0.5 * sizes.kv_heads * blocks, 0.0)
    share = jnp.sum(decoded) / jnp.maximum(jnp.sum(decoded + walked), 1.0)
    programs = jnp.ceil(EARLY * sizes.programs * share).astype(jnp.int32)
    programs = jnp.minimum(programs, sizes.programs)

    m = jnp.arange(sizes.most + 1, dtype=jnp.int32)[:, None]
    inside = (before <= m) & (m < before + mine)
    sequence = jnp.sum(jnp.where(inside, n, 0), axis=1, dtype=jnp.int32)
    some = jnp.any(inside, axis=1)
    together = jnp.ones_like(length)
    for k in range(2, sizes.kv_heads + 1):
        if sizes.kv_heads % k == 0:
            together = jnp.where(length <= NEAR // (k * sizes.token_bytes), k, together)
    tile = (mine + before)[sequence] - 1 - m[:, 0]
    columns = [
        sequence, begin[sequence] + tile * block_q, first[sequence], last[sequence],
        length[sequence], before[sequence], jnp.where(some, mine[sequence], 0),
        (together * (sizes.heads // sizes.kv_heads))[sequence],
    ]  # fmt: skip
    own = [first, jnp.where(alone, length, 0), jnp.broadcast_to(programs, first.shape)]
    return jnp.stack(columns, axis=1), jnp.stack(own, axis=1)


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

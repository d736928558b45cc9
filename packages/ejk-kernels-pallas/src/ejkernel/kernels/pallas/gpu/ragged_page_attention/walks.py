"""Which tiles the kernel on pages computes, from starts and lengths that only the device knows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.gpu.common.tma import GROUP


def most_tiles(rows: int, sequences: int, least: int, block_q: int) -> int:
    """Tiles of any mix of sequences of at least ``least`` rows: one more for either end."""
    return rows // block_q + 2 * min(sequences, rows // least)


def walks(
    first: jax.Array, last: jax.Array, length: jax.Array, long: jax.Array,
    *, most: int, block_q: int, block_kv: int,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(tiles int32 ``[most, 5]``, the longest first; how many there are up to each
    sequence, ``[n]``).

    Of sequences that are ``long``, rows first .. last; a tile begins at a multiple of 8 rows. Its
    numbers: sequence, row, first and last row of the sequence, its length.
    """
    begin = first // GROUP * GROUP
    mine = jnp.where(long, -(-(last - begin) // block_q), 0)
    until = jnp.cumsum(mine, dtype=jnp.int32)
    m = jnp.arange(most, dtype=jnp.int32)
    sequence = jnp.sum(until <= m[:, None], axis=1, dtype=jnp.int32)
    sequence = jnp.minimum(sequence, len(first) - 1)
    first, last, length = first[sequence], last[sequence], length[sequence]
    row = begin[sequence] + (m - (until - mine)[sequence]) * block_q
    end = length - last + row + jnp.minimum(last - row, block_q)
    blocks = jnp.where(m < until[-1], jnp.maximum(-(-end // block_kv), 1), 0)
    # tiles of one length stay in their order: neighbours walk over the same keys
    longer = (blocks > blocks[:, None]) | ((blocks == blocks[:, None]) & (m < m[:, None]))
    place = jnp.sum(longer, axis=1, dtype=jnp.int32)
    tiles = jnp.stack([sequence, row, first, last, length], axis=1)
    ordered = jnp.zeros_like(tiles).at[place].set(tiles, unique_indices=True)
    return ordered, until

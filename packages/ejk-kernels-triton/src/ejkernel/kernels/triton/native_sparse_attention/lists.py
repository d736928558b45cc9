"""The blocks that tokens select, and the tokens that select a block."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.types.masks.token_blocks import Blocks

INT32 = 2**31

ROWS = 16
"""Rows that are sorted one by one: XLA sorts a single row by digits, in a quarter of the time."""


def ended(chosen: jax.Array) -> jax.Array:
    """Lists ``[b, s, hk, slots]`` with what is no block, -1, behind all blocks."""
    return jnp.flip(jnp.sort(chosen, axis=-1), axis=-1)


def last_tokens(blocks: Blocks) -> jax.Array:
    """One past the last token of every block ``[n]``; unused blocks have none."""
    length, count = blocks.sequence.shape[0], blocks.count
    number = jnp.where(blocks.sequence >= 0, number_of(blocks), count)
    token = jnp.arange(length, dtype=jnp.int32)
    ends = jnp.zeros((count,), jnp.int32)
    return ends.at[number].max(token + 1, mode="drop")


def number_of(blocks: Blocks) -> jax.Array:
    """Of every token ``[s]`` the number of its block among those of all sequences."""
    return blocks.first_block + blocks.position // blocks.size


def transposed(chosen: jax.Array, blocks: Blocks) -> tuple[jax.Array, jax.Array]:
    """(places ``[b, hk, s * slots]`` by the block that is there, bounds ``[b, hk, n + 1]``).

    The place of slot i of token t is t * n + i, n the power of two that holds all slots. Places of
    a block rise; entries behind the last bound are none. ``chosen [b, s, hk, slots]``, each block
    once in a list, -1 = none.
    """
    b, s, hk, slots = chosen.shape
    number = blocks.first_block[None, :, None, None] + chosen
    number = jnp.where(chosen >= 0, number, blocks.count)
    number = jnp.moveaxis(number, 2, 1).reshape(b, hk, s * slots)
    each = power_of_two(slots)
    place = (jnp.arange(s)[:, None] * each + jnp.arange(slots)[None]).astype(jnp.int32).reshape(-1)
    place = jnp.broadcast_to(place, number.shape)
    if (blocks.count + 1) * s * each < INT32:  # one number sorts faster than two
        number, place = jnp.divmod(*_sorted(number * (s * each) + place), s * each)
    else:
        number, place = _sorted(number, place)
    each = jnp.arange(blocks.count + 1, dtype=jnp.int32)
    find = jax.vmap(jax.vmap(lambda x: jnp.searchsorted(x, each, method="scan_unrolled")))
    return place, find(number).astype(jnp.int32)


def _sorted(*arrays: jax.Array) -> list[jax.Array]:
    """Arrays ``[b, hk, n]`` in the order of the first, equal numbers in the one they had."""
    shape = arrays[0].shape
    if shape[0] * shape[1] > ROWS:
        return list(jax.lax.sort(arrays, num_keys=1))
    flat = [x.reshape(-1, shape[2]) for x in arrays]
    rows = [jax.lax.sort([x[i] for x in flat], num_keys=1) for i in range(flat[0].shape[0])]
    return [jnp.stack(x).reshape(shape) for x in zip(*rows, strict=True)]

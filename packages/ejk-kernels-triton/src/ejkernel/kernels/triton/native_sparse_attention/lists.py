"""The blocks that tokens select, and the tokens that select a block."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.types.token_blocks import Blocks

INT32 = 2**31


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
    once in a list, -1 = none. Equal keys do not occur, so the order is the only one.
    """
    b, s, hk, slots = chosen.shape
    number = blocks.first_block[None, :, None, None] + chosen
    number = jnp.where(chosen >= 0, number, blocks.count)
    number = jnp.moveaxis(number, 2, 1).reshape(b, hk, s * slots)
    each = power_of_two(slots)
    place = (jnp.arange(s)[:, None] * each + jnp.arange(slots)).astype(jnp.int32).reshape(-1)
    place = jnp.broadcast_to(place, number.shape)
    if (blocks.count + 1) * s * each < INT32:  # one number sorts faster than two
        number, place = jnp.divmod(jnp.sort(number * (s * each) + place, axis=-1), s * each)
    else:
        number, place = jax.lax.sort((number, place), num_keys=2)
    each = jnp.arange(blocks.count + 1, dtype=jnp.int32)
    find = jax.vmap(jax.vmap(lambda x: jnp.searchsorted(x, each, method="scan_unrolled")))
    return place, find(number).astype(jnp.int32)

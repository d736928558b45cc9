"""The blocks that tokens select, and the tokens that select a block."""

from __future__ import annotations

import jax
import jax.numpy as jnp

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
    """(tokens ``[b, hk, s * slots]`` by the block they selected, bounds ``[b, hk, n + 1]``).

    Tokens of a block rise; entries behind the last bound are none. ``chosen [b, s, hk, slots]``,
    each block once in a list, -1 = none. Equal keys do not occur, so the order is the only one.
    """
    b, s, hk, slots = chosen.shape
    number = blocks.first_block[None, :, None, None] + chosen
    number = jnp.where(chosen >= 0, number, blocks.count)
    token = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32)[None, :, None, None], chosen.shape)
    number, token = (
        jnp.moveaxis(x, 2, 1).reshape(b, hk, s * slots) for x in (number, token)
    )  # fmt: skip
    if (blocks.count + 1) * s < INT32:  # one number sorts faster than two
        number, token = jnp.divmod(jnp.sort(number * s + token, axis=-1), s)
    else:
        number, token = jax.lax.sort((number, token), num_keys=2)
    each = jnp.arange(blocks.count + 1, dtype=jnp.int32)
    find = jax.vmap(jax.vmap(lambda x: jnp.searchsorted(x, each, method="scan_unrolled")))
    return token, find(number).astype(jnp.int32)

"""Keys and lists as kernels read them: whole blocks, and of every tile the blocks its tokens see.

A tile is some consecutive tokens with all query heads of a group. Its list has each block that one
of the tokens selects once, in rising order; a bit for each token and entry says whether that token
selects it. Lists, bits and the order of keys are made by XLA in memory linear in the length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.tpu.common.chip import SUBLANES
from ejkernel.kernels.pallas.tpu.flash_attention.layout import padded
from ejkernel.kernels.pallas.tpu.native_sparse_attention.problem import (
    WORD,
    Problem,
    Tiles,
)
from ejkernel.types.masks.token_blocks import TokenBlocks

NONE = 2**30  # above the number of every block


def tile_rows(p: Problem, t: Tiles, x: jax.Array, dim: int) -> jax.Array:
    """Returns ``[b, s, h, d]`` as kernels read it, in ``Tiles.rows_shape``."""
    length = t.tile_count(p) * t.tokens
    if t.joins_heads:
        x = x.reshape(*x.shape[:2], -1)
        return padded(x, length, x.shape[2])
    if t.by_head:
        return padded(x.swapaxes(1, 2), length, dim)
    b, s = x.shape[:2]
    x = x.reshape(b, s, p.kv_heads, p.group, x.shape[3])
    x = padded(jnp.moveaxis(x, 2, 1), length, p.group, dim)
    return x.reshape(b, p.kv_heads, -1, dim)


def token_rows(p: Problem, t: Tiles, x: jax.Array, dim: int) -> jax.Array:
    """Returns an array as ``tile_rows`` makes it as ``[b, s, h, dim]``."""
    if t.joins_heads:
        return x[:, : p.length].reshape(x.shape[0], p.length, p.heads, dim)
    if t.by_head:
        return x[:, :, : p.length, :dim].swapaxes(1, 2)
    b, hk, _, width = x.shape
    x = x.reshape(b, hk, -1, p.group, width)[:, :, : p.length, :, :dim]
    return jnp.moveaxis(x, 1, 2).reshape(b, p.length, p.heads, dim)


def by_register(t: Tiles, x: jax.Array) -> jax.Array:
    """Returns ``[b, s, ...]`` as ``[b, s / 8, 8, ...]`` where kernels join heads.

    A register has 8 rows of a head: what is computed for each head of such an array stays where it
    is in memory, while ``[b, s, h, d]`` is another order of it.
    """
    b, s = x.shape[:2]
    if not t.joins_heads or s % SUBLANES:
        return x
    return x.reshape(b, s // SUBLANES, SUBLANES, *x.shape[2:])


def row_sums(t: Tiles, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the dots of the rows of two arrays ``[b, s, h, d]``, float32 ``[b, s, h]``."""
    first, second = (by_register(t, x).astype(jnp.float32) for x in (a, b))
    return jnp.sum(first * second, axis=-1).reshape(a.shape[:3])


def row_values(p: Problem, t: Tiles, x: jax.Array) -> jax.Array:
    """Returns values ``[b, s, h]`` of tokens as ``[b, hk, tiles, 1, rows]``."""
    tiles = t.tile_count(p)
    x = padded(x, tiles * t.tokens, p.heads)
    x = x.reshape(x.shape[0], tiles, t.tokens, p.kv_heads, p.group)
    x = x.transpose(0, 3, 1, 4, 2) if t.by_head else x.transpose(0, 3, 1, 2, 4)
    return x.reshape(*x.shape[:3], 1, -1)


def scaled_rows(p: Problem, t: Tiles, rows: jax.Array, factors: jax.Array) -> jax.Array:
    """Returns rows in ``Tiles.rows_shape`` times factors ``[b, hk, tiles, 1, rows]``."""
    b, hk, tiles = factors.shape[:3]
    if not t.by_head:
        return rows * factors.reshape(b, hk, -1, 1)
    factors = factors.reshape(b, hk, tiles, p.group, t.tokens)
    if t.joins_heads:
        factors = factors.transpose(0, 2, 4, 1, 3).reshape(b, -1, p.heads)
        heads = rows.reshape(*factors.shape, -1)
        scaled = by_register(t, heads) * by_register(t, factors)[..., None]
        return scaled.reshape(rows.shape)
    return rows * factors.swapaxes(2, 3).reshape(b, p.heads, -1, 1)


def _token_of_row(p: Problem, blocks: TokenBlocks) -> tuple[jax.Array, jax.Array]:
    """Returns the token of every row of whole blocks ``[blocks, rows]``, and whether it has one."""
    row = jnp.arange(p.rows_of_block, dtype=jnp.int32)[None]
    token = jnp.minimum(blocks.block_token[:, None] + row, p.length - 1)
    same_sequence = blocks.sequence[token] == blocks.block_sequence[:, None]
    exists = blocks.block_token[:, None] + row < p.length
    is_block = (blocks.block_sequence >= 0)[:, None]
    return token, (row < p.size) & same_sequence & exists & is_block


def whole_blocks(p: Problem, x: jax.Array, blocks: TokenBlocks, dim: int, count: int) -> jax.Array:
    """Returns ``[b, s, hk, d]`` as ``count`` whole blocks ``[b, hk, count * rows, dim]``.

    Rows without a token are zero.
    """
    if blocks.packed:
        token, exists = _token_of_row(p, blocks)
        x = jnp.where(exists[None, :, :, None, None], x[:, token], 0)
    else:
        x = padded(x, p.blocks * p.size, *x.shape[2:])
        x = x.reshape(x.shape[0], p.blocks, p.size, *x.shape[2:])
    x = padded(x, p.rows_of_block, *x.shape[3:])
    x = padded(x, count, *x.shape[2:-1], dim)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, *x.shape[3:]), 2, 1)


def tokens_of_blocks(p: Problem, x: jax.Array, blocks: TokenBlocks, dim: int) -> jax.Array:
    """Returns whole blocks ``[b, hk, n, d]`` as ``[b, s, hk, dim]``; no row of x is in two
    tokens."""
    x = jnp.moveaxis(x[..., :dim], 1, 2)
    if blocks.packed:
        row = (blocks.first_block + blocks.position // p.size) * p.rows_of_block
        row = jnp.where(blocks.sequence >= 0, row + blocks.position % p.size, x.shape[1])
        return x.at[:, row].get(mode="fill", fill_value=0)
    x = x.reshape(x.shape[0], -1, p.rows_of_block, *x.shape[2:])[:, : p.blocks, : p.size]
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : p.length]


def tile_lists(
    p: Problem, t: Tiles, chosen: jax.Array, blocks: TokenBlocks, first: jax.Array | int, span: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the lists and the rows of all tiles, for ``span`` blocks from number ``first``.

    Lists ``[b, hk, tiles, 1, 1 + entries]``: the number of entries, then blocks counted from
    ``first``. Rows ``[b, hk, tiles, 1 + words, rows]``: the row of the token itself in the keys
    that the list names, then the bits of the entries.
    """
    tiles, entries = t.tile_count(p), t.entries(p, span)

    def of_tiles(x: jax.Array) -> jax.Array:
        """``[#b, s, #hk, n]`` as ``[#b, #hk, tiles, tokens, n]``; padding has no block."""
        widths = [(0, 0), (0, tiles * t.tokens - p.length), (0, 0), (0, 0)]
        x = jnp.moveaxis(jnp.pad(x, widths, constant_values=NONE), 2, 1)
        return x.reshape(*x.shape[:2], tiles, t.tokens, x.shape[3])

    # the blocks of each token, counted from ``first``
    number = chosen + (blocks.first_block[None, :, None, None] - first)
    number = jnp.where((chosen >= 0) & (number >= 0) & (number < span), number, NONE)
    number = of_tiles(number)
    # the blocks of a tile: sorted, each once
    ordered = jnp.sort(number.reshape(*number.shape[:3], -1), axis=-1)
    repeated = ordered[..., 1:] == ordered[..., :-1]
    listed = jnp.sort(ordered.at[..., 1:].set(jnp.where(repeated, NONE, ordered[..., 1:])), axis=-1)
    listed = padded(listed[..., :entries] - NONE, entries) + NONE
    # the row of the token itself, in the keys that the list names
    own_block = blocks.first_block + blocks.position // p.size - first
    own_block = of_tiles(own_block[None, :, None, None])
    before = jnp.sum(listed[..., None, :] < own_block, axis=-1, dtype=jnp.int32)
    inside = of_tiles((blocks.position % p.size)[None, :, None, None])[..., 0]
    own_row = before * p.rows_of_block + inside
    # a bit for each token and entry
    words = -(-entries // WORD)
    selects = (listed[..., None, :, None] == number[..., :, None, :]).any(-1)
    selects &= (listed < NONE)[..., None, :]
    bits = padded(selects.astype(jnp.int32), words * WORD).reshape(*number.shape[:4], words, WORD)
    shifts = jax.lax.broadcasted_iota(jnp.int32, bits.shape, bits.ndim - 1)
    bits = jnp.sum(bits << shifts, axis=-1, dtype=jnp.int32)
    rows = jnp.concatenate([own_row[..., None], bits], axis=-1).swapaxes(3, 4)
    count = jnp.sum(listed < NONE, axis=-1, keepdims=True, dtype=jnp.int32)
    lists = jnp.concatenate([count, jnp.where(listed < NONE, listed, 0)], axis=-1)
    if t.by_head:
        return lists[..., None, :], jnp.concatenate([rows] * p.group, axis=-1)
    return lists[..., None, :], jnp.repeat(rows, p.group, axis=-1)

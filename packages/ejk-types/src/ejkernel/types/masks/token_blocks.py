"""Blocks of one row of tokens, packed sequences included: their bounds, their means, the tokens
that see the means, and the valid ones among block indices of a caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.arrays import result_dtype
from ejkernel.types.masks.mask_info import MaskInfo


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["sequence", "position", "first_block", "block_token", "block_sequence", "block"],
    meta_fields=["size", "packed"],
)
@dataclass(frozen=True)
class TokenBlocks:
    """Tokens of one row, and the blocks into which its sequences are cut.

    Attributes:
        sequence: of each token, ``[s]``, -1 for padding.
        position: of each token inside its sequence, ``[s]``.
        first_block: index of block 0 of each token's sequence, ``[s]``.
        block_token: first token of each block, ``[n]``.
        block_sequence: its sequence, ``[n]``, -1 where it is unused.
        block: its number inside the sequence, ``[n]``.
        size: tokens of a block.
        packed: whether there are several sequences.
    """

    sequence: jax.Array
    position: jax.Array
    first_block: jax.Array
    block_token: jax.Array
    block_sequence: jax.Array
    block: jax.Array
    size: int
    packed: bool

    @property
    def count(self) -> int:
        return self.block_token.shape[0]

    @property
    def longest(self) -> int:
        """Blocks that one sequence can have."""
        return -(-self.sequence.shape[0] // self.size)

    @property
    def seen_from(self) -> jax.Array:
        """The first position from which a block is complete, ``[n]``."""
        return (self.block + 1) * self.size


def find_blocks(length: int, size: int, cu_seqlens: Any = None) -> TokenBlocks:
    """Blocks of ``size`` tokens, restarting at every sequence of ``cu_seqlens [n + 1]``."""
    token = jnp.arange(length, dtype=jnp.int32)
    zeros = jnp.zeros_like(token)
    if cu_seqlens is None:
        number = jnp.arange(-(-length // size), dtype=jnp.int32)
        none = jnp.zeros_like(number)
        return TokenBlocks(zeros, token, zeros, number * size, none, number, size, packed=False)
    cu = jnp.asarray(cu_seqlens, jnp.int32)
    n = cu.shape[0] - 1
    if n == 0:
        empty = jnp.zeros((0,), jnp.int32)
        return TokenBlocks(zeros - 1, zeros, zeros, empty, empty, empty, size, packed=True)
    sequence = jnp.searchsorted(cu[1:], token, side="right").astype(jnp.int32)
    inside = jnp.minimum(sequence, n - 1)
    valid = (sequence < n) & (token >= cu[0])
    per = -(-(cu[1:] - cu[:-1]) // size)
    ends = jnp.cumsum(per)
    number = jnp.arange(-(-length // size) + n, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(ends, number, side="right"), n - 1).astype(jnp.int32)
    block = number - (ends - per)[owner]
    used = number < ends[-1]
    return TokenBlocks(
        sequence=jnp.where(valid, sequence, -1),
        position=jnp.where(valid, token - cu[inside], 0),
        first_block=(ends - per)[inside].astype(jnp.int32),
        block_token=jnp.where(used, cu[owner] + block * size, 0),
        block_sequence=jnp.where(used, owner, -1),
        block=jnp.where(used, block, 0),
        size=size,
        packed=True,
    )


def block_means(x: jax.Array, blocks: TokenBlocks) -> jax.Array:
    """Means over complete blocks, ``[b, n, heads, d]`` of ``[b, s, heads, d]``.

    An incomplete block is never seen; its mean is unspecified. No token is read twice, so that
    gradients need no atomic additions, whose order might differ from run to run.
    """
    size, length = blocks.size, x.shape[1]
    wide = result_dtype(x, jnp.float32)
    if not blocks.packed:
        complete = length // size
        mean = jnp.mean(
            x[:, : complete * size].reshape(x.shape[0], complete, size, *x.shape[2:]), 2, dtype=wide
        )
        padding = ((0, 0), (0, blocks.count - complete), (0, 0), (0, 0))
        return jnp.pad(mean, padding)
    token = blocks.block_token[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    owner = blocks.sequence.at[token].get(mode="fill", fill_value=-1)
    in_block = (owner == blocks.block_sequence[:, None]) & (owner >= 0)
    outside = length + jnp.arange(token.size, dtype=jnp.int32).reshape(token.shape)
    token = jnp.where(in_block, token, outside)
    read = x.at[:, token].get(mode="fill", fill_value=0, unique_indices=True)
    return jnp.mean(read, 2, dtype=wide)


def means_mask(blocks: TokenBlocks, batch: int) -> MaskInfo:
    """Returns the mask of tokens over means: a block is seen once its last token is."""

    def rows(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (batch, *x.shape))

    packed = blocks.packed
    return MaskInfo(
        q_segment_ids=rows(blocks.sequence) if packed else None,
        kv_segment_ids=rows(blocks.block_sequence) if packed else None,
        # block c is complete, and may be seen, at position (c + 1) * size - 1 and after
        q_positions=rows(blocks.position + 1),
        kv_positions=rows(blocks.seen_from),
        causal=True,
    )


def clean_indices(indices, count, blocks: TokenBlocks) -> jax.Array:
    """Returns indices with invalid ones set to -1: past ``count``, negative, future, repeated.

    indices ``[b, s, hk, S]``; count an int or ``[b, s, hk]``.
    """
    indices = jnp.asarray(indices, jnp.int32)
    slot = jnp.arange(indices.shape[-1], dtype=jnp.int32)[None, None, None]
    limit = count if isinstance(count, int) else jnp.asarray(count, jnp.int32)[..., None]
    last = (blocks.position // blocks.size)[None, :, None, None]
    good = (slot < limit) & (indices >= 0) & (indices <= last)
    good &= (blocks.sequence >= 0)[None, :, None, None]
    ordered = jnp.sort(jnp.where(good, indices, -1), axis=-1)
    repeated = jnp.concatenate(
        [jnp.zeros_like(ordered[..., :1], bool), ordered[..., 1:] == ordered[..., :-1]], -1
    )
    return jnp.where(repeated, -1, ordered)

"""The choice of blocks: means in exact terms, the launch, and choices that need no ranking."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.native_sparse_attention.problem import Problem
from ejkernel.kernels.triton.native_sparse_attention.select_kernel import ScoreBlocks
from ejkernel.kernels.triton.native_sparse_attention.tiles import choose_select_tiles
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.masks.token_blocks import TokenBlocks, block_means

MAX_RANKED = 129
"""Slots that a kernel ranks: the own block, and as many others as registers hold of a tile."""

MAX_SCORES = 1 << 24
"""Elements of scores at once, where XLA ranks them."""


def exact_terms(means: jax.Array, padding: int) -> tuple[jax.Array, jax.Array]:
    """Returns float32 means ``[b, n, hk, d]`` as terms and factors.

    The terms ``[b, hk, n + padding, 2, d]`` are two float16 values, the large one first, whose sum
    is the mean times a power of two that brings the largest mean of a head to [2^14, 2^15). The
    inverse powers are the factors ``[b, hk]``. Means below 2^-17 of the largest lose bits;
    ``select_kernel`` says how that changes the order.
    """
    size = jnp.max(jnp.where(jnp.isfinite(means), jnp.abs(means), 0.0), axis=(1, 3))
    exponent = jnp.clip(lax.bitcast_convert_type(size, jnp.int32) >> 23, 15, 253)
    up, down = (
        lax.bitcast_convert_type(x << 23, jnp.float32) for x in (268 - exponent, exponent - 14)
    )
    means = means * up[:, None, :, None]
    high = lax.reduce_precision(means, 5, 10)
    both = jnp.stack([high, means - high], axis=3).astype(jnp.float16)
    both = jnp.pad(both, [(0, 0), (0, padding), *[(0, 0)] * 3])
    return jnp.moveaxis(both, 1, 2), down


def must_rank(p: Problem, sorts: bool) -> bool:
    """Returns whether blocks must be ranked; ``sorts``: their order matters."""
    return sorts or p.slots < -(-p.length // p.size)


def select(
    p: Problem, target: Target, q: jax.Array, k: jax.Array, blocks: TokenBlocks, sorts: bool
) -> jax.Array:
    """Returns the ``p.slots`` best blocks of every token ``[b, s, hk, slots]``, -1 after them.

    The best come first if ``sorts``.
    """
    q, k = map(lax.stop_gradient, (q, k))
    lead = (p.batch, p.length, p.kv_heads)
    own_block = blocks.position // blocks.size
    own_block = jnp.where(blocks.sequence >= 0, own_block, -1)[None]
    if not must_rank(p, sorts):  # every block is chosen
        slot = jnp.arange(p.slots, dtype=jnp.int32)
        chosen = jnp.where(slot <= own_block[..., None], own_block[..., None] - slot, -1)
        return jnp.broadcast_to(chosen[:, :, None], (*lead, p.slots))
    if p.slots == 1:
        return jnp.broadcast_to(own_block[:, :, None, None], (*lead, 1))
    complete = (blocks.position + 1) // blocks.size
    means, factors = exact_terms(block_means(k, blocks), choose_select_tiles(p, target).keys)
    tensors = {"q": q, "terms": means, "factors": factors}
    packed = {
        "firsts": blocks.first_block[None],
        "completes": jnp.where(blocks.sequence >= 0, complete, 0)[None],
        "owns": own_block,
    }

    if p.slots <= MAX_RANKED:
        launch = ScoreBlocks(p, choose_select_tiles(p, target), True)
        return call(launch, **tensors, **(packed if p.packed else {}))["chosen"]

    def score(p: Problem, tensors: dict[str, jax.Array]) -> jax.Array:
        launch = ScoreBlocks(p, choose_select_tiles(p, target), False)
        return call(launch, **tensors)["scores"]

    return _rank_by_xla(p, tensors | packed, score)


def _rank_by_xla(p: Problem, tensors: dict[str, jax.Array], score: Any) -> jax.Array:
    """Returns the best blocks by XLA, from the scores of some tokens at a time."""
    rows = max(1, min(p.length, MAX_SCORES // (p.batch * p.kv_heads * p.blocks)))
    parts = -(-p.length // rows)
    part = replace(p, length=rows, packed=True)
    fixed = {name: tensors.pop(name) for name in ("terms", "factors")}
    number = jnp.arange(p.blocks, dtype=jnp.int32)

    def split_rows(x: jax.Array) -> jax.Array:
        x = jnp.broadcast_to(x, (p.batch, *x.shape[1:]))
        x = jnp.pad(x, [(0, 0), (0, parts * rows - p.length), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(p.batch, parts, rows, *x.shape[2:]), 1, 0)

    def best_blocks(x: dict[str, jax.Array]) -> jax.Array:
        low, own_block = x["firsts"][:, :, None, None], x["owns"][:, :, None, None]
        visible = (number >= low) & (number < low + x["completes"][:, :, None, None])
        # the own block always comes first
        scores = jnp.where(visible, jnp.nan_to_num(score(part, x | fixed)), -jnp.inf)
        scores = jnp.where((number == low + own_block) & (own_block >= 0), jnp.inf, scores)
        top, indices = lax.top_k(scores, p.slots)
        return jnp.where(top == -jnp.inf, -1, indices - low)

    chosen = lax.map(best_blocks, {name: split_rows(x) for name, x in tensors.items()})
    chosen = jnp.moveaxis(chosen, 0, 1)
    return chosen.reshape(p.batch, parts * rows, *chosen.shape[3:])[:, : p.length]

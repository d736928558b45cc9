"""Selects the blocks that every token attends to.

The score of a block is the probability the compressed branch gives it, summed over the query heads
that share a key head. Scores are computed tile by tile of queries, in float32 at highest precision,
so that every platform sees the same ones; no gradient passes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops.execution.program_cache import bounded_jit
from ejkernel.types.arrays import at_most, result_dtype, size_of
from ejkernel.types.masks.token_blocks import TokenBlocks

# logits of one tile, in elements: a few megabytes
TILE_ELEMENTS = 1 << 20


def _tile_scores(q, k, sequence, position, blocks: TokenBlocks, scale: float):
    """Scores ``[b, rows, hk, n]`` of one tile; -inf where unseen, +inf for the own block.

    The largest logit is one of the tile's own, so that it cancels exactly: large logits leave the
    probabilities of different heads as equal as they are.
    """
    x = scale * jnp.einsum("brkgd,bnkd->brkgn", q, k, precision=lax.Precision.HIGHEST)
    same = sequence[:, None] == blocks.block_sequence[None]
    seen = same & (blocks.seen_from[None] <= position[:, None] + 1) & (sequence >= 0)[:, None]
    same_block = same & (blocks.block[None] == (position // blocks.size)[:, None])
    same_block &= (sequence >= 0)[:, None]
    p = jax.nn.softmax(x, axis=-1, where=seen[None, :, None, None])
    score = jnp.where(seen[None, :, None], jnp.sum(p, axis=3), -jnp.inf)
    return jnp.where(same_block[None, :, None], jnp.inf, score)


def _best(score, count: int):
    """Returns the ``count`` largest of the last axis and their indices, ties to the lower index.

    An exhausted axis repeats -inf. One maximum at a time costs little next to the attention over
    the block, and unlike ``lax.top_k`` XLA does not gather it where other axes are sharded.
    """
    number = lax.broadcasted_iota(jnp.int32, score.shape, score.ndim - 1)

    def take(score, _):
        top = jnp.max(score, axis=-1)
        at = jnp.min(number, axis=-1, where=score == top[..., None], initial=number.shape[-1])
        return jnp.where(number == at[..., None], -jnp.inf, score), (top, at)

    score = jnp.where(jnp.isnan(score), jnp.inf, score)
    largest = lax.scan(take, score, None, length=count)[1]
    return tuple(jnp.moveaxis(x, 0, -1) for x in largest)


@bounded_jit
def select_blocks(q, k_cmp, blocks: TokenBlocks, *, scale: float, count: int) -> jax.Array:
    """The ``count`` best blocks ``int32 [b, s, hk, count]``, numbered in the sequence; -1 = none.

    q ``[b, s, hk, g, d]``, k_cmp ``[b, n, hk, d]``: the means of the keys of every block. The own
    block comes first, then by score, ties to the lower number.
    """
    q, k_cmp = map(lax.stop_gradient, (q, k_cmp))
    wide = result_dtype(q, jnp.float32)
    q, k_cmp = q.astype(wide), k_cmp.astype(wide)
    b, s, hk, g, _ = q.shape
    per_row = size_of(b) * hk * g * size_of(blocks.count)
    rows = max(1, at_most(TILE_ELEMENTS // max(1, per_row), s))
    tiles = -(-s // rows)
    pad = tiles * rows - s

    def cut(x, axis, value=0):
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, pad)
        x = jnp.pad(x, widths, constant_values=value)
        x = x.reshape(*x.shape[:axis], tiles, rows, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    def tile(_, x):
        q, sequence, position, first = x
        score = _tile_scores(q, k_cmp, sequence, position, blocks, scale)
        best, index = _best(score, count)
        return None, jnp.where(best == -jnp.inf, -1, index - first[None, :, None, None])

    xs = (cut(q, 1), cut(blocks.sequence, 0, -1), cut(blocks.position, 0),
          cut(blocks.first_block, 0))  # fmt: skip
    chosen = lax.scan(tile, None, xs)[1]
    return jnp.moveaxis(chosen, 0, 1).reshape(b, tiles * rows, hk, count)[:, :s]

"""The choice of blocks on a TPU.

    score = sum over the heads of a group of softmax(scale * means q^T), over complete blocks

Grid (batch, key head, 128 tokens): scores are ``[blocks, tokens]``, one query head after the other.
The largest is taken ``slots`` times. The own block is the first; ties go to the lower number.

Bound: the matrix units, 2 n d operations a query row for n blocks, six times that for float32.

Source: Yuan et al. 2025, Native Sparse Attention (arXiv 2502.11089), section 3.3.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.compat import result
from ejkernel.kernels.pallas.tpu.common.chip import LANES, Chip
from ejkernel.kernels.pallas.tpu.common.matmul import matmul
from ejkernel.kernels.pallas.tpu.flash_attention.layout import padded
from ejkernel.kernels.pallas.tpu.native_sparse_attention.problem import Problem, Tiles
from ejkernel.kernels.pallas.tpu.native_sparse_attention.steps import bytes_of
from ejkernel.types.masks.token_blocks import TokenBlocks, block_means

FIRST, COMPLETE, OWN = range(3)  # rows of the values of tokens


def _kernel(
    p: Problem,
    t: Tiles,
    tokens_ref: Any,
    q_ref: Any,
    means_ref: Any,
    chosen_ref: Any,
    total_ref: Any,
) -> None:
    shape = total_ref.shape
    number = lax.broadcasted_iota(jnp.int32, shape, 0)
    first, complete, own_block = (tokens_ref[pl.ds(n, 1)] for n in (FIRST, COMPLETE, OWN))
    visible = (number >= first) & (number < first + complete)
    total_ref[...] = jnp.zeros(shape, jnp.float32)

    def add_head(head: Any, carry: None) -> None:
        if t.joins_heads:
            q = q_ref[0, :, pl.ds(pl.multiple_of(head * p.dim, LANES), p.dim)]
        else:
            q = q_ref[0, head]
        x = matmul(means_ref[0, 0], q.astype(jnp.float32), (1, 1), lax.Precision.HIGHEST)
        x = p.scale * x
        top = jnp.max(jnp.where(visible, x, -jnp.inf), axis=0, keepdims=True)
        top = jnp.where(top > -jnp.inf, top, 0.0)
        # not a minimum, which may drop NaN
        weights = jnp.where(visible, jnp.exp(jnp.where(x > top, 0.0, x - top)), 0.0)
        total = jnp.sum(weights, axis=0, keepdims=True)
        total_ref[...] += weights * (1.0 / jnp.where(total > 0.0, total, 1.0))

    lax.fori_loop(0, p.group, add_head, None)
    # a score of NaN is the largest: the token sees the NaN
    score = jnp.where(jnp.isnan(total_ref[...]), jnp.inf, total_ref[...])
    score = jnp.where(visible, score, -jnp.inf)
    total_ref[...] = jnp.where((number == first + own_block) & (own_block >= 0), jnp.inf, score)

    def take(slot: Any, carry: None) -> None:
        score = total_ref[...]
        top = jnp.max(score, axis=0, keepdims=True)
        best = jnp.min(jnp.where(score == top, number, shape[0]), axis=0, keepdims=True)
        chosen_ref[0, 0, pl.ds(slot, 1)] = jnp.where(top > -jnp.inf, best - first, -1)
        total_ref[...] = jnp.where(number == best, -jnp.inf, score)

    lax.fori_loop(0, p.slots, take, None)


def select_bytes(p: Problem) -> int:
    """Returns the bytes of vector memory of the kernel: two buffers of the means, eight tiles."""
    blocks = -(-p.blocks // 8) * 8
    means = 2 * blocks * -(-p.dim // LANES) * LANES * 4
    return means + 8 * blocks * LANES * 4 + 4 * p.group * LANES * LANES * p.itemsize


def must_rank(p: Problem, sorts: bool) -> bool:
    """Returns whether blocks must be ranked; ``sorts``: their order matters."""
    return p.slots > 1 and (sorts or p.slots < -(-p.length // p.size))


def select(
    p: Problem, t: Tiles, chip: Chip, q: jax.Array, k: jax.Array, blocks: TokenBlocks, sorts: bool
) -> jax.Array:
    """Returns the ``p.slots`` best blocks of every token ``[b, s, hk, slots]``, -1 after them.

    The best come first if ``sorts``.
    """
    q, k = map(lax.stop_gradient, (q, k))
    is_token = blocks.sequence >= 0
    own_block = jnp.where(is_token, blocks.position // blocks.size, -1)
    if not must_rank(p, sorts):  # every block is chosen, or the own one alone
        chosen = own_block[:, None] - jnp.arange(p.slots, dtype=jnp.int32)
        chosen = jnp.maximum(chosen, -1)[None, :, None]
        return jnp.broadcast_to(chosen, (p.batch, p.length, p.kv_heads, p.slots))
    complete = jnp.where(is_token, (blocks.position + 1) // blocks.size, 0)
    tiles, count = -(-p.length // LANES), -(-p.blocks // 8) * 8
    length = tiles * LANES
    tokens = padded(jnp.stack([blocks.first_block, complete, own_block]).astype(jnp.int32), length)
    means = padded(jnp.moveaxis(block_means(k, blocks), 1, 2), count, p.dim)
    means = jnp.nan_to_num(means)  # of blocks that nobody sees: 0 * NaN is NaN
    if t.joins_heads:
        width = p.group * p.dim
        q = padded(q.reshape(*q.shape[:2], -1), length, p.heads * p.dim)
        of_queries = pl.BlockSpec((1, LANES, width), lambda b, m, i: (b, i, m))
    else:
        q = padded(q.swapaxes(1, 2), length, p.dim)
        of_queries = pl.BlockSpec((1, p.group, LANES, p.dim), lambda b, m, i: (b, m, i, 0))
    chosen = result((p.batch, p.kv_heads, p.slots, length), "int32", q, means, tokens)
    pairs = p.batch * p.heads * length * count
    ranked = pl.pallas_call(
        functools.partial(_kernel, p, t),
        grid=(p.batch, p.kv_heads, tiles),
        in_specs=[
            pl.BlockSpec((3, LANES), lambda b, m, i: (0, i)),
            of_queries,
            pl.BlockSpec((1, 1, count, p.dim), lambda b, m, i: (b, m, 0, 0)),
        ],
        out_specs=pl.BlockSpec((1, 1, p.slots, LANES), lambda b, m, i: (b, m, 0, i)),
        out_shape=chosen,
        scratch_shapes=[pltpu.VMEM((count, LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3,
            vmem_limit_bytes=chip.vmem_limit(select_bytes(p) * 3 // 2),
        ),
        cost_estimate=pl.CostEstimate(
            flops=12 * pairs * p.dim, transcendentals=pairs, bytes_accessed=bytes_of(q, means)
        ),
        interpret=chip.interpret,
        name="ejkernel_select_blocks",
    )(tokens, q, means)
    return jnp.moveaxis(ranked[..., : p.length], 3, 1)

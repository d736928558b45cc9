"""Decoding over a cache on a TPU: one new token per sequence, all heads at once.

    o = exp(x - lse) v,  x = scale * q k^T over the tokens of the sequence

Grid (sequence): a step loops over the blocks of its sequence. Blocks are copied into two buffers by
hand: while one is computed the next one arrives, and at the end of a sequence the first block of
the next sequence, so that copies never pause between sequences that have tokens.

A row of the score tile is a query head, a column a token *and* kv head, as the cache stores them:
no key is moved on the chip. Scores of a query head with other kv heads are masked. The rows of all
heads take a matrix unit no longer than the rows of one group would, since loading keys as its
weights decides: the extra scores cost exponentials only.

Bound: memory, 2 hk d elements a token for 4 h d FLOPs.

Sources: Milakov and Gimelshein 2018 (online softmax); Kwon et al. 2023 (paged caches).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.compat import result
from ejkernel.kernels.pallas.tpu.common.chip import Chip
from ejkernel.kernels.pallas.tpu.page_attention.tiles import Tiles
from ejkernel.types.serving.problem import PagedProblem

# a row that has seen nothing keeps FLOOR, and exp(HIDDEN - FLOOR) is 0
FLOOR, HIDDEN = -1e38, -3e38


def dot(p: PagedProblem, a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Returns the matmul of two tiles over one axis each, in the dtype of the query."""
    precision = lax.Precision.HIGHEST if p.query_dtype == "float32" else lax.Precision.DEFAULT
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    a, b = a.astype(p.query_dtype), b.astype(p.query_dtype)
    return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)


def matching_heads(p: PagedProblem, columns: int) -> jax.Array:
    """Returns which columns have the kv head of their row."""
    shape = (p.heads, columns)
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return lax.rem(column, p.kv_heads) == lax.div(row, p.group)


def _kernel(p: PagedProblem, t: Tiles, cache_of: Callable[..., Any], *refs: Any) -> None:
    starts, ends, current, following, *blocks = refs
    q_ref, factor_ref, k_pool, v_pool, o_ref, *scratch = blocks
    k_buffer, v_buffer, semaphores, parity, mask_ref = scratch
    cache = cache_of((k_pool, v_pool), (k_buffer, v_buffer), semaphores)
    sequence, last = pl.program_id(0), pl.num_programs(0) - 1
    start, end = starts[sequence], ends[sequence]
    first = start // t.block
    stop = jnp.where(start < end, pl.cdiv(end, t.block), first)
    after = jnp.minimum(sequence + 1, last)
    continues = (sequence < last) & (starts[after] < ends[after])
    before = jnp.maximum(sequence - 1, 0)
    columns = t.block * p.kv_heads

    @pl.when(sequence == 0)
    def _begin() -> None:
        parity[0] = 0
        mask_ref[...] = matching_heads(p, columns).astype(jnp.float32)

    @pl.when((start < end) & ((sequence == 0) | (starts[before] >= ends[before])))
    def _first_block() -> None:
        cache.fetch(current, first, start, end, parity[0])

    def add_block(block: Any, carry: Any) -> Any:
        m_old, total, acc = carry
        slot = parity[0]

        @pl.when(block + 1 < stop)
        def _next_block() -> None:
            cache.fetch(current, block + 1, start, end, 1 - slot)

        @pl.when((block + 1 == stop) & continues)
        def _next_sequence() -> None:
            cache.fetch(following, starts[after] // t.block, starts[after], ends[after], 1 - slot)

        cache.wait(block, start, end, slot)
        # columns of the tokens of this block and of the sequence
        base = cache.first_token(block)
        low = (jnp.maximum(start, block * t.block) - base) * p.kv_heads
        high = (end - base) * p.kv_heads

        @pl.when((low > 0) | (high < columns))
        def _clear() -> None:
            # rows that were not copied may hold NaN, which a probability of 0 would keep
            if p.value_dtype == "int8":
                return
            v = v_buffer[slot].reshape(columns, p.value_dim)
            row = lax.broadcasted_iota(jnp.int32, v.shape, 0)
            v = jnp.where((row >= low) & (row < high), v.astype(jnp.float32), 0.0)
            v_buffer[slot] = v.astype(v_buffer.dtype).reshape(v_buffer.shape[1:])

        k = k_buffer[slot].reshape(columns, p.dim)
        x = dot(p, q_ref[0], k, (1, 1)) * factor_ref[:, :1]
        if p.soft_cap is not None:
            x = p.soft_cap * jnp.tanh(x * (1.0 / p.soft_cap))
        column = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        seen = (column >= low) & (column < high)
        if p.kv_heads > 1:
            seen &= mask_ref[...] > 0.0
        x = jnp.where(seen, x, HIDDEN)
        m = jnp.maximum(m_old, jnp.max(x, axis=1, keepdims=True))
        alpha, probabilities = jnp.exp(m_old - m), jnp.exp(x - m)
        v = v_buffer[slot].reshape(columns, p.value_dim)
        parity[0] = 1 - slot
        total = total * alpha + jnp.sum(probabilities, axis=1, keepdims=True)
        return m, total, acc * alpha + dot(p, probabilities, v, (1, 0))

    row = jnp.zeros((p.heads, 1), jnp.float32)
    acc = jnp.zeros((p.heads, p.value_dim), jnp.float32)
    m, total, acc = lax.fori_loop(first, stop, add_block, (row + FLOOR, row, acc))
    # factor_ref: of the logits, of the values, and the sinks of each head together
    sinks, seen = factor_ref[:, 2:3], total > 0.0
    top = jnp.maximum(m, sinks)
    shrink = jnp.exp(m - top)
    total = total * shrink + jnp.exp(sinks - top)
    o = acc * (shrink * factor_ref[:, 1:2] / jnp.where(seen, total, 1.0))
    o_ref[0] = jnp.where(seen, o, 0.0).astype(o_ref.dtype)


def row_factors(p: PagedProblem, arrays: dict[str, Any]) -> jax.Array:
    """Returns float32 ``[heads, 128]``: factors of the logits and of the values of each head, and
    the log of the sum of the exponentials of its sinks."""

    def of_heads(name: str) -> jax.Array:
        scale = jnp.asarray(arrays.get(name, 1.0), jnp.float32).reshape(-1)
        return jnp.broadcast_to(scale[:, None], (scale.shape[0], p.heads // scale.shape[0])).ravel()

    sinks = jnp.full((p.heads,), HIDDEN, jnp.float32)
    if "softmax_aux" in arrays:
        sinks = jax.nn.logsumexp(arrays["softmax_aux"].astype(jnp.float32), axis=-1)
        sinks = jnp.broadcast_to(jnp.maximum(sinks, HIDDEN), (p.heads,))
    columns = [of_heads("k_scale") * p.scale, of_heads("v_scale"), sinks]
    return jnp.pad(jnp.stack(columns, axis=1), ((0, 0), (0, 125)))


def decode(
    p: PagedProblem,
    t: Tiles,
    chip: Chip,
    cache_of: Callable[..., Any],
    query: jax.Array,
    pools: tuple[jax.Array, jax.Array],
    starts: jax.Array,
    ends: jax.Array,
    tables: jax.Array,
    factors: jax.Array,
) -> jax.Array:
    """Returns o ``[batch, heads, value_dim]``.

    Args:
        cache_of: makes the ``Pages`` or ``Rows`` of the pools, buffers and semaphores.
        query: ``[batch, heads, dim]``.
        pools: keys and values, in rows of tokens and heads.
        starts, ends: int32 ``[batch]``, the tokens that each sequence sees.
        tables: int32 ``[batch, 1, pages]``, or what ``cache_of`` takes in its place.
        factors: ``row_factors``.
    """
    rows, columns = t.tokens * p.kv_heads, t.block * p.kv_heads
    kv = [(pool.shape[-1], pool.dtype) for pool in pools]
    table = (1, 1, tables.shape[2])
    moved = p.batch * p.capacity * p.kv_heads * p.token_bytes
    return pl.pallas_call(
        functools.partial(_kernel, p, t, cache_of),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(p.batch,),
            in_specs=[
                pl.BlockSpec(table, lambda b, *s: (b, 0, 0), memory_space=pltpu.SMEM),
                pl.BlockSpec(
                    table,
                    lambda b, *s: (jnp.minimum(b + 1, p.batch - 1), 0, 0),
                    memory_space=pltpu.SMEM,
                ),
                pl.BlockSpec((1, p.heads, p.dim), lambda b, *s: (b, 0, 0)),
                pl.BlockSpec((p.heads, 128), lambda b, *s: (0, 0)),
                *[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
            ],
            out_specs=pl.BlockSpec((1, p.heads, p.value_dim), lambda b, *s: (b, 0, 0)),
            scratch_shapes=[
                *(pltpu.VMEM((2, t.pages, rows, dim), dtype) for dim, dtype in kv),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((p.heads, columns), jnp.float32),
            ],
        ),
        out_shape=result((p.batch, p.heads, p.value_dim), p.query_dtype, query, *pools),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=int(min(chip.vmem, max(t.vmem(p) * 3 // 2, 16 * 2**20))),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * p.batch * p.capacity * p.heads * (p.dim + p.value_dim),
            transcendentals=p.batch * p.capacity * p.heads,
            bytes_accessed=moved,
        ),
        interpret=chip.interpret,
        name="ejkernel_decode",
    )(starts, ends, tables, tables, query, factors, *pools)

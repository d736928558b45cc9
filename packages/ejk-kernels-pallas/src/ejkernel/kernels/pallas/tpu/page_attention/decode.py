"""Decoding over a cache on a TPU: the newest tokens of each sequence, all heads at once.

    o = exp(x - lse) v,  x = scale * q k^T over the tokens of the sequence

Grid (sequence): a step loops over the blocks of its sequence. Blocks are copied into two buffers by
hand: while one is computed the next one arrives, and at the end of a sequence the first block of
the next sequence, so that copies never pause between sequences that have tokens.

A row of the score tile is a query head, a column a token *and* kv head, as the cache stores them:
no key is moved on the chip. Scores of a query head with other kv heads are masked. The rows of all
heads take a matrix unit no longer than the rows of one group would, since loading keys as its
weights decides: the extra scores cost exponentials only. Values of a latent cache are the first
columns of its keys.

Bound: memory, 2 hk d elements a token for 4 h d FLOPs; a latent cache of 640 columns makes 230
FLOPs a byte with 128 rows, where both limits meet on v5e.

Where the new tokens are nodes of a tree, a block that holds some of them gets a mask in scratch: of
each token first, then of its heads by a matmul with zeros and ones.

Sources: Milakov and Gimelshein 2018 (online softmax); Kwon et al. 2023 (paged caches).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.compat import result
from ejkernel.kernels.pallas.tpu.common.chip import LANES
from ejkernel.kernels.pallas.tpu.common.matmul import matmul
from ejkernel.kernels.pallas.tpu.common.trees import encode_nodes, sees_all, visible_keys
from ejkernel.kernels.pallas.tpu.page_attention.tiles import Tiles
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types.serving.problem import PagedProblem

# a row that has seen nothing keeps FLOOR, and exp(HIDDEN - FLOOR) is 0
FLOOR, HIDDEN = -1e38, -3e38
LOGITS, VALUES, SINKS = range(3)  # lanes of the factors of a row


def dot(p: PagedProblem, a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Returns the matmul of two tiles over one axis each, in the dtype of the query."""
    precision = lax.Precision.HIGHEST if p.query_dtype == "float32" else lax.Precision.DEFAULT
    return matmul(a.astype(p.query_dtype), b.astype(p.query_dtype), axes, precision)


def query_rows(p: PagedProblem) -> int:
    """Returns the rows of a sequence: every head of every new token."""
    return p.tokens * p.heads


def matching_heads(p: PagedProblem, columns: int) -> jax.Array:
    """Returns which columns have the kv head of their row."""
    shape = (query_rows(p), columns)
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    head = lax.rem(row, p.heads)
    return lax.rem(column, p.kv_heads) == lax.div(head, p.group)


def visible_range(p: PagedProblem, start: Any, end: Any) -> tuple[Any, Any]:
    """Returns the first visible token and the end of them: scalars, or ``[rows, 1]`` where a
    sequence has several new tokens; of a tree those that any row sees."""
    if p.tokens == 1 or p.tree_columns:
        return start, end
    row = lax.broadcasted_iota(jnp.int32, (query_rows(p), 1), 0)
    ends = end - (p.tokens - 1 - lax.div(row, p.heads))
    if p.window_left is None:
        return jnp.full_like(ends, start), ends
    return jnp.maximum(ends - 1 - p.window_left, start), ends


def mask_tree(p: PagedProblem, nodes: Any, mask: Any, start: Any, end: Any) -> None:
    """Stores which tokens from ``start`` on each row sees as a node of a tree, as zeros and ones.

    ``nodes``: marks of each new token (``common.trees``). ``mask``: ``[rows, tokens]``.
    """
    rows, tokens = mask.shape
    seen = visible_keys(p, nodes, 0, end - p.tokens, p.tokens, start, tokens)
    row, token = (lax.broadcasted_iota(jnp.int32, (rows, seen.shape[0]), axis) for axis in (0, 1))
    heads = jnp.where(lax.div(row, p.heads) == token, 1.0, 0.0).astype(jnp.bfloat16)
    seen = jnp.where(seen, 1.0, 0.0).astype(jnp.bfloat16)
    mask[...] = jnp.dot(heads, seen, preferred_element_type=jnp.float32)


def clear_outside(p: PagedProblem, values: Any, low: Any, high: Any) -> None:
    """Zeroes the values of rows before ``low`` and from ``high`` on.

    Rows that were not copied may hold NaN, which a probability of 0 would keep.
    """
    if p.value_dtype == "int8":
        return
    v = values[...].reshape(-1, values.shape[-1])
    row = lax.broadcasted_iota(jnp.int32, v.shape, 0)
    v = jnp.where((row >= low) & (row < high), v.astype(jnp.float32), 0.0)
    values[...] = v.astype(values.dtype).reshape(values.shape)


class Operands(NamedTuple):
    """The operands of a step besides the cache: arrays, their block specs, or refs.

    Attributes:
        table, next_table: block tables ``[1, 1, pages]`` of this and of the next sequence.
        q: ``[1, rows, dim]``. factors: of ``row_factors``, ``[1, rows, 128]``.
        nodes: of ``encode_nodes``, ``[1, tokens, lanes]``; None without a tree.
    """

    table: Any
    next_table: Any
    q: Any
    factors: Any
    nodes: Any

    def factor(self, lane: int) -> jax.Array:
        """Returns a factor of each row, ``[rows, 1]``."""
        return self.factors[0, :, lane : lane + 1]


def masked_logits(
    p: PagedProblem,
    t: Tiles,
    operands: Operands,
    mask_ref: Any,
    k: jax.Array,
    end: Any,
    base: Any,
    first_column: Any,
    visible_tokens: tuple[Any, Any],
) -> jax.Array:
    """Returns the logits of a block of keys ``[columns, dim]``, HIDDEN where a row sees no key.

    ``end``: of the sequence. ``base``: first token of the block. ``first_column``: first column of
    the sequence in the block. ``visible_tokens``: of ``visible_range``.
    """
    x = dot(p, operands.q[0], k, (1, 1)) * operands.factor(LOGITS)
    if p.soft_cap is not None:
        x = p.soft_cap * jnp.tanh(x * (1.0 / p.soft_cap))
    low, high = ((token - base) * p.kv_heads for token in visible_tokens)
    column = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    seen = (column >= jnp.maximum(low, first_column)) & (column < high)
    if p.kv_heads > 1:
        seen &= mask_ref[...] > 0.0
    elif operands.nodes is not None:
        nodes, first_new, block_end = operands.nodes[0], end - p.tokens, base + t.block
        is_visible = sees_all(p, nodes, first_new, end - 1, base, block_end)
        pl.when(~is_visible)(lambda: mask_tree(p, nodes, mask_ref, base, end))
        seen &= (mask_ref[...] > 0.0) | is_visible
    return jnp.where(seen, x, HIDDEN)


def store_results(
    operands: Operands,
    o_ref: Any,
    lse_ref: Any | None,
    m: jax.Array,
    total: jax.Array,
    acc: jax.Array,
) -> None:
    """Stores output and lse from maxima and totals ``[rows, 1]`` and the output of the rows."""
    sinks, seen = operands.factor(SINKS), total != 0.0  # NaN has seen something
    top = jnp.maximum(m, sinks)
    rescale = jnp.exp(m - top)
    total = jnp.where(seen, total * rescale + jnp.exp(sinks - top), 1.0)
    o = acc * (rescale * operands.factor(VALUES) / total)
    o_ref[0] = jnp.where(seen, o, 0.0).astype(o_ref.dtype)
    if lse_ref is not None:
        lse_ref[0] = jnp.where(seen, top + jnp.log(total), -jnp.inf)


def _kernel(
    p: PagedProblem,
    t: Tiles,
    cache_of: Callable[..., Any],
    starts: Any,
    ends: Any,
    operands: Operands,
    pools: list[Any],
    o_ref: Any,
    lse_ref: Any | None,
    buffers: list[Any],
    semaphores: Any,
    slot_ref: Any,
    mask_ref: Any,
) -> None:
    """Decodes one sequence.

    Args:
        starts, ends: tokens of each sequence, in scalar memory.
        pools: keys and values, or a latent cache, in device memory.
        o_ref: ``[1, rows, value_dim]``. lse_ref: ``[1, rows, 1]``.
        buffers: two of a block of each pool.
        slot_ref: which of the buffers has the next block.
        mask_ref: ``[rows, columns]``.
    """
    cache = cache_of(pools, buffers, semaphores)
    sequence, last = pl.program_id(0), pl.num_programs(0) - 1
    start, end = starts[sequence], ends[sequence]
    first = start // t.block
    stop = jnp.where(start < end, pl.cdiv(end, t.block), first)
    following, previous = jnp.minimum(sequence + 1, last), jnp.maximum(sequence - 1, 0)
    continues = (sequence < last) & (starts[following] < ends[following])
    columns, rows = t.block * p.kv_heads, query_rows(p)
    visible_tokens = visible_range(p, start, end)

    @pl.when(sequence == 0)
    def _begin() -> None:
        slot_ref[0] = 0
        mask_ref[...] = matching_heads(p, columns).astype(jnp.float32)

    # else the previous sequence has fetched it
    @pl.when((start < end) & ((sequence == 0) | (starts[previous] >= ends[previous])))
    def _first_block() -> None:
        cache.fetch(operands.table, first, start, end, slot_ref[0])

    def add_block(block: Any, state: Any) -> Any:
        m_old, total, acc = state
        slot = slot_ref[0]

        @pl.when(block + 1 < stop)
        def _next_block() -> None:
            cache.fetch(operands.table, block + 1, start, end, 1 - slot)

        @pl.when((block + 1 == stop) & continues)
        def _next_sequence() -> None:
            next_start, next_end = starts[following], ends[following]
            first_block = next_start // t.block
            cache.fetch(operands.next_table, first_block, next_start, next_end, 1 - slot)

        cache.wait(block, start, end, slot)
        # columns with tokens of the sequence that belong to this block
        base = cache.first_token(block)
        first_token = jnp.maximum(start, block * t.block)
        low, high = (first_token - base) * p.kv_heads, (end - base) * p.kv_heads
        values = buffers[-1]
        has_hidden = (low > 0) | (high < columns)
        pl.when(has_hidden)(lambda: clear_outside(p, values.at[slot], low, high))
        k = buffers[0][slot].reshape(columns, p.dim)
        x = masked_logits(p, t, operands, mask_ref, k, end, base, low, visible_tokens)
        m = jnp.maximum(m_old, jnp.max(x, axis=1, keepdims=True))
        alpha, probabilities = jnp.exp(m_old - m), jnp.exp(x - m)
        if p.layout.is_latent:
            v = k[:, : p.value_dim]
        else:
            v = values[slot].reshape(columns, values.shape[-1])
        slot_ref[0] = 1 - slot
        total = total * alpha + jnp.sum(probabilities, axis=1, keepdims=True)
        return m, total, acc * alpha + dot(p, probabilities, v, (1, 0))

    zeros = jnp.zeros((rows, 1), jnp.float32)
    acc = jnp.zeros((rows, p.value_dim), jnp.float32)
    m, total, acc = lax.fori_loop(first, stop, add_block, (zeros + FLOOR, zeros, acc))
    store_results(operands, o_ref, lse_ref, m, total, acc)


def row_factors(p: PagedProblem, arrays: Arrays) -> jax.Array:
    """Returns float32 ``[1 or batch, rows, 128]`` for the rows of a sequence: in lane LOGITS the
    factor of their logits, in VALUES that of their values, in SINKS the log of the sum of the
    exponentials of their sinks."""

    def per_row(x: jax.Array) -> jax.Array:
        """Returns values ``[1 or batch, 1 or kv heads or heads]`` as ``[1 or batch, rows]``."""
        x = jnp.repeat(x.astype(jnp.float32), p.heads // x.shape[1], axis=1)
        return jnp.tile(x, (1, p.tokens))

    no_scale = jnp.ones((1, 1), jnp.float32)
    factors = [per_row(arrays.get(name, no_scale)) for name in ("k_scale", "v_scale")]
    factors[0] = factors[0] * p.scale
    sinks = jnp.full((1, p.heads), HIDDEN, jnp.float32)
    if "sink" in arrays:
        sinks = jax.nn.logsumexp(arrays["sink"].astype(jnp.float32), axis=-1)
    factors.append(per_row(jnp.maximum(sinks, HIDDEN)))
    batch = max(x.shape[0] for x in factors)
    factors = [jnp.broadcast_to(x, (batch, x.shape[1])) for x in factors]
    return jnp.pad(jnp.stack(factors, axis=2), ((0, 0), (0, 0), (0, LANES - len(factors))))


def decode(work: Work, arrays: Arrays, cache_of: Callable[..., Any]) -> Arrays:
    """Returns o ``[batch, rows, value_dim]`` and, if the call returns it, lse ``[batch, rows]``.

    ``arrays`` are the operands of ``ejkernel.types.serving.operands``; ``cache_of`` makes the
    ``Pages`` or ``Rows`` of pools, buffers and semaphores.
    """
    p, t, chip = work.problem, work.tiles, work.target
    rows, columns = query_rows(p), t.block * p.kv_heads
    ends = jnp.clip(arrays["lens"], 0, p.capacity).astype(jnp.int32)
    starts = jnp.zeros_like(ends)
    if "begins" in arrays:
        starts = jnp.maximum(arrays["begins"], 0).astype(jnp.int32)
    if p.window_left is not None:
        starts = jnp.maximum(starts, ends - p.tokens - p.window_left)
    tables = jnp.clip(jnp.asarray(arrays["tables"]), 0, p.pages - 1).astype(jnp.int32)[:, None]
    # rows of tokens and heads, as they lie in memory
    page_rows = p.page_size * p.kv_heads
    pools = [arrays[name].reshape(p.pages, page_rows, -1) for name in ("k", "v") if name in arrays]
    nodes = None
    if p.tree_columns:
        nodes = encode_nodes(p, arrays["tree"], arrays.get("positions"))
        nodes = jnp.pad(nodes, ((0, 0), (0, -p.tokens % 16), (0, 0)))
    operands = Operands(tables, tables, arrays["q"], row_factors(p, arrays), nodes)
    o = result((p.batch, rows, p.value_dim), p.query_dtype, arrays["q"], *pools)
    lse = result((p.batch, rows, 1), "float32", arrays["q"], *pools) if p.return_lse else None

    def of_rows(x: Any) -> pl.BlockSpec | None:
        """The rows of a sequence; an array without batch is the same for all."""
        if x is None:
            return None
        return pl.BlockSpec((1, *x.shape[1:]), lambda b, *s: (b if x.shape[0] > 1 else 0, 0, 0))

    def table_spec(sequence: Callable[[Any], Any]) -> pl.BlockSpec:
        block = (1, 1, tables.shape[2])
        index = lambda b, *s: (sequence(b), 0, 0)  # noqa: E731
        return pl.BlockSpec(block, index, memory_space=pltpu.SMEM)

    specs = Operands(
        table=table_spec(lambda b: b),
        next_table=table_spec(lambda b: jnp.minimum(b + 1, p.batch - 1)),
        q=of_rows(operands.q),
        factors=of_rows(operands.factors),
        nodes=of_rows(nodes),
    )
    o, lse = pl.pallas_call(
        functools.partial(_kernel, p, t, cache_of),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(p.batch,),
            in_specs=[specs, [pl.BlockSpec(memory_space=pltpu.HBM) for _ in pools]],
            out_specs=[of_rows(o), of_rows(lse)],
            scratch_shapes=[
                [
                    pltpu.VMEM((2, t.pages, t.tokens * p.kv_heads, x.shape[2]), x.dtype)
                    for x in pools
                ],
                pltpu.SemaphoreType.DMA((2, len(pools))),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((rows, columns), jnp.float32),
            ],
        ),
        out_shape=[o, lse],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=chip.vmem_limit(t.vmem(p) * 3 // 2),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * p.batch * p.capacity * rows * (p.dim + p.value_dim),
            transcendentals=p.batch * p.capacity * rows,
            bytes_accessed=p.batch * p.capacity * p.kv_heads * p.token_bytes,
        ),
        interpret=chip.interpret,
        name="ejkernel_decode",
    )(starts, ends, operands, pools)
    return {"o": o} if lse is None else {"o": o, "lse": lse[..., 0]}

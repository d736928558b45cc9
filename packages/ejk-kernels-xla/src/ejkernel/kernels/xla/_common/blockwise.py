"""Blockwise softmax attention, forward and backward: the core of every flash-type operation.

    x = scale * q k^T (+ bias);  x = score_mod(x);  x = cap * tanh(x / cap);  x = -inf where hidden
    lse = log(sum_j exp(x) + sum_s exp(sink));  p = exp(x - lse);  o = drop(p) v

    forward   per query block, over the key blocks its mask visits: online softmax.
    backward  per key block, over the query blocks that see it: p is recomputed from the row's
              maximum and sum,
              dv += drop(p)^T do;  ds = p * (drop(do v^T) - delta);  dk += ds^T q;  dq += ds k,
              with delta = sum(do * o) - dlse per row. dq is summed in one float array that the
              loop carries, in a fixed order, so results repeat bit by bit.

Memory is O(q_len + kv_len) plus a tile per step; nothing is [q, k] but the user's own bias and
its gradient. Work is 2 matmuls forward and 5 backward per visited tile; hidden blocks are free.
Sources: Dao 2023, FlashAttention-2 (algorithms 1 and 2); Milakov and Gimelshein 2018.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common import blocks as blk
from ejkernel.kernels.xla._common import softmax as sm
from ejkernel.kernels.xla._common.dots import DotPolicy
from ejkernel.kernels.xla._common.dropout import Dropout
from ejkernel.kernels.xla._common.layout import Layout
from ejkernel.kernels.xla._common.mods import TileScores
from ejkernel.kernels.xla._common.tiles import Blocks
from ejkernel.ops.second_order import current_operation
from ejkernel.ops.varying import vary, varying_axes
from ejkernel.types.attention.rows import DEAD, Rows, RowScales, exponent
from ejkernel.types.masks.hidden import clear_unless


@dataclass(frozen=True)
class Spec:
    """Static parameters of one pass over the blocks. ``block_*`` are upper bounds."""

    scale: float
    block_q: int
    block_kv: int
    soft_cap: float | None = None
    dropout_prob: float = 0.0
    precision: Any = None
    logits_dtype: Any = jnp.float32
    operation: str = field(default_factory=current_operation)
    scored: bool = False  # by a score_mod

    @classmethod
    def from_problem(cls, problem: Any, blocks: Blocks) -> Spec:
        """Returns the parameters of one pass of a call, in blocks of the sizes ``blocks``."""
        return cls(
            scale=problem.softmax_scale,
            block_q=blocks.q,
            block_kv=blocks.kv,
            soft_cap=problem.logits_soft_cap,
            dropout_prob=problem.dropout_prob,
            precision=getattr(problem, "precision", None),
            logits_dtype=jnp.dtype(getattr(problem, "logits_dtype", jnp.float32)),
            scored=getattr(problem, "score_mod", None) is not None,
        )

    def layout(self, q: Any, k: Any) -> Layout:
        """The blocks of a call; ``prepare_mask`` must be given its block_q and block_kv."""
        return Layout.from_shapes(q, k, self.block_q, self.block_kv)

    def unit(self, bias: Any) -> float:
        """The natural logit of a logit of 1, as ``softmax`` has them."""
        if self.soft_cap is not None:
            return self.soft_cap
        plain = bias is None and not self.scored
        return abs(self.scale) if plain and self.scale else 1.0


class Grads(NamedTuple):
    """Gradients; dq, dk, dv, dbias in the accumulation dtype, None for an absent bias.

    ``dscores``: of the arrays that a score_mod captures, ``TileScores.floats``.
    """

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    dbias: jax.Array | None
    dscores: tuple[jax.Array, ...] = ()


class Logits(NamedTuple):
    """Logits of a tile; tanh(x / cap) with a cap; the pullback of a score_mod if asked for."""

    x: jax.Array
    tanh: jax.Array | None
    pull: Any


class _Tiles:
    """The logits of one tile and their derivative, shared by both passes."""

    def __init__(
        self, spec: Spec, q, k, v, bias, mask, dropout: Dropout | None, scores: TileScores | None
    ):
        self.spec, self.mask, self.dropout, self.scores = spec, mask, dropout, scores
        self.layout = spec.layout(q, k)
        options = {"precision": spec.precision, "at_least": spec.logits_dtype}
        self.dots = DotPolicy.for_arrays(q, k, v, **options)
        self.acc = self.dots.accumulate
        self.axes = varying_axes(*jax.tree.leaves((q, k, v, bias, mask)))
        self.bias = None if bias is None else self.layout.pad_tiles(bias)
        self.unit = spec.unit(bias)

    def zeros(self, *shape: int) -> jax.Array:
        return vary(jnp.zeros(shape, self.acc), self.axes)

    def logits(self, q, k, qi, ki, differentiate: bool = False) -> Logits:
        """Logits ``[b, hk, g, bq, bk]`` in units, with the terms of their derivative."""
        spec, layout = self.spec, self.layout
        x = layout.by_head(self.dots.rows_cols(q, k))
        t = pull = None
        visible = self.mask.tile(qi, ki)
        if self.bias is None and spec.soft_cap is None and self.scores is None and spec.scale:
            x = x if spec.scale > 0 else -x
        else:
            x = x * spec.scale
            if self.bias is not None:
                tile = blk.take_tile(self.bias, qi, ki, layout.block_q, layout.block_kv)
                x = x + sm.narrowed(layout.grouped(tile), self.acc)
            if self.scores is not None:
                if differentiate:
                    x, pull = self.scores.with_pullback(x, qi, ki)
                else:
                    x = self.scores(x, qi, ki)
                if visible is not None:  # a function may be NaN where no pair is visible
                    x = jnp.where(layout.grouped(visible), x, 0.0)
            if spec.soft_cap is not None:
                x = t = jnp.tanh(x / spec.soft_cap)
        if visible is not None:
            x = jnp.where(layout.grouped(visible), x, -jnp.inf)
        visited = getattr(self.mask, "visited", None)
        if visited is not None:
            x = blk.hide_unvisited(x, visited(qi, ki))
        return Logits(x, t, pull)

    def dropout_keep_mask(self, qi, ki) -> jax.Array | None:
        """bool ``[b, hk, g, bq, bk]``; None without dropout."""
        if self.dropout is None:
            return None
        layout = self.layout
        rows = _slice(self.dropout.rows, qi, layout.block_q, layout.nq)
        cols = _slice(self.dropout.cols, ki, layout.block_kv, layout.nk)
        return layout.grouped(self.dropout.keep(self.spec.dropout_prob, rows, cols))

    @property
    def keep_scale(self) -> float:
        return 1.0 / (1.0 - self.spec.dropout_prob)


def _slice(x: jax.Array, number: Any, block: int, count: int) -> jax.Array:
    x = jnp.pad(x, (0, count * block - x.shape[0]))
    return x if count == 1 else jax.lax.dynamic_slice_in_dim(x, number * block, block)


def _seen(mask: blk.BlockMask, *keys: jax.Array) -> tuple[jax.Array, ...]:
    """Returns ``keys`` with zeros where no query sees the key, if the mask tells."""
    seen = getattr(mask, "seen_keys", None)
    return keys if seen is None else clear_unless(seen(), *keys)


def _flat(blocks: jax.Array) -> jax.Array:
    """``[n, b, hk, rows, c]`` without axes of size 1; ``Layout.tile`` undoes it for a block.

    XLA gives axes of size 1 inside a loop's array another layout and then copies to undo it. The
    other axes stay apart: to merge sharded ones would gather them.
    """
    n, *rows, c = blocks.shape
    return blocks.reshape(n, *(size for size in rows if size != 1), c)


def forward(
    spec: Spec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None = None,
    *,
    mask: blk.BlockMask,
    dropout: Dropout | None = None,
    scores: TileScores | None = None,
) -> tuple[jax.Array, Rows]:
    """Output and row normaliser, both in the accumulation dtype.

    Args:
        q, k, v: ``[b, q, h, d]``, ``[b, k, hk, d]``, ``[b, k, hk, dv]``, h a multiple of hk.
        bias: ``[#b, #h, #q, k]`` or None.
        mask: prepared for ``spec.layout(q, k)``'s blocks.
        dropout: None = keep everything.
        scores: the score_mod, if ``spec.scored``.

    Returns:
        o ``[b, q, h, dv]``, 0 for a row that sees no key, and the normaliser ``[b, q, h]`` in
        ``spec.unit(bias)``. ``softmax.merge`` joins such pairs over disjoint keys;
        ``softmax.finalize_rows`` counts the sinks.
    """
    tiles = _Tiles(spec, q, k, v, bias, mask, dropout, scores)
    layout, dv = tiles.layout, v.shape[-1]
    if layout.empty:
        rows = (layout.batch, layout.q_len, q.shape[2])
        return tiles.zeros(*rows, dv), Rows(tiles.zeros(*rows) - jnp.inf, tiles.zeros(*rows))
    q_blocks = _flat(layout.split_q(q))
    k_blocks, v_blocks = (_flat(layout.split_kv(x)) for x in _seen(mask, k, v))
    state_shape = (layout.batch, layout.kv_heads, layout.groups, layout.block_q)

    def query_block(qi: Any, _: None, q_tile: jax.Array):
        q_tile = layout.tile(q_tile)

        def visit_kv(t: Any, state: sm.RowState) -> sm.RowState:
            ki = blk.block_number(mask, "kv_index", qi, t)
            x = tiles.logits(q_tile, layout.tile(blk.take_block(k_blocks, ki)), qi, ki).x
            m, rescale, p = sm.shift(state.m, x, tiles.unit)
            keep = tiles.dropout_keep_mask(qi, ki)
            weights = p if keep is None else jnp.where(keep, p, 0.0)
            v_tile = layout.tile(blk.take_block(v_blocks, ki))
            new = tiles.dots.weigh(layout.by_row(weights), v_tile)
            acc = state.acc * rescale[..., None] + layout.by_head(new)
            return sm.RowState(acc, m, state.l * rescale + p.sum(-1))

        start = sm.RowState(
            tiles.zeros(*state_shape, dv),
            tiles.zeros(*state_shape) - jnp.inf,
            tiles.zeros(*state_shape),
        )
        o, rows = sm.finish(blk.visit(mask.kv_range(qi), visit_kv, start, spec.operation))
        if dropout is not None:
            o = o * tiles.keep_scale
        return None, (o, rows)

    order = getattr(mask, "q_order", None)
    _, (o, rows) = blk.scan_blocks(query_block, None, q_blocks, layout.nq, order)
    return layout.join_q(o), Rows(*(layout.join_rows(x) for x in rows))


def row_delta(o: jax.Array, do: jax.Array, dlse: jax.Array | None, dtype: Any) -> jax.Array:
    """delta ``[b, q, h]`` = sum(do * o) - dlse, the term that the softmax derivative subtracts."""
    delta = (do.astype(dtype) * o.astype(dtype)).sum(-1)
    return delta if dlse is None else delta - dlse.astype(dtype)


class QueryBlocks(NamedTuple):
    """Blocks of the rows that a backward pass reads; ``columns`` are transposed copies.

    XLA's CPU matmul is three times slower with a transposed left operand, so dk and dv are summed
    transposed, from these copies.
    """

    q: jax.Array
    do: jax.Array
    q_columns: jax.Array
    do_columns: jax.Array
    m: jax.Array
    log2_scale: jax.Array
    delta: jax.Array


def _split_queries(layout: Layout, q: Any, do: Any, rows: RowScales, delta: Any) -> QueryBlocks:
    # a row without keys has weights of 0, and 0 * NaN would reach the keys' gradients
    q, do = (jnp.where(rows.alive[..., None], x, jnp.zeros((), x.dtype)) for x in (q, do))
    return QueryBlocks(
        *(_flat(layout.split_q(x)) for x in (q, do)),
        *(_flat(layout.split_q(x).swapaxes(-1, -2)) for x in (q, do)),
        layout.split_rows(rows.m, 0.0),
        layout.split_rows(rows.log2_scale, DEAD),
        layout.split_rows(jnp.where(rows.alive, delta, 0.0), 0.0),
    )


def backward(
    spec: Spec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None = None,
    *,
    mask: blk.BlockMask,
    dropout: Dropout | None = None,
    scores: TileScores | None = None,
    row_scales: RowScales,
    delta: jax.Array,
    do: jax.Array,
) -> Grads:
    """Gradients of ``forward`` at the rows' final normaliser.

    ``row_scales`` and ``delta`` ``[b, q, h]`` belong to the full row (all parts, sinks included),
    so the gradients of parts over disjoint keys simply add up. ``softmax.sink_gradient`` computes
    the gradient of the sinks.
    """
    tiles = _Tiles(spec, q, k, v, bias, mask, dropout, scores)
    tiles.axes = tiles.axes | varying_axes(*row_scales[:2], delta, do)
    layout, acc = tiles.layout, tiles.acc
    dscores = () if scores is None else tuple(tiles.zeros(*x.shape) for x in scores.floats)
    if layout.empty:
        dbias = None if bias is None else tiles.zeros(*bias.shape)
        return Grads(*(tiles.zeros(*x.shape) for x in (q, k, v)), dbias, dscores)
    q_blocks = _split_queries(layout, q, do, row_scales, delta)
    row_shape = (layout.batch, layout.kv_heads, layout.groups, layout.block_q, 1)

    def key_block(ki: Any, carry: Any, tile: tuple[jax.Array, jax.Array]):
        k_tile, v_tile = (layout.tile(x) for x in tile)

        def visit_q(t: Any, state: Any):
            dk, dv, dq, dbias, dscores = state
            qi = blk.block_number(mask, "q_index", ki, t)
            block = QueryBlocks(*(blk.take_block(x, qi) for x in q_blocks))
            m, log2_scale, block_delta = (
                x.reshape(row_shape) for x in (block.m, block.log2_scale, block.delta)
            )
            logits = tiles.logits(layout.tile(block.q), k_tile, qi, ki, differentiate=True)
            p = jnp.exp2(exponent(logits.x, m, tiles.unit) + log2_scale)
            dp = layout.by_head(tiles.dots.rows_cols(layout.tile(block.do), v_tile))
            weights, keep = p, tiles.dropout_keep_mask(qi, ki)
            if keep is not None:
                weights = jnp.where(keep, p * tiles.keep_scale, 0.0)
                dp = jnp.where(keep, dp * tiles.keep_scale, 0.0)
            ds = p * (dp - block_delta)
            if logits.tanh is not None:
                ds = ds * (1.0 - logits.tanh * logits.tanh)
            if logits.pull is not None:
                ds, new = logits.pull(ds)
                ds = jnp.where(p > 0.0, ds, 0.0)
                dscores = tuple(a + b.astype(acc) for a, b in zip(dscores, new, strict=True))
            if dbias is not None:
                dbias = blk.add_tile(dbias, qi, ki, _sum_like(ds, layout, dbias.shape))
            ds = layout.by_row(ds)
            dv = dv + tiles.dots.weigh(layout.tile(block.do_columns), layout.by_row(weights))
            dk = dk + tiles.dots.weigh(layout.tile(block.q_columns), ds)
            dq_tile = tiles.dots.weigh(ds, k_tile)
            dq = blk.add_block(dq, qi, dq_tile.reshape(dq.shape[1:]))
            return dk, dv, dq, dbias, dscores

        columns = ((*x.shape[:2], x.shape[3], x.shape[2]) for x in (k_tile, v_tile))
        start = (*(tiles.zeros(*shape) for shape in columns), *carry)
        dk, dv, *carry = blk.visit(mask.q_range(ki), visit_q, start, spec.operation)
        return tuple(carry), (dk.swapaxes(-1, -2), dv.swapaxes(-1, -2))

    dbias = None if tiles.bias is None else tiles.zeros(*tiles.bias.shape)
    carry = (tiles.zeros(*q_blocks.q.shape), dbias, dscores)
    blocks = tuple(_flat(layout.split_kv(x)) for x in _seen(mask, k, v))
    order = getattr(mask, "kv_order", None)
    (dq, dbias, dscores), (dk, dv) = blk.scan_blocks(key_block, carry, blocks, layout.nk, order)
    if dbias is not None:
        dbias = dbias[:, :, : layout.q_len, : layout.kv_len]
    return Grads(
        layout.join_q(dq) * jnp.asarray(spec.scale, acc),
        layout.join_kv(dk) * jnp.asarray(spec.scale, acc),
        layout.join_kv(dv),
        dbias,
        dscores,
    )


def _sum_like(ds: jax.Array, layout: Layout, shape: tuple[int, ...]) -> jax.Array:
    """``[b, hk, g, bq, bk]`` summed to ``[#b, #h, #bq, bk]``."""
    b, h, rows = shape[:3]
    if rows == 1:
        ds = ds.sum(3, keepdims=True)
    if h == 1:
        ds = ds.sum((1, 2))[:, None]
    else:
        ds = ds.reshape(ds.shape[0], h, *ds.shape[3:])
    return ds.sum(0, keepdims=True) if b == 1 else ds

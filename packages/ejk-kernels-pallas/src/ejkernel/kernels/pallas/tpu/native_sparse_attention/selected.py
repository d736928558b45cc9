"""The selected branch as one differentiable step: spans of keys, and what gradients need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.pallas.tpu.native_sparse_attention.backward import selected_backward
from ejkernel.kernels.pallas.tpu.native_sparse_attention.forward import selected_forward
from ejkernel.kernels.pallas.tpu.native_sparse_attention.lists import (
    row_sums,
    row_values,
    scaled_rows,
    tile_lists,
    tile_rows,
    token_rows,
    tokens_of_blocks,
    whole_blocks,
)
from ejkernel.kernels.pallas.tpu.native_sparse_attention.problem import Problem, Tiles
from ejkernel.kernels.pallas.tpu.native_sparse_attention.steps import FLOOR
from ejkernel.ops.differentiate import Arrays, Work, differentiable, same_axes
from ejkernel.ops.varying import zeros
from ejkernel.types.attention.softmax import name_residuals


class _Residuals:
    """Names of the residuals of the forward pass."""

    @staticmethod
    def name_residuals(outputs: tuple[Any, ...], saved: Any) -> tuple[tuple[Any, ...], Any]:
        o, base = name_residuals(*outputs, saved)
        return (o,), base


class Selected:
    """Attention of every token over the blocks of its list.

    ``arrays``: q, k, v, ``chosen [b, s, hk, slots]`` with -1 for no block and each block once, and
    ``blocks``, the ``Blocks`` of the row. q, k and v have gradients. Where the keys of a head do
    not fit into vector memory, spans of them are computed one after the other.
    """

    call = _Residuals
    forward_again = False

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, t, chip = work.problem, work.tiles, work.target
        spans = _Spans(work, arrays, t.span)
        q = tile_rows(p, t, arrays["q"], p.dims[0])
        dtype = p.dtype if spans.count == 1 else "float32"

        def attend(first: Any, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
            tables = spans.tables(first)
            return tuple(selected_forward(p, t, chip, *tables, (q, k, v), dtype))

        if spans.count == 1:
            o, m, total = attend(0, *(x[0] for x in spans.keys))
        else:
            values = (q.shape[0], p.kv_heads, t.tile_count(p), 1, t.tokens * p.group)
            none = zeros(values, "float32", q)
            shape = t.rows_shape(p, q.shape[0], p.dims[1])
            start = zeros(shape, "float32", q), none + FLOOR, none

            def add(rows: Any, *span: Any) -> Any:
                return _merge(p, t, rows, attend(*span)), None

            o, m, total = spans.scan(add, start)[0]
        seen = total != 0.0  # NaN has seen something
        log = jnp.log(jnp.where(seen, total, 1.0))
        base = jnp.where(seen, m + log * (1.0 / p.unit), -FLOOR)
        return (token_rows(p, t, o.astype(p.dtype), p.value_dim),), base

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        p, t, chip = work.problem, work.tiles, work.target
        (o,), (do,) = outputs, cotangents
        delta = row_sums(t, do, o)
        rows = (
            tile_rows(p, t, arrays["q"], p.dims[0]),
            tile_rows(p, t, do.astype(p.dtype), p.dims[1]),
            saved,
            row_values(p, t, delta),
        )
        spans = _Spans(work, arrays, t.span_backward)
        dtype = p.dtype if spans.count == 1 else "float32"

        def pull(first: Any, k: jax.Array, v: jax.Array) -> list[jax.Array]:
            return selected_backward(p, t, chip, *spans.tables(first), (*rows, k, v), dtype)

        if spans.count == 1:
            dq, *gradients = pull(0, *(x[0] for x in spans.keys))
            gradients = [x[None] for x in gradients]
        else:

            def add(total: jax.Array, *span: Any) -> Any:
                dq, *gradients = pull(*span)
                return total + dq, gradients

            dq, gradients = spans.scan(add, zeros(rows[0].shape, "float32", rows[0]))
        dk, dv = (spans.join(x) for x in gradients)
        blocks = arrays["blocks"]
        return {
            "q": token_rows(p, t, dq, p.dim),
            "k": tokens_of_blocks(p, dk, blocks, p.dim) * p.scale,
            "v": tokens_of_blocks(p, dv, blocks, p.value_dim),
        }


def _merge(p: Problem, t: Tiles, rows: Any, span: Any) -> tuple[jax.Array, ...]:
    """Returns o, m and l of rows over the keys of both operands."""
    (o, m, total), (o_span, m_span, total_span) = rows, span
    top = jnp.maximum(m, m_span)
    totals = [
        x * jnp.exp2((m_part - top) * p.log2_unit)
        for x, m_part in ((total, m), (total_span, m_span))
    ]
    both = totals[0] + totals[1]
    inverse = 1.0 / jnp.where(both != 0.0, both, 1.0)
    parts = zip((o, o_span), totals, strict=True)
    first, second = (scaled_rows(p, t, part, x * inverse) for part, x in parts)
    return first + second, top, both


class _Spans:
    """The keys and values of a call in spans of whole blocks.

    Attributes:
        count: number of spans.
        keys: k and v ``[spans, b, hk, rows, d]``.
    """

    def __init__(self, work: Work, arrays: Arrays, span: int) -> None:
        p, self.work, self.arrays, self.span = work.problem, work, arrays, span
        self.count = -(-p.blocks // span)
        self.keys = tuple(
            self._split(whole_blocks(p, arrays[name], arrays["blocks"], dim, self.count * span))
            for name, dim in zip("kv", p.dims, strict=True)
        )

    def _split(self, x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(*x.shape[:2], self.count, -1, x.shape[3]), 2, 0)

    def join(self, x: jax.Array) -> jax.Array:
        """Returns ``[spans, b, hk, rows, d]`` as whole blocks ``[b, hk, rows, d]``."""
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(*x.shape[:2], -1, x.shape[4])

    def tables(self, first: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the lists and rows of the span that starts at block ``first``."""
        p, t, arrays = self.work.problem, self.work.tiles, self.arrays
        return tile_lists(p, t, arrays["chosen"], arrays["blocks"], first, self.span)

    def scan(self, step: Callable[..., Any], carry: Any) -> Any:
        """Runs ``step(carry, first block, k, v)`` over the spans."""
        first = jnp.arange(self.count, dtype=jnp.int32) * self.span
        return lax.scan(lambda carry, span: step(carry, *span), carry, (first, *self.keys))


selected = Selected()


def attend(work: Work, arrays: Arrays) -> jax.Array:
    """Returns o ``[b, s, h, dv]`` in the dtype of q, k and v.

    ``arrays``: see ``Selected``; ``work``: of the full operation with the problem of this branch.
    """
    return differentiable(replace(work, kernel=selected), same_axes(arrays))[0]

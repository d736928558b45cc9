"""The selected branch and its gradients: spans of keys, rows and lists as the kernels read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.pallas.tpu.native_sparse_attention.backward import selected_backward
from ejkernel.kernels.pallas.tpu.native_sparse_attention.forward import selected_forward
from ejkernel.kernels.pallas.tpu.native_sparse_attention.lists import (
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
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.varying import zeros


def attend(work: Work, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Returns o ``[b, s, h, dv]`` of every token over the blocks of its list, and ``base``.

    Base ``[b, hk, tiles, 1, rows]`` is what gradients need: the lse of a row as a raw score.

    ``arrays``: q, k, v in one dtype, ``chosen [b, s, hk, slots]`` with -1 for no block and each
    block once, and ``blocks``, the ``Blocks`` of the row. Where the keys of a head do not fit into
    vector memory, spans of them are computed one after the other.
    """
    p, t, chip = work.problem, work.tiles, work.target
    spans = _Spans(work, arrays, t.span)
    q = tile_rows(p, t, arrays["q"], p.dims[0])
    dtype = p.dtype if spans.count == 1 else "float32"

    def attend_span(first: Any, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        tables = spans.tables(first)
        return tuple(selected_forward(p, t, chip, *tables, (q, k, v), dtype))

    if spans.count == 1:
        o, m, total = attend_span(0, *(x[0] for x in spans.keys))
    else:
        values = (q.shape[0], p.kv_heads, t.tile_count(p), 1, t.tokens * p.group)
        none = zeros(values, "float32", q)
        shape = t.rows_shape(p, q.shape[0], p.dims[1])
        start = zeros(shape, "float32", q), none + FLOOR, none

        def add(rows: Any, *span: Any) -> Any:
            return _merge(p, t, rows, attend_span(*span)), None

        o, m, total = spans.scan(add, start)[0]
    seen = total != 0.0  # NaN has seen something
    log = jnp.log(jnp.where(seen, total, 1.0))
    base = jnp.where(seen, m + log * (1.0 / p.unit), -FLOOR)
    return token_rows(p, t, o.astype(p.dtype), p.value_dim), base


def pull_back(
    work: Work,
    arrays: Arrays,
    base: jax.Array,
    do: jax.Array,
    delta: jax.Array,
    gate: jax.Array | None,
    others: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dq ``[b, s, h, d]``, dk and dv ``[b, s, hk, ...]``.

    Args:
        arrays, base: as in ``attend``.
        do: gradient of the gated output ``[b, s, h, dv]``.
        delta, gate: ``[b, s, h]``.
        others: dq of the other branches, to which this one's is added.
    """
    p, t, chip = work.problem, work.tiles, work.target
    q = tile_rows(p, t, arrays["q"], p.dims[0])
    do = tile_rows(p, t, do, p.dims[1])
    values = (
        base,
        row_values(p, t, delta),
        None if gate is None else row_values(p, t, gate),
    )
    others = None if others is None else tile_rows(p, t, others, p.dims[0])
    spans = _Spans(work, arrays, t.span_backward)

    def pull_span(
        first: Any, k: jax.Array, v: jax.Array, others: Any, dtype: str
    ) -> list[jax.Array]:
        tables = spans.tables(first)
        return selected_backward(p, t, chip, *tables, (q, do, k, v), values, others, dtype)

    if spans.count == 1:
        dq, *gradients = pull_span(0, *(x[0] for x in spans.keys), others, p.dtype)
        gradients = [x[None] for x in gradients]
    else:

        def add(total: jax.Array, *span: Any) -> Any:
            dq, *gradients = pull_span(*span, None, "float32")
            return total + dq, gradients

        start = zeros(q.shape, "float32", q)
        dq, gradients = spans.scan(add, start if others is None else start + others)
        dq = dq.astype(p.dtype)
    dk, dv = (spans.join(x) for x in gradients)
    blocks = arrays["blocks"]
    return (
        token_rows(p, t, dq, p.dim),
        tokens_of_blocks(p, dk, blocks, p.dim) * p.scale,
        tokens_of_blocks(p, dv, blocks, p.value_dim),
    )


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

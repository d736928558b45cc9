"""Shared by the backward kernels: operands, score matmuls of a tile, p and ds, keys' results."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.common.masks import finite
from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout
from ejkernel.kernels.pallas.tpu.flash_attention.specs import Specs
from ejkernel.kernels.pallas.tpu.flash_attention.steps import TilePosition

ScorePair = tuple[jax.Array, jax.Array]
"""q k^T and do v^T of a tile, or p and ds, or both transposed."""
ValuePairs = list[tuple[jax.Array, jax.Array]]
"""Values of queries and of keys by token that element masks compare."""


class Operands(NamedTuple):
    """The operands of a backward kernel, their block specs, or their refs in a grid step.

    Attributes:
        q, k, v, do: blocks ``[1, 1, rows, d]``.
        row_values: lse and delta of every query row, then its gate if the layout is ``gated``;
            ``[1, 1, 1, queries]`` each.
        q_rows, kv_rows: values that element masks compare, ``[1, 1, tokens]`` each.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    row_values: list[Any]
    q_rows: list[Any]
    kv_rows: list[Any]

    def scores(self, layout: Layout, queries_on_lanes: bool, position: TilePosition) -> ScorePair:
        """Returns q k^T and do v^T of a tile, or both transposed, ``[keys, queries]``."""
        queries, keys = position
        q, do = self.q[0, 0, queries], self.do[0, 0, queries]
        k, v = self.k[0, 0, keys], self.v[0, 0, keys]
        if queries_on_lanes:
            return layout.dot(k, q, (1, 1)), layout.dot(v, do, (1, 1))
        return layout.dot(q, k, (1, 1)), layout.dot(do, v, (1, 1))

    def statistics(self, queries: Any) -> tuple[jax.Array, ...]:
        """Returns the row values of some queries ``[1, queries]``."""
        return tuple(ref[0, 0, :, queries] for ref in self.row_values)

    def rows_to_add(
        self, layout: Layout, queries: Any, mask: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns q and do of some queries as operands of the matmuls of dk and dv.

        Under a mask, weights and ds of a gated row have its NaN where the row sees a key, and are 0
        elsewhere, which a NaN of q or do would undo.
        """
        rows = self.q[0, 0, queries], self.do[0, 0, queries]
        if mask is None or not layout.gated:
            return rows
        q, do = (finite(x.astype(jnp.float32)).astype(x.dtype) for x in rows)
        return q, do


def kernel_inputs(
    specs: Specs, arrays: tuple[jax.Array, ...], pairs: ValuePairs
) -> tuple[list[Operands], list[Operands]]:
    """Returns the operands of a kernel as its one argument, and their block specs."""
    d, dv = specs.layout.dim, specs.layout.value_dim
    qkv_do, row_values = arrays[:4], list(arrays[4:])
    query_values, key_values = ([pair[side] for pair in pairs] for side in (0, 1))
    blocks = Operands(
        *(specs.query(d), specs.key(d), specs.key(dv), specs.query(dv)),
        [specs.statistic() for _ in row_values],
        [specs.query_values(x) for x in query_values],
        [specs.key_values(x) for x in key_values],
    )
    return [Operands(*qkv_do, row_values, query_values, key_values)], [blocks]


def key_accumulators(layout: Layout) -> list[Any]:
    """Returns the scratch of dk and dv of a block of keys, ``[keys, d]`` or ``[d, keys]``."""
    keys, dims = layout.tiles.block_kv, (layout.dim, layout.value_dim)
    shapes = [(d, keys) if layout.tiles.transposed else (keys, d) for d in dims]
    return [pltpu.VMEM(shape, jnp.float32) for shape in shapes]


def key_outputs(specs: Specs) -> list[tuple[pl.BlockSpec, tuple[int, ...], str]]:
    """Returns block specs, shapes and dtypes of dk and dv."""
    layout, p = specs.layout, specs.layout.problem
    return [
        (specs.key(d), layout.shape(p.kv_heads, layout.kv_padded, d), p.dtype)
        for d in (layout.dim, layout.value_dim)
    ]


def store_key_gradients(layout: Layout, dk_ref: Any, dv_ref: Any, dk_acc: Any, dv_acc: Any) -> None:
    """Stores dk and dv of a block of keys."""
    dk, dv = dk_acc[...] * layout.problem.scale, dv_acc[...]
    for ref, gradient in ((dk_ref, dk), (dv_ref, dv)):
        ref[0, 0] = (gradient.T if layout.tiles.transposed else gradient).astype(ref.dtype)


def tile_gradients(
    layout: Layout,
    scores: ScorePair,
    mask: jax.Array | None,
    statistics: tuple[jax.Array, ...],
    dtype: Any,
) -> ScorePair:
    """Returns p and ds of a tile, as operands of the next matmuls.

        p = exp2(x - lse);  ds = p * (dp - delta) * (1 - tanh^2)

    ``scores`` are q k^T and do v^T, or both transposed. ``statistics``: lse (as
    ``Layout.raw_logits``), delta and the gate, by which p is multiplied; they broadcast.
    """
    lse, delta, *gates = statistics
    x = layout.raw_logits(scores[0])
    p = jnp.exp2((x - lse) * layout.log2_unit)
    for gate in gates:
        p = p * (gate + 0.0 * delta)  # NaN where do has one: see ``rows_to_add``
    if mask is not None:
        p = jnp.where(mask, p, 0.0)
    ds = p * (scores[1] - delta)
    if gates and mask is not None:
        ds = jnp.where(mask, ds, 0.0)  # 0 * NaN
    if layout.problem.soft_cap is not None:
        ds = ds * (1.0 - x * x)
    return (p, ds) if layout.tiles.unpacked else (p.astype(dtype), ds.astype(dtype))

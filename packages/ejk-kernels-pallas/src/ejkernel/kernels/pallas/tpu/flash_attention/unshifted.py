"""Flash attention forward on a TPU without maxima, for matrix units of 256 columns.

    o = exp(x) v / sum of exp(x)

Tiles are ``[keys, queries]`` and the output is accumulated as ``[d, queries]``: v^T p has as many
columns as there are queries, where p v has d of them and fills a quarter or half of a wide unit.
Probabilities enter that matmul as loaded weights, which wait for every row of a tile; they can
because nothing waits for a maximum: they are exp of the logit as it is, in float32 and bfloat16 of
the same range. Sums are added by sublane, once for a register.

A block of queries one of whose sums leaves ``MIN_SUM`` to ``MAX_SUM``, or whose output is not
finite, has logits for which this is not exact. It is computed again at its last step, with maxima:
keys and values are copied once more, one block after the other. This takes several times as long,
for the blocks concerned alone.

Source: derived from ``forward``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.common.units import sign, unit
from ejkernel.kernels.pallas.tpu.common.chip import LANES, SUBLANES
from ejkernel.kernels.pallas.tpu.flash_attention.forward import (
    add_strip,
    begin_rows,
    finish_rows,
)
from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout
from ejkernel.kernels.pallas.tpu.flash_attention.specs import (
    Specs,
    launch_kernel,
    table_entry,
    visited_block,
)
from ejkernel.kernels.pallas.tpu.flash_attention.steps import Step, TilePosition, step_of
from ejkernel.types.attention.problem import LOG2E

# A sum above MIN_SUM has lost nothing of importance to float32's smallest values, and below
# MAX_SUM the output is finite for all values up to 2^18.
MIN_SUM, MAX_SUM = 2.0**-100, 2.0**110
MAX_TILE = 512  # keys and queries of a tile: fewer leave matrix units waiting, more spill


def unshifted_layout(layout: Layout) -> Layout | None:
    """Returns the layout of a call that has this form; None: bands have to be its only mask."""
    p, t = layout.problem, layout.tiles
    supported = (
        p.dtype == "bfloat16"
        and layout.chip.mxu > LANES
        and p.soft_cap is None
        and sign(p) > 0.0
        and not layout.pair_names
        and not layout.listed
    )
    if not supported:
        return None
    rows, columns = min(MAX_TILE, t.block_kv), min(MAX_TILE, t.block_q)
    return replace(layout, tiles=replace(t, rows=rows, columns=columns, transposed=True))


def _kernel(
    layout: Layout,
    table: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    k_all: Any,
    v_all: Any,
    o_ref: Any,
    lse_ref: Any,
    base_ref: Any,
    l_ref: Any,
    acc_ref: Any,
    recompute_scratch: list[Any],
) -> None:
    b, h, qi, step_index = (pl.program_id(axis) for axis in range(4))
    first = table_entry(layout, layout.q_blocks, b, h, qi)
    step = step_of(layout, table, first, qi, step_index, queries_on_lanes=True)

    @pl.when(step_index == 0)
    def _begin() -> None:
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def scores(position: TilePosition) -> jax.Array:
        queries, keys = position
        return layout.dot(k_ref[0, 0, keys], q_ref[0, 0, queries], (1, 1))

    def add(position: TilePosition, tile_scores: jax.Array, mask: jax.Array | None = None) -> None:
        queries, keys = position
        p = jnp.exp2(tile_scores * layout.log2_unit)
        if mask is not None:
            p = jnp.where(mask, p, 0.0)
        by_sublane = p.reshape(keys.size // SUBLANES, SUBLANES, queries.size)
        l_ref[:, queries] += jnp.sum(by_sublane, axis=0)
        v = v_ref[0, 0, keys]
        acc_ref[:, queries] += layout.dot(v.T, p.astype(v.dtype), (1, 0))

    def add_masked(position: TilePosition, tile_scores: jax.Array) -> None:
        add(position, tile_scores, step.mask(position, (), ()))

    step.run(scores, add, add_masked)

    @pl.when(step_index == layout.steps - 1)
    def _end() -> None:
        total = jnp.sum(l_ref[...], axis=0, keepdims=True)
        acc = acc_ref[...]
        is_exact = (total >= MIN_SUM) & (total <= MAX_SUM)
        is_exact &= jnp.max(jnp.abs(acc), axis=0, keepdims=True) < jnp.inf
        all_exact = jnp.min(jnp.where(is_exact, 1.0, 0.0))  # 1 or 0: no minimum of booleans
        o_ref[0, 0] = (acc / total).T.astype(o_ref.dtype)
        lse = jnp.log2(total) * (1.0 / LOG2E)
        lse_ref[0, 0], base_ref[0, 0] = lse, lse * (1.0 / unit(layout.problem))

        @pl.when(all_exact == 0.0)
        def _recompute() -> None:
            outputs = o_ref, lse_ref, base_ref
            kv_head = b, h // layout.problem.group
            head_kv = (
                layout.head_of(k_all, *kv_head, layout.dim),
                layout.head_of(v_all, *kv_head, layout.value_dim),
            )
            _recompute_with_maxima(
                layout, table, first, step, q_ref, head_kv, outputs, recompute_scratch
            )


def _recompute_with_maxima(
    layout: Layout,
    table: Any,
    first: Any,
    step: Step,
    q_ref: Any,
    head_kv: tuple[Any, Any],
    outputs: tuple[Any, Any, Any],
    scratch: list[Any],
) -> None:
    """Computes a block of queries with maxima, part after part of its key blocks.

    ``head_kv``: all keys and values of the head, in device memory. ``scratch``: a block of keys and
    one of values; maximum, sum and output of rows.
    """
    k_ref, v_ref, *rows = scratch
    begin_rows(layout, *rows)

    def visit_block(step_index: Any, carry: None) -> None:
        ki = visited_block(layout, table, first, step_index)
        keys = pl.ds(pl.multiple_of(ki * layout.tiles.block_kv, LANES), layout.tiles.block_kv)
        for source, target in zip(head_kv, (k_ref, v_ref), strict=True):
            pltpu.sync_copy(source.at[keys], target)
        block_step = replace(step, ki=ki, queries_on_lanes=False)

        def visit_part(i: Any, j: Any) -> None:
            edge_q, edge_kv = layout.tiles.edge_q, layout.tiles.edge_kv
            queries, part = pl.ds(i, edge_q), pl.ds(j, edge_kv)
            x = layout.dot(q_ref[0, 0, queries], k_ref[part], (1, 1))
            mask = block_step.mask((queries, part), (), ())
            add_strip(layout, x, mask, v_ref[part], queries, *rows)

        block_step.visit_parts(visit_part)

    lax.fori_loop(0, step.stop - table[first], visit_block, None)
    finish_rows(layout, None, rows, outputs)


def forward_unshifted(layout: Layout, table: Any, arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
    """Returns what ``forward.forward`` returns, of q, k and v."""
    p, t = layout.problem, layout.tiles
    d, dv = layout.dim, layout.value_dim
    specs = Specs(layout)
    lse = base = specs.statistic_output()
    dtype = arrays[0].dtype
    return launch_kernel(
        _kernel,
        "ejkernel_flash_fwd",
        specs,
        table,
        [*arrays, *arrays[1:]],
        [
            *(specs.query(d), specs.key(d), specs.key(dv)),
            *(pl.BlockSpec(memory_space=pl.ANY) for _ in arrays[1:]),
        ],
        [(specs.query(dv), layout.shape(p.heads, layout.q_padded, dv), p.dtype), lse, base],
        [
            *(pltpu.VMEM((n, t.block_q), jnp.float32) for n in (SUBLANES, dv)),
            [
                *(pltpu.VMEM((t.block_kv, width), dtype) for width in (d, dv)),
                *(pltpu.VMEM((t.block_q, width), jnp.float32) for width in (LANES, LANES, dv)),
            ],
        ],
        accumulators=2,
        columns=d + dv,
        moved=2 * arrays[0].nbytes,
    )

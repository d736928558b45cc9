"""Flash attention forward on a TPU.

    x = scale * q k^T;  x = cap * tanh(x / cap);  o = exp(x - lse) v

Grid (batch, head, query block, step): a step multiplies one block of queries with one block of
keys that it can see; the block indices come from a table in scalar memory, so blocks
outside the mask are neither fetched nor computed. Within a step the queries are cut into strips of
``rows``: the matmuls q k^T of a strip are issued before the exponentials of the strip above it,
so that the matrix units never wait for a maximum.

Bound: 4 q k d FLOPs a head against 2 (q + k) d elements of memory: at 4096 x 4096 x 128 that is
2048 FLOPs a byte, far above what any TPU can load (240 on v5e, 560 on v6e), so the matrix units
are the limit; on 256-column units head dim 128 half fills them in both matmuls.

Sources: Milakov and Gimelshein 2018 (online softmax); Dao 2023, FlashAttention-2, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.common.units import unit
from ejkernel.kernels.pallas.tpu.common.chip import LANES
from ejkernel.kernels.pallas.tpu.common.masks import fit, spread_columns
from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout
from ejkernel.kernels.pallas.tpu.flash_attention.specs import Specs, launch_kernel, table_entry
from ejkernel.kernels.pallas.tpu.flash_attention.steps import TilePosition, step_of
from ejkernel.types.attention.problem import LOG2E


def add_strip(
    layout: Layout,
    scores: jax.Array,
    mask: jax.Array | None,
    v: jax.Array,
    strip: Any,
    m_ref: Any,
    l_ref: Any,
    acc_ref: Any,
) -> None:
    """Adds a tile ``[rows, keys]`` of q k^T to the running maximum, sum and output of a strip.

    Maximum and sum are ``[rows, 128]``: the maximum is equal in all lanes; the sum is of the
    keys congruent to the lane, so that lanes are summed once per row, at the end.
    """
    x, log2_unit = layout.raw_logits(scores), layout.log2_unit
    if mask is not None:
        x = jnp.where(mask, x, layout.hidden)
    m_old = m_ref[strip]
    m = jnp.maximum(m_old, jnp.max(x, axis=1, keepdims=True))
    alpha = jnp.exp2((m_old - m) * log2_unit)
    parts, lane_sums = [], None
    for n in range(x.shape[1] // LANES):
        chunk = x[:, n * LANES : (n + 1) * LANES]
        part = jnp.exp2((chunk - m) * log2_unit)
        lane_sums = part if lane_sums is None else lane_sums + part
        parts.append(part if layout.tiles.unpacked else part.astype(v.dtype))
    if layout.tiles.unpacked:
        v = v.astype(jnp.float32)
    p = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
    assert lane_sums is not None
    l_ref[strip] = l_ref[strip] * alpha + lane_sums
    m_ref[strip] = m
    acc_ref[strip] = acc_ref[strip] * fit(alpha, acc_ref.shape[1]) + layout.dot(p, v, (1, 0))


def begin_rows(layout: Layout, m_ref: Any, l_ref: Any, acc_ref: Any) -> None:
    """Stores the running maximum, sum and output of rows that have seen no key."""
    m_ref[...] = jnp.full(m_ref.shape, layout.floor, jnp.float32)
    l_ref[...] = jnp.zeros_like(l_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)


def finish_rows(
    layout: Layout, sink: Any, rows: Sequence[Any], outputs: tuple[Any, Any, Any]
) -> None:
    """Stores output, lse and lse as ``Layout.raw_logits`` of a block of queries.

    ``rows``: refs of the maximum, sum and output of its rows; ``sink``: a logit added to the sum.
    """
    (m_ref, l_ref, acc_ref), (o_ref, lse_ref, base_ref) = rows, outputs
    m = m_ref[:, :1]
    total = jnp.sum(l_ref[...], axis=1, keepdims=True)
    seen = total != 0.0  # NaN has seen something
    raw_unit = unit(layout.problem)  # the logit of a raw logit of 1
    top, rescale, rise = jnp.where(seen, m, 0.0) * raw_unit, 1.0, 0.0
    if sink is not None:
        top_with_sink = jnp.maximum(top, sink)
        rise = top_with_sink - top
        rescale = jnp.exp2(-rise * LOG2E)
        total = total * rescale + jnp.exp2((sink - top_with_sink) * LOG2E)
        top = top_with_sink
    total = jnp.where(seen, total, 1.0)
    o_ref[0, 0] = (acc_ref[...] * (rescale / total)).astype(o_ref.dtype)
    log = jnp.log2(total) * (1.0 / LOG2E)
    lse = jnp.where(seen, top + log, -jnp.inf)
    base = jnp.where(seen, m + (log + rise) * (1.0 / raw_unit), -layout.floor)
    for ref, row in ((lse_ref, lse), (base_ref, base)):
        ref[0, 0] = jnp.broadcast_to(row, (layout.tiles.block_q, LANES)).T[:1]


def flash_kernel(
    layout: Layout,
    table: Any,
    sink_ref: Any | None,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_rows: list[Any],
    kv_rows: list[Any],
    o_ref: Any,
    lse_ref: Any,
    base_ref: Any,
    m_ref: Any,
    l_ref: Any,
    acc_ref: Any,
    columns: list[Any],
) -> None:
    """Runs a grid step.

    ``q_rows`` and ``kv_rows`` are the values that element masks compare; ``columns`` has the
    values of the queries spread over lanes.
    """
    b, h, qi, step_index = (pl.program_id(axis) for axis in range(4))
    first = table_entry(layout, layout.q_blocks, b, h, qi)
    step = step_of(layout, table, first, qi, step_index)

    @pl.when(step_index == 0)
    def _begin() -> None:
        begin_rows(layout, m_ref, l_ref, acc_ref)
        spread_columns(q_rows, columns)

    def scores(position: TilePosition) -> jax.Array:
        queries, keys = position
        return layout.dot(q_ref[0, 0, queries], k_ref[0, 0, keys], (1, 1))

    def add(position: TilePosition, tile_scores: jax.Array, mask: jax.Array | None = None) -> None:
        queries, keys = position
        add_strip(layout, tile_scores, mask, v_ref[0, 0, keys], queries, m_ref, l_ref, acc_ref)

    def add_masked(position: TilePosition, tile_scores: jax.Array) -> None:
        queries, keys = position
        q_columns, k_rows = [c[queries] for c in columns], [r[0, :, keys] for r in kv_rows]
        add(position, tile_scores, step.mask(position, q_columns, k_rows))

    step.run(scores, add, add_masked)

    @pl.when(step_index == layout.steps - 1)
    def _end() -> None:
        head_sink = None if sink_ref is None else sink_ref[0, h]
        finish_rows(layout, head_sink, [m_ref, l_ref, acc_ref], (o_ref, lse_ref, base_ref))


def operands_of(
    specs: Specs,
    arrays: tuple[jax.Array, ...],
    sink: jax.Array | None,
    pairs: Sequence[tuple[jax.Array, jax.Array]],
) -> tuple[list[Any], ...]:
    """Returns the operands of ``flash_kernel``, their block specs, its outputs and its scratch."""
    layout = specs.layout
    p, rows = layout.problem, layout.tiles.block_q
    d, dv = layout.dim, layout.value_dim
    query_values, key_values = ([pair[side] for pair in pairs] for side in (0, 1))
    lse = base = specs.statistic_output()
    return (
        [sink, *arrays, query_values, key_values],
        [
            None if sink is None else pl.BlockSpec(memory_space=pltpu.SMEM),
            *(specs.query(d), specs.key(d), specs.key(dv)),
            [specs.query_values(x) for x in query_values],
            [specs.key_values(x) for x in key_values],
        ],
        [(specs.query(dv), layout.shape(p.heads, layout.q_padded, dv), p.dtype), lse, base],
        [
            *(pltpu.VMEM((rows, width), jnp.float32) for width in (LANES, LANES, dv)),
            [pltpu.VMEM((rows, LANES), jnp.int32) for _ in pairs],
        ],
    )


def forward(
    layout: Layout,
    table: Any,
    arrays: tuple[jax.Array, ...],
    sink: jax.Array | None,
    pairs: Sequence[tuple[jax.Array, jax.Array]],
) -> list[jax.Array]:
    """Returns o ``[b, h, q, dv]``, lse and base, float32 ``[b, h, 1, q]``.

    ``arrays``: q, k and v in ``Layout.shape``. Base, which gradients read, is the lse as
    ``Layout.raw_logits``, large where a row sees no key.
    """
    specs = Specs(layout)
    operands, in_specs, outputs, scratch = operands_of(specs, arrays, sink, pairs)
    return launch_kernel(
        flash_kernel,
        "ejkernel_flash_fwd",
        specs,
        table,
        operands,
        in_specs,
        outputs,
        scratch,
        accumulators=1,
        columns=layout.dim + layout.value_dim,
        moved=2 * arrays[0].nbytes,
    )

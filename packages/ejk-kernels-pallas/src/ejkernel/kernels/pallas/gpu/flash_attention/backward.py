"""Gradients of flash attention on Hopper: what surrounds the kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.pallas.common import units
from ejkernel.kernels.pallas.common.units import LARGE
from ejkernel.kernels.pallas.gpu.common.tma import whole
from ejkernel.kernels.pallas.gpu.flash_attention.backward_dkv import build_dkv
from ejkernel.kernels.pallas.gpu.flash_attention.backward_dq import BLOCK_Q, build_dq
from ejkernel.kernels.pallas.gpu.flash_attention.backward_kernel import build
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import (
    BackwardTiles,
    Plan,
    backward_tiles,
    band_ranges,
    falling_heads,
    is_wide,
    ranges_by_query,
    walk_tables,
)
from ejkernel.kernels.pallas.gpu.flash_attention.backward_wide import ROWS, WidePlan
from ejkernel.types.problem import LOG2E, Problem
from ejkernel.types.structure import Band


def _padded(x: jax.Array, length: int, fill: float) -> jax.Array:
    width = [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])]
    return jnp.pad(x, width, constant_values=fill)


def _row_start(problem: Problem, base: jax.Array, rows: int) -> jax.Array:
    """What is added to the numbers of a row, with their sign; capped ones are in base 2 by then."""
    factor = units.sign(problem) if problem.soft_cap is None else problem.soft_cap * LOG2E
    return _padded(-base * factor, rows, -np.inf * factor)


def _wide(problem, band, walk, ids, arrays, base, delta):
    """dk and dv by the kernel for wide heads.

    ``walk``: ranges of query blocks of key blocks, or their lists and, if there are, bits.
    """
    plan = _wide_plan(problem, band, walk, ids)
    return build_dkv(plan)(*_wide_operands(problem, walk, ids, arrays, base, delta))


def _dq(problem, band, walk, ids, arrays, base, delta):
    """dq by a kernel of its own; ``walk``: as ``_wide``, of key blocks of 128 queries."""
    plan = _wide_plan(problem, band, walk, ids)
    dq = build_dq(plan)(*_wide_operands(problem, walk, ids, arrays, base, delta))
    return dq[:, : problem.q_len]


def _wide_plan(problem, band, walk, ids) -> WidePlan:
    table, *bits = walk
    return WidePlan(
        problem=problem,
        band=band,
        ids=bool(ids),
        ids_batch=bool(ids) and ids[0].shape[0] > 1,
        range_batch=table.shape[0] > 1,
        range_head=table.shape[1] > 1,
        listed=problem.pattern_blocks is not None,
        bits=bool(bits),
        bits_batch=bool(bits) and bits[0].shape[0] > 1,
    )


def _wide_operands(problem, walk, ids, arrays, base, delta) -> list[jax.Array]:
    rows = -(-problem.q_len // BLOCK_Q) * BLOCK_Q
    keys = -(-problem.kv_len // ROWS) * ROWS
    padded = [_padded(x, n, fill) for x, n, fill in zip(ids, (rows, keys), (-1, -2), strict=False)]
    terms = _row_start(problem, base, rows), _padded(-delta, rows, 0.0)
    return [*arrays, *terms, *map(jnp.asarray, walk), *padded]


def backward(
    problem: Problem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    base: jax.Array,
    delta: jax.Array,
    *,
    band: Band = Band(),  # noqa: B008
    ranges: Any = None,
    q_ids: jax.Array | None = None,
    kv_ids: jax.Array | None = None,
    by_key_lists: jax.Array | None = None,
    by_key_bits: jax.Array | None = None,
    by_query_lists: jax.Array | None = None,
    by_query_bits: jax.Array | None = None,
    tiles: BackwardTiles | None = None,
    cores: int = 132,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk, dv of ``o = softmax(scale * q k^T under the mask) v``.

    With p = exp(s - lse): dv = p^T do, ds = p * (do v^T - delta), dq = scale ds k,
    dk = scale ds^T q; under a soft cap ds also takes the slope of the cap. The same inputs give
    the same bits.

    Args:
        problem: sizes, scale and soft cap.
        q, k, v, do: ``[batch, q, heads, dim]``, ``[batch, kv, kv_heads, dim]``,
            ``[batch, kv, kv_heads, value_dim]``, ``[batch, q, heads, value_dim]``, bfloat16 or
            float16.
        base: logarithm of the sums as ``units`` counts, float32 ``[batch, heads, q]``; rows that
            are +inf take no part.
        delta: ``rowsum(do * o) - dlse``, float32 ``[batch, heads, q]``.
        band: ``lo <= key - query <= hi`` by index.
        ranges: query blocks of each key block, as ``block_ranges(..., transposed=True)`` gives
            for these tiles; None: those of the band.
        q_ids, kv_ids: segment ids int32 ``[#batch, length]``; pairs of equal ids are visible.
        by_key_lists, by_key_bits: what ``backward_lists`` made of a pattern for these tiles;
            ``ranges`` has no meaning then.
        by_query_lists, by_query_bits: what ``forward_lists`` made of it for the tiles of dq.
        tiles: tile sizes; None: ``backward_tiles(problem)``, the only ones for wide heads.
        cores: multiprocessors of the device.

    Returns:
        dq, dk, dv like q, k, v.

    Raises:
        ValueError: other tiles for heads wider than 128.
    """
    tiles = tiles or backward_tiles(problem)
    if is_wide(problem) and (tiles.block_q, tiles.block_kv) != (ROWS, ROWS):
        raise ValueError(
            f"tiles: heads wider than 128 take block_q and block_kv {ROWS}, got {tiles}"
        )
    listed = by_key_lists is not None
    circular = band.empty and ranges is None and q_ids is None and not listed
    ids = () if q_ids is None or kv_ids is None else (q_ids, kv_ids)
    arrays = list(map(whole, (q, k, v, do)))
    of_keys, of_queries = (
        [x for x in walk if x is not None]
        for walk in ((by_key_lists, by_key_bits), (by_query_lists, by_query_bits))
    )
    if listed:
        ranges = by_key_lists
    if ranges is None:
        ranges = band_ranges(band, (problem.q_len, tiles.block_q), (problem.kv_len, tiles.block_kv))
        if q_ids is not None:  # any block may hold other segments
            ranges[..., 1:3] = 0
    if is_wide(problem):
        if not listed:
            n_q = -(-problem.q_len // ROWS)
            of_keys, of_queries = [ranges], [ranges_by_query(ranges, n_q, BLOCK_Q // ROWS)]
        dk, dv = _wide(problem, band, of_keys, ids, arrays, base, delta)
        dq = _dq(problem, band, of_queries, ids, arrays, base, delta)
        return dq, dk[:, : problem.kv_len], dv[:, : problem.kv_len]
    plan = Plan(
        problem=problem,
        tiles=tiles,
        band=band,
        circular=circular,
        ids=q_ids is not None,
        ids_batch=q_ids is not None and q_ids.shape[0] > 1,
        range_batch=ranges.shape[0] > 1,
        range_head=ranges.shape[1] > 1,
        cores=cores,
        listed=listed,
        bits=by_key_bits is not None,
        bits_batch=by_key_bits is not None and by_key_bits.shape[0] > 1,
    )
    tables, visited = (), None
    if listed:
        tables = of_keys
    elif not circular:
        *tables, visited = walk_tables(ranges, plan.n_q)
        if isinstance(ranges, np.ndarray):
            falling = falling_heads(tables[0], problem.batch * problem.heads, cores)
            plan = replace(plan, falling=falling)
    rows, keys = plan.n_q * tiles.block_q, plan.n_kv * tiles.block_kv
    start = _row_start(problem, base, rows)
    late = []
    if plan.lse_in_sum:
        # a sum that starts from a large number is rounded to it: such heads start from 0
        large = jnp.isfinite(base) & (jnp.abs(base) >= LARGE / units.unit(problem))
        large = jnp.any(large, axis=-1)
        late = [large.astype(jnp.int32), start]
        start = jnp.where(large[..., None], 0.0, start)
    operands = [*arrays, start, _padded(-delta, rows, 0.0), *late, *map(jnp.asarray, tables)]
    if ids:
        operands += [_padded(ids[0], rows, -1), _padded(ids[1], keys, -2)]
    if listed:
        dk, dv = (x[:, : problem.kv_len].astype(k.dtype) for x in build(plan)(*operands))
        return _dq(problem, band, of_queries, ids, arrays, base, delta), dk, dv
    dq, dk, dv = build(plan)(*operands)
    dq = dq[:, : problem.q_len]
    if visited is not None:
        seen = jnp.repeat(jnp.swapaxes(jnp.asarray(visited), 1, 2), tiles.block_q, axis=1)
        dq = jnp.where(seen[:, : problem.q_len, :, None], dq, 0.0)
    dk, dv = (x[:, : problem.kv_len].astype(k.dtype) for x in (dk, dv))
    return (dq * problem.scale).astype(q.dtype), dk, dv

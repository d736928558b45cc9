"""Gradients of flash attention on Hopper: what surrounds the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.pallas.common import units
from ejkernel.kernels.pallas.gpu.common.tma import whole
from ejkernel.kernels.pallas.gpu.flash_attention.backward_dkv import key_gradients
from ejkernel.kernels.pallas.gpu.flash_attention.backward_dq import query_gradient
from ejkernel.kernels.pallas.gpu.flash_attention.backward_kernel import fused
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import (
    OF_QUERIES,
    BackwardTiles,
    Plan,
    falling_heads,
    is_wide,
    ranges_by_query,
    walk_tables,
)
from ejkernel.kernels.pallas.gpu.flash_attention.operands import HIDDEN
from ejkernel.types.blocks import structural_ranges
from ejkernel.types.problem import LOG2E, Problem


def _padded(x: jax.Array, length: int, fill: float) -> jax.Array:
    width = [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])]
    return jnp.pad(x, width, constant_values=fill)


def _terms(plan: Plan, base: jax.Array, delta: jax.Array, in_sum: bool) -> dict[str, jax.Array]:
    """What is added to the numbers of a row, with their sign; capped ones are in base 2 by then.

    ``in_sum``: sums start from it. From a large number they would be rounded to it: such heads
    start from 0.
    """
    problem, rows = plan.problem, plan.n_q * plan.tiles.block_q
    factor = units.sign(problem) if problem.soft_cap is None else problem.soft_cap * LOG2E
    start = late = _padded(-base * factor, rows, -np.inf * factor)
    found = {"lse": start, "delta": _padded(-delta, rows, 0.0)}
    if not in_sum:
        return found
    large = jnp.isfinite(base) & (jnp.abs(base) >= units.LARGE / units.unit(problem))
    large = jnp.any(large, axis=-1)
    start = jnp.where(large[..., None], 0.0, start)
    return found | {"lse": start, "large": large.astype(jnp.int32), "late": late}


def _ranges(plan: Plan, given: dict[str, Any]) -> Any:
    if "ranges" in given:
        return given["ranges"]
    p, t = plan.problem, plan.tiles
    _, of_keys = structural_ranges([plan.band], p.q_len, p.kv_len, t.block_q, t.block_kv)
    return of_keys.table(np)[None, None]


def _in_turns(plan: Plan, given: dict[str, Any]) -> tuple[Plan, dict[str, Any], Any]:
    """The fused walk of ranges, its tables, and which query blocks it visits; None: all."""
    if plan.band.empty and "ranges" not in given:
        return replace(plan, circular=True), {}, None
    ranges = _ranges(plan, given)
    walk, visitors, visited = walk_tables(ranges, plan.n_q)
    if isinstance(ranges, np.ndarray):
        rows = plan.problem.batch * plan.problem.heads
        plan = replace(plan, falling=falling_heads(walk, rows, plan.cores))
    return plan, {"ranges": walk, "visitors": visitors}, visited


def backward(
    problem: Problem, tiles: BackwardTiles, cores: int, *, base: Any, delta: Any, **given: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk, dv of ``o = softmax(scale * q k^T under the mask) v``.

    With p = exp(s - lse): dv = p^T do, ds = p * (do v^T - delta), dq = scale ds k,
    dk = scale ds^T q; under a soft cap ds also takes the slope of the cap. The same inputs give
    the same bits.

    Args:
        problem: sizes, scale, soft cap and rules by index.
        tiles: tile sizes, for wide heads 64 by 64.
        cores: multiprocessors of the device.
        base: logarithm of the sums as ``units`` counts, float32 ``[batch, heads, q]``; rows that
            are +inf take no part.
        delta: ``rowsum(do * o) - dlse``, float32 ``[batch, heads, q]``.
        given: q, k, v and do ``[batch, q, heads, dim]`` and so on, bfloat16 or float16; and what
            ``backward_masks`` made for these tiles.
    """
    arrays = {name: whole(given[name]) for name in ("q", "k", "v", "do")}

    def operands(plan: Plan, walk: dict[str, Any], in_sum: bool = False) -> dict[str, jax.Array]:
        ends = (plan.n_q * plan.tiles.block_q, plan.n_kv * plan.tiles.block_kv)
        ids = {
            name: _padded(given[name], end, fill)
            for (name, fill), end in zip(HIDDEN.items(), ends, strict=True)
            if name in given
        }
        walk = {name: jnp.asarray(x) for name, x in walk.items()}
        return arrays | _terms(plan, base, delta, in_sum) | walk | ids

    def of_keys(plan: Plan, walk: dict[str, Any]) -> tuple[jax.Array, ...]:
        if is_wide(problem):
            return key_gradients(plan, operands(plan, walk))
        return fused(plan, operands(plan, walk, plan.lse_in_sum))

    def of_queries(walk: dict[str, Any]) -> jax.Array:
        plan = Plan(problem, OF_QUERIES)
        return query_gradient(plan, operands(plan, walk))

    plan = Plan(problem, tiles, cores=cores)
    if plan.listed:
        by_key, by_query = (
            {name.removeprefix(by): x for name, x in given.items() if name.startswith(by)}
            for by in ("by_key_", "by_query_")
        )
        dq, (dk, dv) = of_queries(by_query), of_keys(plan, by_key)
    elif is_wide(problem):
        ranges = _ranges(plan, given)
        by_query = ranges_by_query(ranges, plan.n_q, OF_QUERIES.block_q // tiles.block_q)
        dq, (dk, dv) = of_queries({"ranges": by_query}), of_keys(plan, {"ranges": ranges})
    else:
        plan, walk, visited = _in_turns(plan, given)
        dq, dk, dv = of_keys(plan, walk)
        dq = dq[:, : problem.q_len]
        if visited is not None:
            seen = jnp.repeat(jnp.swapaxes(jnp.asarray(visited), 1, 2), tiles.block_q, axis=1)
            dq = jnp.where(seen[:, : problem.q_len, :, None], dq, 0.0)
        dq = (dq * problem.scale).astype(given["q"].dtype)
    dk, dv = (x[:, : problem.kv_len].astype(given["k"].dtype) for x in (dk, dv))
    return dq, dk, dv

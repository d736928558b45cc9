"""Gradients of flash attention on Hopper: what surrounds the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.pallas.common import units
from ejkernel.kernels.pallas.gpu.common.tma import pad_rows
from ejkernel.kernels.pallas.gpu.flash_attention.backward_dkv import key_gradients
from ejkernel.kernels.pallas.gpu.flash_attention.backward_dkv_queue import queue_key_gradients
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
from ejkernel.kernels.pallas.gpu.flash_attention.list_kernel import (
    Lengths,
    Walk,
    longest_first,
    make_lists,
)
from ejkernel.kernels.pallas.gpu.flash_attention.operands import HIDDEN
from ejkernel.types.arrays import namespace
from ejkernel.types.attention.problem import LOG2E, Problem
from ejkernel.types.masks.blocks import structural_ranges

SORTED = 512  # programs over lists that are started longest first together


def _padded(x: jax.Array, length: int, fill: float) -> jax.Array:
    width = [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])]
    return jnp.pad(x, width, constant_values=fill)


def _terms(plan: Plan, base: jax.Array, less: dict[str, Any], in_sum: bool) -> dict[str, jax.Array]:
    """What is added to the numbers of a row, with their sign; capped ones are in base 2 by then.

    ``less``: -delta, or what it is found of.

    ``in_sum``: sums start from it. From a large number they would be rounded to it: such heads
    start from 0.
    """
    problem, rows = plan.problem, plan.n_q * plan.tiles.block_q
    factor = units.sign(problem) if problem.soft_cap is None else problem.soft_cap * LOG2E
    start = late = _padded(-base * factor, rows, -np.inf * factor)
    found = {"lse": start}
    for name, x in less.items():
        found[name] = x if name == "o" or x.shape[-1] >= rows else _padded(x, rows, 0.0)
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


def _by_length(problem: Problem, lengths: Any, together: int) -> Any:
    """Lengths ``[#b, #h, blocks]`` as ``[groups, places]`` of programs started longest first.

    ``together``: heads whose programs are one place.
    """
    xp, blocks = namespace(lengths), lengths.shape[2]
    whole = xp.broadcast_to(lengths, (problem.batch, problem.heads, blocks))
    if together > 1:
        whole = whole.reshape(-1, together, blocks).sum(1)
    whole = whole.reshape(-1, blocks)
    rows = max(d for d in range(1, max(SORTED // blocks, 1) + 1) if len(whole) % d == 0)
    return whole.reshape(-1, rows * blocks)


def backward_orders(problem: Problem, lists: dict[str, Any]) -> dict[str, np.ndarray]:
    """The order of the programs over known lists, with an axis before."""
    found = {}
    for by, column, together in (("by_query", 1, 1), ("by_key", 0, problem.group)):
        lengths = _by_length(problem, lists[f"{by}_lists"][..., column], together)
        first = np.arange(len(lengths))[:, None] * lengths.shape[1]
        order = np.argsort(-lengths, axis=1, kind="stable") + first
        found[f"{by}_order"] = order.reshape(1, -1).astype(np.int32)
    return found


def _with_lists(problem: Problem, given: dict[str, Any]) -> dict[str, Any]:
    """Operands with the lists of their tiles and the order of the programs."""
    given, walks = dict(given), ("by_query", "by_key")
    lengths = {}
    if "by_key_tiles" in given:
        made = make_lists(*(Walk(given.pop(f"{by}_tiles"), by == "by_query") for by in walks))
        for by, (lists, found) in zip(walks, made, strict=True):
            given[f"{by}_lists"], lengths[by] = lists, found
    elif "by_key_order" not in given:
        lengths = {by: given[f"{by}_lists"][..., i] for by, i in zip(walks, (1, 0), strict=True)}
    if lengths:
        together = {"by_query": 1, "by_key": problem.group}
        orders = longest_first(
            *(Lengths(_by_length(problem, lengths[by], together[by])) for by in walks)
        )
        given |= {f"{by}_order": x[None] for by, x in zip(walks, orders, strict=True)}
    return given


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
    problem: Problem,
    tiles: BackwardTiles,
    cores: int,
    *,
    base: Any,
    delta: Any = None,
    **given: Any,
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
        delta: ``rowsum(do * o) - dlse``, float32 ``[batch, heads, q]``. None where ``holds_rows``:
            then o and dlse are given.
        given: q, k, v and do ``[batch, q, heads, dim]`` and so on, bfloat16 or float16; and what
            ``backward_masks`` made for these tiles.
    """
    arrays = {name: pad_rows(given[name]) for name in ("q", "k", "v", "do")}

    def operands(
        plan: Plan, walk: dict[str, Any], less: dict[str, Any], in_sum: bool = False
    ) -> dict[str, jax.Array]:
        ends = (plan.n_q * plan.tiles.block_q, plan.n_kv * plan.tiles.block_kv)
        ids = {
            name: _padded(given[name], end, fill)
            for (name, fill), end in zip(HIDDEN.items(), ends, strict=True)
            if name in given
        }
        walk = {name: jnp.asarray(x) for name, x in walk.items()}
        return arrays | _terms(plan, base, less, in_sum) | walk | ids

    def of_keys(plan: Plan, walk: dict[str, Any], less: dict[str, Any]) -> tuple[jax.Array, ...]:
        if is_wide(problem):
            return key_gradients(plan, operands(plan, walk, less))
        run = queue_key_gradients if plan.listed else fused
        return run(plan, operands(plan, walk, less, plan.lse_in_sum))

    def of_queries(walk: dict[str, Any], less: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
        plan = Plan(problem, OF_QUERIES, cores=cores)
        dq, *found = query_gradient(plan, operands(plan, walk, less))
        return dq, {"delta": found[0]} if found else less

    if delta is None:
        less = {"o": pad_rows(given["o"]), "dlse": given["dlse"]}
    else:
        less = {"delta": -delta}
    plan = Plan(problem, tiles, cores=cores)
    if plan.listed:
        given = _with_lists(problem, given)
        by_key, by_query = (
            {name.removeprefix(by): x for name, x in given.items() if name.startswith(by)}
            for by in ("by_key_", "by_query_")
        )
        dq, less = of_queries(by_query, less)
        dk, dv = of_keys(plan, by_key, less)
    elif is_wide(problem):
        ranges = _ranges(plan, given)
        by_query = ranges_by_query(ranges, plan.n_q, OF_QUERIES.block_q // tiles.block_q)
        dq, less = of_queries({"ranges": by_query}, less)
        dk, dv = of_keys(plan, {"ranges": ranges}, less)
    else:
        plan, walk, visited = _in_turns(plan, given)
        dq, dk, dv = of_keys(plan, walk, less)
        dq = dq[:, : problem.q_len]
        if visited is not None:
            seen = jnp.repeat(jnp.swapaxes(jnp.asarray(visited), 1, 2), tiles.block_q, axis=1)
            dq = jnp.where(seen[:, : problem.q_len, :, None], dq, 0.0)
        dq = (dq * problem.scale).astype(given["q"].dtype)
    dk, dv = (x[:, : problem.kv_len].astype(given["k"].dtype) for x in (dk, dv))
    return dq, dk, dv

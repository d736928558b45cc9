"""Gradients of flash attention on Hopper: operands and results of the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.pallas.common import units
from ejkernel.kernels.pallas.gpu.common.chip import SHARED
from ejkernel.kernels.pallas.gpu.common.tma import pad_rows
from ejkernel.kernels.pallas.gpu.flash_attention.backward_dkv import WideKeyKernel
from ejkernel.kernels.pallas.gpu.flash_attention.backward_dkv_queue import ListKeyKernel
from ejkernel.kernels.pallas.gpu.flash_attention.backward_dq import query_gradient
from ejkernel.kernels.pallas.gpu.flash_attention.backward_kernel import FusedKernel
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import (
    OF_QUERIES,
    BackwardTiles,
    Plan,
    descending_heads,
    is_wide,
    ranges_by_query,
    visit_tables,
)
from ejkernel.kernels.pallas.gpu.flash_attention.list_kernel import (
    Lengths,
    TileBits,
    longest_first,
    make_lists,
)
from ejkernel.kernels.pallas.gpu.flash_attention.operands import HIDDEN
from ejkernel.kernels.pallas.gpu.flash_attention.tile_scheduler import sorted_rows
from ejkernel.ops.errors import ConfigError
from ejkernel.types.arrays import namespace
from ejkernel.types.attention.problem import LOG2E, Problem
from ejkernel.types.masks.blocks import structural_ranges

SORTED = 512  # programs over lists that are started longest first together


def _padded(x: jax.Array, length: int, fill: float) -> jax.Array:
    width = [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])]
    return jnp.pad(x, width, constant_values=fill)


def _terms(
    plan: Plan, base: jax.Array, delta_terms: dict[str, Any], in_sum: bool
) -> dict[str, jax.Array]:
    """Returns the row terms that kernels add to logits, in the units and sign of the kernel.

    Terms of capped logits are in base 2. ``delta_terms``: neg_delta, or the arrays it is computed
    from.
    ``in_sum``: accumulators start from lse. From a large value they would be rounded to it: such
    heads start from 0.
    """
    problem, rows = plan.problem, plan.n_q * plan.tiles.block_q
    factor = units.sign(problem) if problem.soft_cap is None else problem.soft_cap * LOG2E
    neg_lse = _padded(-base * factor, rows, -np.inf * factor)
    terms = {"neg_lse": neg_lse}
    for name, x in delta_terms.items():
        terms[name] = x if name == "o" or x.shape[-1] >= rows else _padded(x, rows, 0.0)
    if not in_sum:
        return terms
    is_large = jnp.isfinite(base) & (jnp.abs(base) >= units.LARGE / units.unit(problem))
    # in the dtype of the operand: a conversion of the flags would be a launch of its own
    adds_late = jnp.max(is_large.astype(jnp.int32), axis=-1)
    start = jnp.where(adds_late[..., None] != 0, 0.0, neg_lse)
    late = {"adds_late": adds_late, "late_neg_lse": neg_lse}
    return terms | {"neg_lse": start} | late


def _ranges(plan: Plan, operands: dict[str, Any]) -> Any:
    if "ranges" in operands:
        return operands["ranges"]
    p, t = plan.problem, plan.tiles
    _, of_keys = structural_ranges([plan.band], p.q_len, p.kv_len, t.block_q, t.block_kv)
    return of_keys.table(np)[None, None]


def _by_length(problem: Problem, lengths: Any, together: int) -> Any:
    """Returns lengths ``[#b, #h, blocks]`` as ``[groups, units]`` to be started longest first.

    ``together``: heads that form one work unit.
    """
    xp, blocks = namespace(lengths), lengths.shape[2]
    full = xp.broadcast_to(lengths, (problem.batch, problem.heads, blocks))
    if together > 1:
        full = full.reshape(-1, together, blocks).sum(1)
    full = full.reshape(-1, blocks)
    return full.reshape(-1, sorted_rows(len(full), blocks, SORTED) * blocks)


def backward_orders(problem: Problem, lists: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the order of the programs over known lists, with a leading axis."""
    orders = {}
    for by, column, together in (("by_query", 1, 1), ("by_key", 0, problem.group)):
        lengths = _by_length(problem, lists[f"{by}_lists"][..., column], together)
        first = np.arange(len(lengths))[:, None] * lengths.shape[1]
        order = np.argsort(-lengths, axis=1, kind="stable") + first
        orders[f"{by}_order"] = order.reshape(1, -1).astype(np.int32)
    return orders


def _with_lists(problem: Problem, operands: dict[str, Any]) -> dict[str, Any]:
    """Operands with the lists of their tiles and the order of the programs."""
    operands, sides = dict(operands), ("by_query", "by_key")
    lengths = {}
    if "by_key_tiles" in operands:
        made = make_lists(
            *(TileBits(operands.pop(f"{by}_tiles"), by == "by_query") for by in sides)
        )
        for by, (lists, counts) in zip(sides, made, strict=True):
            operands[f"{by}_lists"], lengths[by] = lists, counts
    elif "by_key_order" not in operands:
        lengths = {by: operands[f"{by}_lists"][..., i] for by, i in zip(sides, (1, 0), strict=True)}
    if lengths:
        together = {"by_query": 1, "by_key": problem.group}
        orders = longest_first(
            *(Lengths(_by_length(problem, lengths[by], together[by])) for by in sides)
        )
        operands |= {f"{by}_order": x[None] for by, x in zip(sides, orders, strict=True)}
    return operands


def _fused_plan(plan: Plan, operands: dict[str, Any]) -> tuple[Plan, dict[str, Any], Any]:
    """Returns the fused kernel's plan, its tables and the query blocks it visits; None: all."""
    if plan.band.empty and "ranges" not in operands:
        return replace(plan, circular=True), {}, None
    ranges = _ranges(plan, operands)
    visits, visitors, visited = visit_tables(ranges, plan.n_q)
    if isinstance(ranges, np.ndarray) and not plan.tiles.one_way:
        rows = plan.problem.batch * plan.problem.heads
        plan = replace(plan, descending=descending_heads(visits, rows, plan.cores))
    return plan, {"ranges": visits, "visitors": visitors}, visited


def backward(
    problem: Problem,
    tiles: BackwardTiles,
    cores: int,
    *,
    base: Any,
    delta: Any = None,
    **tensors: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk, dv of ``o = softmax(scale * q k^T under the mask) v``.

    With p = exp(s - lse): dv = p^T do, ds = p * (do v^T - delta), dq = scale ds k,
    dk = scale ds^T q; under a soft cap ds also takes the slope of the cap. The same inputs give
    the same bits.

    Args:
        problem: sizes, scale, soft cap and rules by index.
        tiles: tile sizes, for wide heads 64 by 64.
        cores: multiprocessors of the device.
        base: logarithm of the row sums in ``units``, float32 ``[batch, heads, q]``; rows that
            are +inf take no part.
        delta: ``rowsum(do * o) - dlse``, float32 ``[batch, heads, q]``. None where ``holds_rows``:
            then ``tensors`` has o and dlse.
        tensors: q, k, v and do ``[batch, q, heads, dim]`` and so on, bfloat16 or float16; and the
            operands that ``backward_masks`` made for these tiles.

    Raises:
        ConfigError: tiles of a form that does not take the call.
    """
    if (reason := tiles.unsupported(problem, SHARED)) is not None:
        raise ConfigError(f"backward tiles: {reason}")
    arrays = {name: pad_rows(tensors[name]) for name in ("q", "k", "v", "do")}

    def operands(
        plan: Plan, tables: dict[str, Any], delta_terms: dict[str, Any], in_sum: bool = False
    ) -> dict[str, jax.Array]:
        ends = (plan.n_q * plan.tiles.block_q, plan.n_kv * plan.tiles.block_kv)
        ids = {
            name: _padded(tensors[name], end, fill)
            for (name, fill), end in zip(HIDDEN.items(), ends, strict=True)
            if name in tensors
        }
        tables = {name: jnp.asarray(x) for name, x in tables.items()}
        return arrays | _terms(plan, base, delta_terms, in_sum) | tables | ids

    def of_keys(
        plan: Plan, tables: dict[str, Any], delta_terms: dict[str, Any]
    ) -> tuple[jax.Array, ...]:
        if is_wide(problem):
            return WideKeyKernel(plan)(operands(plan, tables, delta_terms))
        inputs = operands(plan, tables, delta_terms, plan.lse_in_sum)
        if plan.listed:
            return ListKeyKernel(plan)(inputs)
        if (missing := plan.key_columns - problem.dim) > 0:
            inputs["k"] = jnp.pad(inputs["k"], [(0, 0)] * 3 + [(0, missing)])
        dq, dk, dv = FusedKernel(plan)(inputs)
        return dq[..., : problem.dim], dk[..., : problem.dim], dv[..., : problem.value_dim]

    def of_queries(
        tables: dict[str, Any], delta_terms: dict[str, Any]
    ) -> tuple[jax.Array, dict[str, Any]]:
        plan = Plan(problem, OF_QUERIES, cores=cores)
        dq, *neg_delta = query_gradient(plan, operands(plan, tables, delta_terms))
        return dq, {"neg_delta": neg_delta[0]} if neg_delta else delta_terms

    if delta is None:
        delta_terms = {"o": pad_rows(tensors["o"]), "dlse": tensors["dlse"]}
    else:
        delta_terms = {"neg_delta": -delta}
    plan = Plan(problem, tiles, cores=cores)
    if plan.listed:
        tensors = _with_lists(problem, tensors)
        by_key, by_query = (
            {name.removeprefix(by): x for name, x in tensors.items() if name.startswith(by)}
            for by in ("by_key_", "by_query_")
        )
        dq, delta_terms = of_queries(by_query, delta_terms)
        dk, dv = of_keys(plan, by_key, delta_terms)
    elif is_wide(problem):
        ranges = _ranges(plan, tensors)
        by_query = ranges_by_query(ranges, plan.n_q, OF_QUERIES.block_q // tiles.block_q)
        dq, delta_terms = of_queries({"ranges": by_query}, delta_terms)
        dk, dv = of_keys(plan, {"ranges": ranges}, delta_terms)
    else:
        plan, tables, visited = _fused_plan(plan, tensors)
        dq, dk, dv = of_keys(plan, tables, delta_terms)
        dq = dq[:, : problem.q_len]
        if visited is not None:
            seen = jnp.repeat(jnp.swapaxes(jnp.asarray(visited), 1, 2), tiles.block_q, axis=1)
            dq = jnp.where(seen[:, : problem.q_len, :, None], dq, 0.0)
        dq = (dq * problem.scale).astype(tensors["q"].dtype)
    dk, dv = (x[:, : problem.kv_len].astype(tensors["k"].dtype) for x in (dk, dv))
    return dq, dk, dv

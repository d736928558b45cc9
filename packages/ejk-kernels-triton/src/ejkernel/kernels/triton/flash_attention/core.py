"""The differentiable core: kernels joined by one custom_vjp.

Residuals are q, k, v, o, the lse of every row and what the caller gave; the [q, k] matrix is
recomputed tile by tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.common.dropout_rows import row_words
from ejkernel.kernels.triton.compat import vary, varying_axes
from ejkernel.kernels.triton.flash_attention.plans import (
    AttentionPlan,
    DbiasPlan,
    DkvPlan,
    DqPlan,
    ForwardPlan,
)
from ejkernel.kernels.triton.flash_attention.terms import row_terms
from ejkernel.kernels.triton.flash_attention.tiles import Tiles, bias_tiles
from ejkernel.kernels.triton.targets import current_target
from ejkernel.types import MaskInfo, softmax
from ejkernel.types.problem import Problem
from ejkernel.types.structure import (
    block_ranges,
    operands,
    split_mask,
)


@dataclass(frozen=True)
class Static:
    """Everything about a call that is known while tracing."""

    problem: Problem
    fwd: Tiles
    dq: Tiles
    dkv: tuple[tuple[tuple[str, ...], Tiles], ...]  # passes: gradients computed, tiles
    tensor_maps: bool | None = None


def _run(
    kind: type[AttentionPlan],
    static: Static,
    tiles: Tiles,
    mask: MaskInfo,
    tensors: dict[str, Any],
    **fields: Any,
) -> tuple[jax.Array, ...]:
    p = static.problem
    rules, arrays = split_mask(mask)
    tensors = {name: x for name, x in tensors.items() if x is not None}
    if "seed" in tensors:
        tensors["words"] = row_words(tensors.pop("seed"), p.batch, p.heads, p.q_len)
    tensors |= operands(mask, arrays, p.q_len, p.kv_len)
    if rules.arrays and kind is not DbiasPlan:
        tensors["ranges"] = block_ranges(
            mask, p.q_len, p.kv_len, tiles.block_q, tiles.block_kv, transposed=kind is DkvPlan
        )
    shapes = tuple((name, tuple(x.shape)) for name, x in tensors.items())
    plan = kind(p, rules, tiles, shapes, static.tensor_maps, **fields)
    return call(plan, *tensors.values())


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, q, k, v, bias, sink, mask, seed):
    return _attend_fwd(static, q, k, v, bias, sink, mask, seed)[0]


def _attend_fwd(static: Static, q, k, v, bias, sink, mask, seed):
    tensors = dict(q=q, k=k, v=v, sink=sink, bias=bias, seed=seed)
    o, lse, *rows = _run(ForwardPlan, static, static.fwd, mask, tensors)
    return (o, lse), (q, k, v, bias, sink, mask, seed, o, lse, *rows)


def _attend_bwd(static: Static, residuals, cotangents):
    q, k, v, bias, sink, mask, seed, o, lse, base, *rest = residuals
    do, dlse = cotangents
    delta = softmax.row_delta(o, do, dlse)
    terms = row_terms(static.problem, do, delta, *(rest or [None]))
    tensors = dict(q=q, k=k, v=v, base=base, **terms, bias=bias, seed=seed)
    (dq,) = _run(DqPlan, static, static.dq, mask, tensors)
    grads = {}
    for parts, part_tiles in static.dkv:
        found = _run(DkvPlan, static, part_tiles, mask, tensors, parts=parts)
        grads |= zip(parts, found, strict=True)
    dbias = None
    if bias is not None:
        p = static.problem
        tile = bias_tiles(static.dq, current_target())
        fields = dict(sum_batch=p.batch // bias.shape[0], sum_heads=p.heads // bias.shape[1])
        (dbias,) = _run(DbiasPlan, static, tile, mask, tensors, **fields)
        dbias = dbias.astype(bias.dtype)
    dsink = softmax.sink_gradient(sink, lse, delta)
    return dq, grads["dk"], grads["dv"], dbias, dsink, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def attend(
    static: Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    sink: jax.Array | None,
    mask: MaskInfo,
    seed: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """o ``[b, q, h, dv]`` and the natural lse float32 ``[b, h, q]``, differentiable.

    q, k, v have the dtype of ``static.problem``; sink is float32 ``[1, h]`` (one logit per head);
    seed int32 ``[1, 3]``.
    """
    arrays: Any = (q, k, v, bias, sink, mask, seed)
    # inside shard_map all operands vary alike, so that JAX sums the gradients of replicated ones
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(arrays)))
    if axes:
        arrays = vary(jax.tree.map(jnp.asarray, arrays), axes)
    return _attend(static, *arrays)

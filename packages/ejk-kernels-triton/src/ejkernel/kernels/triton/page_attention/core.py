"""The differentiable core: two kernels, mapped axes as more batch, gradients by recomputation."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ejkernel.kernels.triton.bridge import call, merge_leading
from ejkernel.kernels.triton.compat import vary, varying_axes
from ejkernel.kernels.triton.page_attention.plans import MergePlan, SplitPlan
from ejkernel.kernels.triton.page_attention.problem import BYTES, Problem
from ejkernel.kernels.triton.page_attention.tiles import Tiles, share_count
from ejkernel.kernels.triton.targets import current_target

NAMES = ("q", "k", "v", "lens", "tables", "sink", "k_scale", "v_scale")


@dataclass(frozen=True)
class Static:
    """Everything about a call that is known while tracing."""

    problem: Problem
    tiles: Tiles


def _shapes(tensors: dict[str, Any]) -> tuple:
    return tuple((name, tuple(x.shape)) for name, x in tensors.items())


def _launch(static: Static, *arrays: Any) -> jax.Array:
    p, t = static.problem, static.tiles
    given = {n: x for n, x in zip(NAMES, arrays, strict=True) if x is not None}
    shares = t.splits * p.batch if t.splits else share_count(p, t, current_target())
    last = {n: given[n] for n in ("v_scale", "sink") if n in given}
    if t.splits == 1:
        return call(SplitPlan(p, t, shares, _shapes(given)), *given.values())[0]
    first = {n: x for n, x in given.items() if n not in last}
    parts = call(SplitPlan(p, t, shares, _shapes(first)), *first.values())
    merged = dict(zip(("acc", "m", "l", "starts"), parts, strict=False)) | last
    return call(MergePlan(p, t, shares, _shapes(merged)), *merged.values())[0]


@functools.cache
def _decoder(static: Static):
    """``_launch`` with a batching rule: one call over all mapped rows, so that work stays even."""
    run = custom_vmap(partial(_launch, static))

    @run.def_vmap
    def rule(size, batched, *arrays):
        p = static.problem
        q, k, v, lens, tables, *small = arrays
        on = [bool(jax.tree.leaves(b)[0]) if jax.tree.leaves(b) else False for b in batched]
        pages = p.pages
        if on[1] or on[2]:
            k, v = (merge_leading(size, x, m, p.pages) for x, m in ((k, on[1]), (v, on[2])))
            shape = (size if on[4] else 1, *tables.shape[-2:])
            tables = jnp.clip(tables.reshape(shape), 0, p.pages - 1)
            tables = tables + jnp.arange(size, dtype=jnp.int32)[:, None, None] * p.pages
            on[4], pages = True, size * p.pages
        q, lens, tables = (
            merge_leading(size, x, m, p.batch)
            for x, m in ((q, on[0]), (lens, on[3]), (tables, on[4]))
        )
        rows = [
            x
            if x is None
            else merge_leading(size, x, m, p.batch if m or x.shape[0] > 1 else 1, keep_one=True)
            for x, m in zip(small, on[5:], strict=True)
        ]
        folded = replace(static, problem=p.folded(size, pages))
        o = _decoder(folded)(q, k, v, lens, tables, *rows)
        return o.reshape(size, p.batch, *o.shape[1:]), True

    return run


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, q, k, v, lens, tables, sink, k_scale, v_scale):
    rows = [
        None if x is None else x.reshape(1, *(x.shape or (1,))) for x in (sink, k_scale, v_scale)
    ]
    return _decoder(static)(q, k, v, lens, tables, *rows)


def _attend_fwd(static: Static, *arrays):
    return _attend(static, *arrays), arrays


def _attend_bwd(static: Static, arrays, do):
    from ejkernel.ops import kernel_registry

    p = static.problem
    reference = kernel_registry.get("page_attention", "xla")
    given = dict(zip(NAMES, arrays, strict=True))
    fixed = {"lens", "tables", *(n for n, t in (("k", p.key), ("v", p.value)) if BYTES[t] == 1)}
    smooth = {n: x for n, x in given.items() if x is not None and n not in fixed}

    def plain(smooth):
        a = given | smooth
        return reference(
            a["q"],
            a["k"],
            a["v"],
            a["lens"],
            a["tables"],
            softmax_scale=p.scale,
            logits_soft_cap=p.soft_cap,
            sliding_window=None if p.left is None else (p.left, 0),
            softmax_aux=a["sink"],
            k_scale=a["k_scale"],
            v_scale=a["v_scale"],
            cfg=None,
        )

    _, back = jax.vjp(plain, smooth)
    gradients = back(do)[0]
    return tuple(gradients.get(name) for name in NAMES)


_attend.defvjp(_attend_fwd, _attend_bwd)


def attend(static: Static, *arrays: Any) -> jax.Array:
    """o ``[b, h, dv]`` of q, k, v, lens, tables, sinks ``[h, n]``, k_scale, v_scale.

    Sinks and scales may be None; scales are ``[]`` or ``[hk]``. Differentiable in every float
    array but 8-bit caches.
    """
    # inside shard_map all operands vary alike, so that JAX sums the gradients of replicated ones
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(arrays)))
    if axes:
        arrays = vary(jax.tree.map(jnp.asarray, arrays), axes)
    return _attend(static, *arrays)

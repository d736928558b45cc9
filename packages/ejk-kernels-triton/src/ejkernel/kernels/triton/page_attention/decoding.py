"""What kernels over a cache have in common: two launches, mapped axes as more rows.

Gradients, which decoding rarely needs, are those of the XLA implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ejkernel.kernels.triton.bridge import call_plan
from ejkernel.kernels.triton.kernel import TritonKernel
from ejkernel.kernels.triton.launch import merge_leading, shapes_of
from ejkernel.kernels.triton.page_attention.plans import MergePlan, SplitPlan
from ejkernel.kernels.triton.page_attention.tiles import share_count
from ejkernel.ops.differentiate import Work
from ejkernel.ops.execution.program_cache import PROGRAMS_LIMIT
from ejkernel.ops.xla_gradients import XlaGradients

NAMES = ("q", "k", "v", "lens", "tables", "begins", "sink", "k_scale", "v_scale")


class CacheKernel(XlaGradients, TritonKernel):
    """A kernel over a cache, differentiated by the XLA implementation of its operation."""


def as_rows(arrays: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Sinks ``[1, h, n]`` and scales ``[1, 1 or hk]``, which all rows share: those given."""
    return {n: arrays[n].reshape(1, *(arrays[n].shape or (1,))) for n in names if n in arrays}


def _launch(work: Work, *arrays: Any) -> tuple[jax.Array, ...]:
    p, t = work.problem, work.tiles
    given = {n: x for n, x in zip(NAMES, arrays, strict=True) if x is not None}
    if t.whole is not None:
        return t.whole(p, *(given[n] for n in ("q", "k", "lens", "tables")), given.get("k_scale"))
    shares = t.splits * p.batch if t.splits else share_count(p, t, work.target)
    last = {n: given[n] for n in ("v_scale", "sink") if n in given}
    direct = SplitPlan(p, t, shares, shapes_of(given))
    if direct.direct:
        return tuple(call_plan(direct, *given.values()))
    first = {n: x for n, x in given.items() if n not in last}
    parts = call_plan(SplitPlan(p, t, shares, shapes_of(first)), *first.values())
    merged = dict(zip(("acc", "m", "l", "starts"), parts, strict=False)) | last
    return tuple(call_plan(MergePlan(p, t, shares, shapes_of(merged)), *merged.values()))


@functools.lru_cache(maxsize=PROGRAMS_LIMIT)
def decoder(work: Work):
    """``_launch`` with a batching rule: one call over all mapped rows, so that work stays even."""
    run = custom_vmap(partial(_launch, work))

    @run.def_vmap
    def rule(size, batched, *arrays):
        p = work.problem
        q, k, v, lens, tables, begins, *small = arrays
        on = [bool(jax.tree.leaves(b)[0]) if jax.tree.leaves(b) else False for b in batched]
        pages = p.pages
        if on[1] or on[2]:
            k, v = (
                x if x is None else merge_leading(size, x, m, p.pages)
                for x, m in ((k, on[1]), (v, on[2]))
            )
            shape = (size if on[4] else 1, *tables.shape[-2:])
            tables = jnp.clip(tables.reshape(shape), 0, p.pages - 1)
            tables = tables + jnp.arange(size, dtype=jnp.int32)[:, None, None] * p.pages
            on[4], pages = True, size * p.pages
        q, lens, tables = (
            merge_leading(size, x, m, p.batch)
            for x, m in ((q, on[0]), (lens, on[3]), (tables, on[4]))
        )
        if begins is not None:
            begins = merge_leading(size, begins, on[5], p.batch)
        rows = [
            x
            if x is None
            else merge_leading(size, x, m, p.batch if m or x.shape[0] > 1 else 1, keep_one=True)
            for x, m in zip(small, on[6:], strict=True)
        ]
        folded = replace(work, problem=p.folded(size, pages))
        outputs = decoder(folded)(q, k, v, lens, tables, begins, *rows)
        outputs = tuple(x.reshape(size, p.batch, *x.shape[1:]) for x in outputs)
        return outputs, tuple(True for _ in outputs)

    return run

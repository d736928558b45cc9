"""Paged decoding in Triton as one kernel object: two launches, mapped axes as more rows.

Gradients, which decoding rarely needs, are those of the XLA implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ejkernel.kernels.triton.bridge import call, merge_leading
from ejkernel.kernels.triton.kernel import TritonKernel
from ejkernel.kernels.triton.page_attention import tiles
from ejkernel.kernels.triton.page_attention.plans import MergePlan, SplitPlan
from ejkernel.kernels.triton.page_attention.problem import BYTES, Problem, problem_of
from ejkernel.kernels.triton.page_attention.tiles import Tiles, share_count
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops import kernel_registry
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls

NAMES = ("q", "k", "v", "lens", "tables", "begins", "sink", "k_scale", "v_scale")
DTYPES = ("float16", "bfloat16", "float32")
MAX_DIM = 256


class PageAttention(TritonKernel):
    """One new token per sequence over its paged cache, on a GPU; see the operation of this name.

    The query is float16, bfloat16 or float32; caches are of those dtypes, int8, float8_e4m3fn or
    float8_e5m2; head dims are multiples of 8 up to 256. Memory past a context is never read. Two
    runs give the same bits. ``cfg``: pages_per_block, num_splits, num_warps, num_stages.

    Source: Kwon et al. 2023, "PagedAttention" (arXiv 2309.06180), section 4.1; Dao et al. 2023,
    "Flash-Decoding for long-context inference".
    """

    call = calls.PageAttention

    def problem(self, a: Mapping[str, Any]) -> Problem:
        return problem_of(a)

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.query not in DTYPES:
            return f"query: {problem.query} is not supported, only {', '.join(DTYPES)}"
        caches = (problem.key, problem.dim), (problem.value, problem.value_dim)
        for argument, (name, dim) in zip(("key_cache", "value_cache"), caches, strict=True):
            if name not in BYTES:
                return f"{argument}: {name} is not supported, only {', '.join(BYTES)}"
            if dim > MAX_DIM or dim % 8:
                return f"{argument}: head dim {dim} is not a multiple of 8 up to {MAX_DIM}"
        return None

    def choose(self, problem: Problem, target: Target) -> Tiles:
        return tiles.choose(problem, target)

    def near(self, problem: Problem, target: Target, chosen: Tiles) -> Iterable[Tiles]:
        return tiles.near(problem, target, chosen)

    def honour(self, chosen: Tiles, cfg: Any, problem: Problem, target: Target) -> Tiles:
        return tiles.honour(chosen, problem, cfg)

    def fields(self, chosen: Tiles) -> dict[str, Any]:
        return chosen.fields

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        rows = {
            name: arrays[name].reshape(1, *(arrays[name].shape or (1,)))
            for name in ("sink", "k_scale", "v_scale")
            if name in arrays
        }
        return decoder(work)(*((arrays | rows).get(name) for name in NAMES)), ()

    def backward(
        self,
        work: Work,
        arrays: Arrays,
        outputs: tuple[Any, ...],
        saved: Any,
        cotangents: tuple[Any, ...],
    ) -> Mapping[str, Any]:
        p = work.problem
        reference = kernel_registry.get("page_attention", "xla")
        fixed = {"lens", "tables"} | {n for n, t in (("k", p.key), ("v", p.value)) if BYTES[t] == 1}
        smooth = {name: x for name, x in arrays.items() if name not in fixed}

        def plain(smooth: Arrays) -> Any:
            a = arrays | smooth
            return reference(
                *(a[name] for name in NAMES[:5]),
                softmax_scale=p.scale,
                logits_soft_cap=p.soft_cap,
                sliding_window=None if p.left is None else (p.left, 0),
                softmax_aux=a.get("sink"),
                k_scale=a.get("k_scale"),
                v_scale=a.get("v_scale"),
                cfg=None,
            )

        return jax.vjp(plain, smooth)[1](cotangents[0])[0]


def xla_gradients(
    name: str,
    p: Problem,
    arrays: Arrays,
    fixed: Collection[str],
    cotangents: tuple[Any, ...],
    **options: Any,
) -> Mapping[str, Any]:
    """Of a call whose arrays go by the operation's names: gradients of all but ``fixed``."""
    reference = kernel_registry.get(name, "xla")
    smooth = {n: x for n, x in arrays.items() if n not in fixed}

    def plain(smooth: Arrays) -> Any:
        return reference(
            **(arrays | smooth),
            softmax_scale=p.scale,
            logits_soft_cap=p.soft_cap,
            sliding_window=None if p.left is None else (p.left, 0),
            cfg=None,
            **options,
        )

    out = cotangents if len(cotangents) > 1 else cotangents[0]
    return jax.vjp(plain, smooth)[1](out)[0]


def _shapes(tensors: dict[str, Any]) -> tuple:
    return tuple((name, tuple(x.shape)) for name, x in tensors.items())


def _launch(work: Work, *arrays: Any) -> tuple[jax.Array, ...]:
    p, t = work.problem, work.tiles
    given = {n: x for n, x in zip(NAMES, arrays, strict=True) if x is not None}
    if t.whole is not None:
        return t.whole(p, *(given[n] for n in ("q", "k", "lens", "tables")))
    shares = t.splits * p.batch if t.splits else share_count(p, t, work.target)
    last = {n: given[n] for n in ("v_scale", "sink") if n in given}
    direct = SplitPlan(p, t, shares, _shapes(given))
    if direct.direct:
        return tuple(call(direct, *given.values()))
    first = {n: x for n, x in given.items() if n not in last}
    parts = call(SplitPlan(p, t, shares, _shapes(first)), *first.values())
    merged = dict(zip(("acc", "m", "l", "starts"), parts, strict=False)) | last
    return tuple(call(MergePlan(p, t, shares, _shapes(merged)), *merged.values()))


@functools.cache
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


page_attention = PageAttention()

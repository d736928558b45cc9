"""Paged decoding on TPU as one kernel object."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.kernels.pallas.tpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.tpu.page_attention import tiles
from ejkernel.kernels.pallas.tpu.page_attention.caches import Pages
from ejkernel.kernels.pallas.tpu.page_attention.decode import decode, row_factors
from ejkernel.kernels.pallas.tpu.page_attention.tiles import Tiles
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.xla_gradients import XlaGradients
from ejkernel.types import calls
from ejkernel.types.calls import arguments
from ejkernel.types.serving.problem import PagedProblem


class PageAttention(XlaGradients, PallasKernel):
    """One new token per sequence over its paged cache, on a TPU.

    The query is bfloat16 or float32; caches are of these dtypes, int8, float8_e4m3fn or
    float8_e5m2; head dims are multiples of 128, and a page has whole registers of rows. Memory past
    a context is never used. Two calls give the same bits. XLA computes the gradients. ``cfg``:
    pages_per_block.
    """

    call = calls.PageAttention
    reads = (
        arguments.PAGES
        | arguments.DECODE_OPTIONS
        | arguments.CACHE_SCALES
        | {"query", "key_cache", "value_cache"}
    )
    chip = staticmethod(current_chip)
    choose = staticmethod(tiles.choose)

    def unsupported_reason(self, problem: PagedProblem, target: Chip) -> str | None:
        one_page = Tiles(1, problem.page_size)
        return tiles.refusal(problem, ("key_cache", "value_cache"), one_page, target)

    def neighbours(self, problem: PagedProblem, target: Chip, chosen: Tiles) -> Iterable[Tiles]:
        return tiles.neighbours(problem, target, chosen)

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, t, query = work.problem, work.tiles, arrays["query"]
        ends = jnp.clip(arrays["context_lens"], 0, p.capacity).astype(jnp.int32)
        starts = jnp.zeros_like(ends)
        if p.window_left is not None:
            starts = jnp.maximum(ends - 1 - p.window_left, 0)
        tables = jnp.clip(arrays["block_tables"], 0, p.pages - 1).astype(jnp.int32)
        pools = tuple(
            arrays[name].reshape(p.pages, tiles.page_rows(p, p.page_size), -1)
            for name in ("key_cache", "value_cache")
        )
        o = decode(
            *(p, t, work.target, functools.partial(Pages, t)),
            query.reshape(p.batch, p.heads, p.dim),
            pools,
            starts,
            ends,
            tables[:, None],
            row_factors(p, arrays),
        )
        return (o.reshape(*query.shape[:-1], p.value_dim),), ()


page_attention = PageAttention()

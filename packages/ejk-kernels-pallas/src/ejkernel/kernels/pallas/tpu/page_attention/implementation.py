"""Paged decoding on TPU as one kernel object."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import ClassVar

from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.kernels.pallas.tpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.tpu.page_attention import tiles
from ejkernel.kernels.pallas.tpu.page_attention.caches import Pages
from ejkernel.kernels.pallas.tpu.page_attention.decode import decode
from ejkernel.kernels.pallas.tpu.page_attention.tiles import Tiles
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.stages import Stage, StagedKernel
from ejkernel.ops.xla_gradients import XlaGradients
from ejkernel.types import calls
from ejkernel.types.calls import arguments
from ejkernel.types.serving.problem import PagedProblem


def decode_pages(work: Work, arrays: Arrays) -> Arrays:
    """Returns the outputs over a paged cache."""
    return decode(work, arrays, functools.partial(Pages, work.tiles))


class PageAttention(XlaGradients, PallasKernel, StagedKernel):
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
        | {"query", "key_cache", "value_cache", "return_lse"}
    )
    stages: ClassVar[Mapping[str, Stage]] = {"decode": decode_pages}
    chip = staticmethod(current_chip)
    choose = staticmethod(tiles.choose)

    def unsupported_reason(self, problem: PagedProblem, target: Chip) -> str | None:
        one_page = Tiles(1, problem.page_size)
        return tiles.refusal(problem, ("key_cache", "value_cache"), one_page, target)

    def variant_reason(self, problem: PagedProblem) -> str | None:
        return None  # a sequence is a loop of its own over blocks that begin at its own tokens

    def sequence_problem(self, problem: PagedProblem) -> PagedProblem:
        return problem.of_sequence()

    def neighbours(self, problem: PagedProblem, target: Chip, chosen: Tiles) -> Iterable[Tiles]:
        return tiles.neighbours(problem, target, chosen)


page_attention = PageAttention()

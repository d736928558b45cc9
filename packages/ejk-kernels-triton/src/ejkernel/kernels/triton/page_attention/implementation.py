"""Paged decoding in Triton as one kernel object."""

from __future__ import annotations

from ejkernel.kernels.triton.kernel import unsupported
from ejkernel.kernels.triton.page_attention import tiles
from ejkernel.kernels.triton.page_attention.stages import DecodeKernel
from ejkernel.kernels.triton.targets import Target
from ejkernel.types import calls
from ejkernel.types.calls import arguments
from ejkernel.types.serving.problem import ITEMSIZE, PagedProblem


class PageAttention(DecodeKernel):
    """One new token per sequence over its paged cache, on a GPU.

    The query is float16, bfloat16 or float32; caches are of those dtypes, int8, float8_e4m3fn or
    float8_e5m2; head dims are multiples of 8 up to 256. Memory past a context is never read. Two
    runs give the same bits. ``cfg``: pages_per_block, num_splits, num_warps, num_stages.
    """

    call = calls.PageAttention
    reads = (
        arguments.PAGES
        | arguments.DECODE_OPTIONS
        | arguments.CACHE_SCALES
        | {"query", "key_cache", "value_cache", "num_splits"}
    )
    choose = staticmethod(tiles.choose)
    neighbours = staticmethod(tiles.neighbours)

    def unsupported_reason(self, problem: PagedProblem, target: Target) -> str | None:
        p = problem
        return unsupported({"query": p.query_dtype}, {}) or unsupported(
            {"key_cache": p.key_dtype, "value_cache": p.value_dtype},
            {"key_cache": p.dim, "value_cache": p.value_dim},
            among=ITEMSIZE,
        )


page_attention = PageAttention()

"""Ragged attention over pages in Triton as one kernel object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ejkernel.kernels.triton.kernel import unsupported
from ejkernel.kernels.triton.page_attention.stages import CacheKernel
from ejkernel.kernels.triton.ragged_page_attention import tiles
from ejkernel.kernels.triton.ragged_page_attention.stages import (
    decode,
    merge,
    no_long_prefill,
    prefill,
    schedule,
)
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.stages import Stage
from ejkernel.types import calls
from ejkernel.types.calls import arguments
from ejkernel.types.serving.problem import ITEMSIZE, RaggedProblem


class RaggedKernel(CacheKernel):
    """Common to both ragged operations.

    ``cache``: the name of their cache argument.
    """

    cache: str
    choose = staticmethod(tiles.choose)
    neighbours = staticmethod(tiles.neighbours)

    def unsupported_reason(self, problem: RaggedProblem, target: Target) -> str | None:
        p = problem.paged
        reason = unsupported({"queries": p.query_dtype}, {"queries": p.dim})
        reason = reason or unsupported({self.cache: p.key_dtype}, {}, among=ITEMSIZE)
        if reason is not None:
            return reason
        if p.pages * p.page_size >= 2**31:
            return f"{self.cache}: {p.pages} pages of {p.page_size} are not less than 2^31 tokens"
        return None


class RaggedPageAttention(RaggedKernel):
    """Packed rows of any mix of prefill and decoding over pages, on a GPU.

    Queries are float16, bfloat16 or float32; caches are of those dtypes, int8, float8_e4m3fn or
    float8_e5m2; head dims are multiples of 8 up to 256. Pages of which no row sees anything are not
    read, and what no row sees has no influence. Two runs give the same bits. ``vmap`` is a loop.
    ``cfg``: num_queries_per_block, num_kv_pages_per_block, num_warps and num_stages of prefilled
    sequences, num_splits of decoded ones.

    Where traced starts are out of order a row belongs to the first sequence that reaches it.
    """

    call = calls.RaggedPageAttention
    reads = arguments.RAGGED | arguments.DECODE_OPTIONS | arguments.CACHE_SCALES
    cache = "kv_pages"
    stages: ClassVar[Mapping[str, Stage]] = {
        "schedule": schedule,
        "decode": decode,
        "long_prefill": no_long_prefill,
        "prefill": prefill,
        "merge": merge,
    }


ragged_page_attention = RaggedPageAttention()

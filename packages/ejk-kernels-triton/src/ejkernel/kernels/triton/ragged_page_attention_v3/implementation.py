"""Ragged attention that writes the new keys and values first, in Triton as one kernel object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.ragged_page_attention.implementation import RaggedKernel
from ejkernel.kernels.triton.ragged_page_attention.stages import (
    decode,
    merge_beside_cache,
    no_long_prefill,
    prefill,
    schedule,
    select,
)
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.stages import Stage
from ejkernel.types import calls
from ejkernel.types.calls import arguments
from ejkernel.types.serving.problem import ITEMSIZE, RaggedProblem


def write(work: Work, arrays: Arrays) -> Arrays:
    """Returns the cache with the new keys and values, and the scale of the logits after that."""
    from ejkernel.kernels.triton.ragged_page_attention_v3.write_kernel import RaggedWrite

    names = ("keys", "values", "tables", "work", "facts", "k_scale", "v_scale")
    written = call(
        RaggedWrite(work.problem, work.tiles, work.target),
        **select(arrays, *names),
        first_rows=arrays["d_rows"],
        # XLA then copies a slice of stacked caches before the launch, at full speed (``in_place``)
        cache_in=jax.lax.optimization_barrier(arrays["k"]),
    )
    scale = arrays.get("logit_scale", arrays.get("k_scale"))
    return {"k": written["cache"]} | ({} if scale is None else {"k_scale": scale})


class RaggedPageAttentionv3(RaggedKernel):
    """Ragged attention after writing the new keys and values to their pages, on a GPU.

    The cache is written in place: donated under ``jax.jit`` it is not copied, else it is copied
    once. Keys and values are float16, bfloat16, float32, or of an 8-bit cache's dtype. For the rest
    as ragged_page_attention. A row whose table entry names no page is not written.
    """

    call = calls.RaggedPageAttentionv3
    reads = (
        arguments.RAGGED_UPDATE | arguments.DECODE_OPTIONS | arguments.CACHE_SCALES | {"q_scale"}
    )
    cache = "kv_cache"
    stages: ClassVar[Mapping[str, Stage]] = {
        "schedule": schedule,
        "write": write,
        "decode": decode,
        "long_prefill": no_long_prefill,
        "prefill": prefill,
        "merge": merge_beside_cache,
    }

    def unsupported_reason(self, problem: RaggedProblem, target: Target) -> str | None:
        for name, kind in zip(("keys", "values"), problem.written_dtypes, strict=True):
            if kind not in ITEMSIZE:
                return f"{name}: {kind} is not supported, only {', '.join(ITEMSIZE)}"
        if not problem.paged.heads:
            return "queries: without heads"
        return super().unsupported_reason(problem, target)


ragged_page_attention_v3 = RaggedPageAttentionv3()

"""Ragged attention that writes the new keys and values first, in Triton as one kernel object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.bound_launch import BoundLaunch, Out
from ejkernel.kernels.triton.launch import power_of_two, struct
from ejkernel.kernels.triton.page_attention.params import layout_params
from ejkernel.kernels.triton.page_attention.plans import scale_of
from ejkernel.kernels.triton.plan import bound
from ejkernel.kernels.triton.ragged_page_attention.implementation import RaggedKernel
from ejkernel.kernels.triton.ragged_page_attention.plans import RaggedPlan
from ejkernel.kernels.triton.ragged_page_attention.stages import (
    decode,
    launch,
    merge_beside_cache,
    no_long_prefill,
    prefill,
    schedule,
)
from ejkernel.kernels.triton.targets import Target, instructions
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.stages import Stage
from ejkernel.types import calls
from ejkernel.types.calls import arguments
from ejkernel.types.serving.problem import ITEMSIZE, RaggedProblem

BLOCK = 32  # packed rows of a program that writes
LANES = 64  # sequences it looks at together: one compare for each row and each of them


@dataclass(frozen=True)
class WritePlan(RaggedPlan):
    """keys, values, tables, schedule, scales, cache -> the cache, in its own memory."""

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (struct(self.problem.paged.key_dtype, *dict(self.shapes)["k"]),)

    def launch(self, target: Target) -> BoundLaunch:
        from ejkernel.kernels.triton.ragged_page_attention_v3.write_kernel import ragged_write

        p, (key, value) = self.problem.paged, self.problem.written_dtypes
        eight = ITEMSIZE[p.key_dtype] == 1
        view = "int8" if eight else None
        arguments = {
            **{name: self.operand(name) for name in ("tables", "work", "facts")},
            "keys": self.operand("keys", view if key == p.key_dtype else None),
            "values": self.operand("values", view if value == p.key_dtype else None),
            "first_rows": self.operand("d_rows"),
            "k_scale": scale_of(self, "k_scale"),
            "v_scale": scale_of(self, "v_scale"),
            "given": self.operand("k", view),
            "cache": Out(0, view),
            "n": p.batch,
            "rows": self.problem.rows,
            "max_pages": p.max_pages,
            "pages": p.pages,
            "KV_HEADS": p.kv_heads,
            "D": p.dim,
            "COLUMNS": max(16, power_of_two(p.dim)),
            "PAGE": p.page_size,
            "BLOCK": BLOCK,
            "LANES": LANES,
            "KIND": p.key_dtype if eight else "",
            "LARGEST": 0.0 if eight else float(jnp.finfo(p.key_dtype).max),
            "VERBATIM_K": key == p.key_dtype,
            "VERBATIM_V": value == p.key_dtype,
            "PTX": instructions(target),
        }
        grid = (-(-self.problem.rows // BLOCK), p.kv_heads)
        aliases = {self.names.index("k"): 0}
        more: Any = {"known": layout_params(p), "interpreted": {"PTX": 0}, "aliases": aliases}
        return bound(ragged_write, arguments, grid, 4, 1, **more)


def write(work: Work, arrays: Arrays) -> Arrays:
    """Returns the cache with the new keys and values, and the scale of the logits after that."""
    # XLA then copies a slice of stacked caches before the launch, at full speed (``in_place``)
    arrays = arrays | {"k": jax.lax.optimization_barrier(arrays["k"])}
    (cache,) = launch(
        WritePlan, work, arrays,
        "keys", "values", "tables", "d_rows", "work", "facts", "k_scale", "v_scale", "k",
    )  # fmt: skip
    scale = arrays.get("logit_scale", arrays.get("k_scale"))
    return {"k": cache} if scale is None else {"k": cache, "k_scale": scale}


class RaggedPageAttentionv3(RaggedKernel):
    """As ragged_page_attention, after writing the new keys and values to their pages, on a GPU.

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

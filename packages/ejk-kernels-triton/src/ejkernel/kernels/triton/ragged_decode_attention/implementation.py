"""Decoding from a contiguous cache in Triton: paged decoding whose sequences have one page each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ejkernel.kernels.triton.kernel import unsupported
from ejkernel.kernels.triton.page_attention import tiles
from ejkernel.kernels.triton.page_attention.stages import DecodeKernel
from ejkernel.kernels.triton.page_attention.tiles import Tiles, held_bytes
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.params import config_field
from ejkernel.types import calls
from ejkernel.types.calls import arguments
from ejkernel.types.serving.problem import PagedProblem


class RaggedDecodeAttention(DecodeKernel):
    """One new token per sequence over a slice of its contiguous cache, on a GPU.

    float16, bfloat16 and float32; head dims are multiples of 8 up to 256. Memory outside a slice is
    never read. Two runs give the same bits. ``cfg.fwd_params``: kv_blocksize, num_warps,
    num_stages.

    Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
    """

    call = calls.RaggedDecodeAttention
    reads = arguments.QKV | arguments.DECODE_OPTIONS | {"sequence_start", "sequence_end"}
    choose = staticmethod(tiles.choose)

    def unsupported_reason(self, problem: PagedProblem, target: Target) -> str | None:
        p = problem
        dtypes = {"query": p.query_dtype, "key": p.key_dtype, "value": p.value_dtype}
        return unsupported(dtypes, {"key": p.dim, "value": p.value_dim})

    def neighbours(self, problem: PagedProblem, target: Target, chosen: Tiles) -> Iterable[Tiles]:
        return (
            replace(chosen, block=block, num_stages=stages)
            for block in (chosen.block, chosen.block // 2, chosen.block * 2)
            for stages in (chosen.num_stages, 2, 3, 4, 5)
            if block >= 16 and held_bytes(problem, block, stages) <= target.shared_limit
        )

    def apply_config(self, chosen: Tiles, cfg: Any, problem: PagedProblem, target: Target) -> Tiles:
        return chosen.apply_block_config(config_field(cfg, "fwd_params"))

    def fields(self, chosen: Tiles) -> dict[str, Any]:
        return {"fwd_params": {"kv_blocksize": chosen.block, **chosen.fields}}


ragged_decode_attention = RaggedDecodeAttention()

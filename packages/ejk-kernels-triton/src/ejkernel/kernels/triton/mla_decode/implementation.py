"""Decoding from latent pages in Triton: paged decoding whose keys hold their values.

Math, per query row over the visible rows c_j of the cache, which all heads share:

    o = k_scale * sum_j softmax_j(scale * k_scale * q . c_j) * c_j[:latent]

Work split, partial results and their merge are paged decoding's (``page_attention.split_kernel``);
the heads of all new tokens of a sequence are its query rows, 64 to a program.

Bound: one token costs 2 * heads * (dc + latent) operations and dc elements. At B64, context 8192,
dc 576, latent 512 in bfloat16: 604 MB, 0.14 ms at 4.3 TB/s; with 128 heads 146 GFLOP, 0.21 ms at
690 TFLOP/s, so that matmuls limit at 90 heads or more.
"""

from __future__ import annotations

from typing import Any

from ejkernel.kernels.triton.kernel import unsupported
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.mla_decode import tiles
from ejkernel.kernels.triton.page_attention.stages import DecodeKernel
from ejkernel.kernels.triton.page_attention.tiles import Tiles
from ejkernel.kernels.triton.targets import Target
from ejkernel.types import calls
from ejkernel.types.calls import arguments
from ejkernel.types.serving.problem import ITEMSIZE, LatentProblem

MAX_LATENT, MAX_ROPE = 512, 128


class MLADecode(DecodeKernel):
    """Latent attention of the last tokens over a paged cache, on a GPU.

    The query is float16, bfloat16 or float32; the cache is of those dtypes, int8, float8_e4m3fn or
    float8_e5m2. ``latent_dim`` is a power of two up to 512, the rotary part a multiple of 8 up to
    128. Memory past a context is never read, and what is read is read once for keys and values. Two
    runs give the same bits. ``cfg``: pages_per_block, num_splits, num_warps, num_stages.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C; Dao et al. 2023,
    "Flash-Decoding for long-context inference".
    """

    call = calls.MLADecode
    reads = (
        arguments.PAGES
        | arguments.DECODE_OPTIONS
        | {"query", "latent_cache", "latent_dim", "k_scale", "num_splits", "return_lse"}
    )
    choose = staticmethod(tiles.choose)
    neighbours = staticmethod(tiles.neighbours)

    def unsupported_reason(self, problem: LatentProblem, target: Target) -> str | None:
        p = problem
        reason = unsupported({"query": p.query_dtype}, {}) or unsupported(
            {"latent_cache": p.key_dtype}, {}, among=ITEMSIZE
        )
        if reason is not None:
            return reason
        least = 32 if ITEMSIZE[p.key_dtype] == 1 else 16
        if not least <= p.latent_dim <= MAX_LATENT or p.latent_dim != power_of_two(p.latent_dim):
            return f"latent_dim: {p.latent_dim} is not a power of two from {least} to {MAX_LATENT}"
        rope = p.rope_dim
        if rope > MAX_ROPE or rope % 8:
            return f"latent_cache: a rotary part of {rope} is not a multiple of 8 up to {MAX_ROPE}"
        return None

    def apply_config(
        self, chosen: Tiles, cfg: Any, problem: LatentProblem, target: Target
    ) -> Tiles:
        return tiles.canonical(super().apply_config(chosen, cfg, problem, target), problem, target)


mla_decode = MLADecode()

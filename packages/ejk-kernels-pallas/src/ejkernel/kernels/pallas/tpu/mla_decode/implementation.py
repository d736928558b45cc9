"""Latent decoding on TPU: the kernel of paged decoding, over rows that are keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.kernels.pallas.tpu.common.chip import LANES, Chip, current_chip
from ejkernel.kernels.pallas.tpu.page_attention import tiles
from ejkernel.kernels.pallas.tpu.page_attention.implementation import decode_pages
from ejkernel.kernels.pallas.tpu.page_attention.tiles import Tiles
from ejkernel.ops.stages import Stage, StagedKernel
from ejkernel.ops.xla_gradients import XlaGradients
from ejkernel.types import calls
from ejkernel.types.calls import arguments
from ejkernel.types.serving.problem import LatentProblem


class MLADecode(XlaGradients, PallasKernel, StagedKernel):
    """The newest tokens of each sequence over a paged cache of latent rows, on a TPU.

    The query is bfloat16 or float32; caches are of these dtypes, int8, float8_e4m3fn or
    float8_e5m2. Rows of the cache and ``latent_dim`` are multiples of 128: rows of 512 + 64 are
    padded to 640 in the cache and in the query. Two calls give the same bits. XLA computes the
    gradients. ``cfg``: pages_per_block.
    """

    call = calls.MLADecode
    reads = (
        arguments.PAGES
        | arguments.DECODE_OPTIONS
        | arguments.TREE
        | {"query", "latent_cache", "latent_dim", "k_scale", "return_lse"}
    )
    stages: ClassVar[Mapping[str, Stage]] = {"decode": decode_pages}
    chip = staticmethod(current_chip)
    choose = staticmethod(tiles.choose)

    def unsupported_reason(self, problem: LatentProblem, target: Chip) -> str | None:
        p = problem
        if p.dim % LANES:
            padded = -(-p.dim // LANES) * LANES
            # XLA would have to copy the cache into another memory layout
            return (
                f"latent_cache: rows of {p.dim} are no multiple of {LANES}; pad the rows and the "
                f"query with zeros to {padded}"
            )
        if p.value_dim % LANES:
            return f"latent_dim: {p.value_dim} is no multiple of {LANES}"
        return tiles.refusal(p, ("latent_cache",), Tiles(1, p.page_size), target)

    def variant_reason(self, problem: LatentProblem) -> str | None:
        return None  # as page_attention

    def sequence_problem(self, problem: LatentProblem) -> LatentProblem:
        return problem.of_sequence()

    def neighbours(self, problem: LatentProblem, target: Chip, chosen: Tiles) -> Iterable[Tiles]:
        return tiles.neighbours(problem, target, chosen)


mla_decode = MLADecode()

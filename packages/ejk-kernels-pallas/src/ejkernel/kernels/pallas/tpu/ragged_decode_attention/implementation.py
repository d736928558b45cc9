"""Decoding over a contiguous cache, by the kernel of paged decoding with other copies."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.kernels.pallas.tpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.tpu.page_attention import tiles
from ejkernel.kernels.pallas.tpu.page_attention.caches import ROW_UNIT, Rows
from ejkernel.kernels.pallas.tpu.page_attention.decode import decode
from ejkernel.kernels.pallas.tpu.page_attention.tiles import BLOCK_BYTES, Tiles
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.params import TILE_RANGE, config_field
from ejkernel.ops.stages import Stage, StagedKernel
from ejkernel.ops.xla_gradients import XlaGradients
from ejkernel.types import calls
from ejkernel.types.calls import arguments
from ejkernel.types.serving.problem import PagedProblem


def decode_rows(work: Work, arrays: Arrays) -> Arrays:
    """Returns the outputs over a contiguous cache."""
    p = work.problem
    return decode(work, arrays, functools.partial(Rows, work.tiles, p.page_size, p.kv_heads))


class RaggedDecodeAttention(XlaGradients, PallasKernel, StagedKernel):
    """One new token per sequence over a slice of its contiguous cache, on a TPU.

    bfloat16 and float32; head dims are multiples of 128, and tokens times kv heads one of 16. Two
    calls give the same bits. XLA computes the gradients. ``cfg.fwd_params``: kv_blocksize.
    """

    call = calls.RaggedDecodeAttention
    reads = (
        arguments.QKV | arguments.DECODE_OPTIONS | {"sequence_start", "sequence_end", "return_lse"}
    )
    stages: ClassVar[Mapping[str, Stage]] = {"decode": decode_rows}
    chip = staticmethod(current_chip)

    def unsupported_reason(self, problem: PagedProblem, target: Chip) -> str | None:
        return tiles.refusal(problem, ("key", "value"), _legal(problem, ROW_UNIT), target)

    def variant_reason(self, problem: PagedProblem) -> str | None:
        return "batch_invariant: the last block of keys begins where the length of the cache says"

    def choose(self, problem: PagedProblem, target: Chip) -> Tiles:
        p = problem
        rows = min(BLOCK_BYTES // p.token_bytes, tiles.max_columns(p))
        tokens = TILE_RANGE[1]  # a config holds powers of two, whatever the length of the cache
        while tokens > ROW_UNIT and (
            tokens * p.kv_heads > rows or _legal(p, tokens).vmem(p) > target.tile_memory
        ):
            tokens //= 2
        return _legal(p, tokens)

    def apply_config(self, chosen: Tiles, cfg: Any, problem: PagedProblem, target: Chip) -> Tiles:
        tokens = config_field(config_field(cfg, "fwd_params"), "kv_blocksize")
        return chosen if tokens is None else _legal(problem, int(tokens))

    def fields(self, chosen: Tiles) -> dict[str, Any]:
        tokens = 1 << (chosen.tokens - 1).bit_length()  # of a short cache: the block that holds it
        return {"fwd_params": {"kv_blocksize": max(tokens, ROW_UNIT)}}


def _legal(p: PagedProblem, tokens: int) -> Tiles:
    """Returns blocks of whole units of 16 rows, no longer than the cache."""
    return Tiles(1, min(max(tokens // ROW_UNIT, 1) * ROW_UNIT, p.page_size))


ragged_decode_attention = RaggedDecodeAttention()

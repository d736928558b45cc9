"""Decoding over a contiguous cache, by the kernel of paged decoding with other copies."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.kernels.pallas.tpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.tpu.page_attention import tiles
from ejkernel.kernels.pallas.tpu.page_attention.caches import ROW_UNIT, Rows
from ejkernel.kernels.pallas.tpu.page_attention.decode import decode, row_factors
from ejkernel.kernels.pallas.tpu.page_attention.tiles import BLOCK_BYTES, MAX_COLUMNS, Tiles
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.params import config_field
from ejkernel.ops.xla_gradients import XlaGradients
from ejkernel.types import calls
from ejkernel.types.attention.softmax import name_output
from ejkernel.types.calls import arguments
from ejkernel.types.serving.problem import PagedProblem


class RaggedDecodeAttention(XlaGradients, PallasKernel):
    """One new token per sequence over a slice of its contiguous cache, on a TPU.

    bfloat16 and float32; head dims are multiples of 128, and tokens times kv heads one of 16. Two
    calls give the same bits. XLA computes the gradients. ``cfg.fwd_params``: kv_blocksize.
    """

    call = calls.RaggedDecodeAttention
    reads = arguments.QKV | arguments.DECODE_OPTIONS | {"sequence_start", "sequence_end"}
    chip = staticmethod(current_chip)

    def unsupported_reason(self, problem: PagedProblem, target: Chip) -> str | None:
        return tiles.refusal(problem, ("key", "value"), _legal(problem, ROW_UNIT), target)

    def choose(self, problem: PagedProblem, target: Chip) -> Tiles:
        p = problem
        tokens = min(BLOCK_BYTES // (p.kv_heads * p.token_bytes), MAX_COLUMNS // p.kv_heads)
        t = _legal(p, tokens)
        while t.tokens > ROW_UNIT and t.vmem(p) > tiles.memory_for(target):
            t = _legal(p, t.tokens // 2)
        return t

    def apply_config(self, chosen: Tiles, cfg: Any, problem: PagedProblem, target: Chip) -> Tiles:
        tokens = config_field(config_field(cfg, "fwd_params"), "kv_blocksize")
        return chosen if tokens is None else _legal(problem, int(tokens))

    def fields(self, chosen: Tiles) -> dict[str, Any]:
        return {"fwd_params": {"kv_blocksize": chosen.tokens}}

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, t, query = work.problem, work.tiles, arrays["query"]
        length = p.page_size
        starts, ends = (
            jnp.clip(arrays[name], 0, length).astype(jnp.int32)
            for name in ("sequence_start", "sequence_end")
        )
        if p.window_left is not None:
            starts = jnp.maximum(starts, ends - 1 - p.window_left)
        pools = tuple(
            arrays[name].reshape(p.batch, length * p.kv_heads, -1) for name in ("key", "value")
        )
        o = decode(
            *(p, t, work.target, functools.partial(Rows, t, length, p.kv_heads)),
            query.reshape(p.batch, p.heads, p.dim),
            pools,
            starts,
            ends,
            jnp.arange(p.batch, dtype=jnp.int32)[:, None, None],
            row_factors(p, arrays),
        )
        return (name_output(o.reshape(*query.shape[:-1], p.value_dim)),), ()


def _legal(p: PagedProblem, tokens: int) -> Tiles:
    """Returns blocks of whole units of 16 rows, no longer than the cache."""
    return Tiles(1, min(max(tokens // ROW_UNIT, 1) * ROW_UNIT, p.page_size))


ragged_decode_attention = RaggedDecodeAttention()

"""Serving on Hopper as kernel objects: ragged attention over pages, and latent decoding.

Ragged attention replaces one stage of Triton's: sequences of many new tokens go to ``prefill``, and
with them sequences of one token, whose decoding waits for memory while prefill does not. The
schedule decides on the device, call by call. Latent decoding has both of its stages here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.compat import untracked
from ejkernel.kernels.pallas.gpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.gpu.serving.mla_decode import ROWS, MLADecodeKernel
from ejkernel.kernels.pallas.gpu.serving.mla_loader import LATENT, ROPE
from ejkernel.kernels.pallas.gpu.serving.mla_merge import (
    merge,
    merge_at_once,
    merge_fixed_lse,
    merge_lse,
)
from ejkernel.kernels.pallas.gpu.serving.prefill import (
    prefill,
    prefill_kernel,
    scale_factors,
)
from ejkernel.kernels.pallas.gpu.serving.tiles import (
    DIMS,
    DTYPES,
    MAX_COMPARED_PAGE,
    MIN_ROWS,
    long_prefill_of,
)
from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.ops.batch_invariance import is_batch_invariant
from ejkernel.ops.core.invocation import BoundCall
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.stages import ComposedKernel, Stage, StagedKernel
from ejkernel.ops.xla_gradients import XlaGradients
from ejkernel.types import calls
from ejkernel.types.arrays import EIGHT_BIT, is_eight_bit
from ejkernel.types.calls import arguments
from ejkernel.types.serving.problem import LatentProblem, RaggedProblem
from ejkernel.types.serving.schedule import ROW_ALIGNMENT

# Tokens that the tables can hold, from which on latent decoding is faster here than the kernels for
# every GPU: on an H200 with 128 heads one sequence of 2^12 takes 17.4 us of their 18.4 us
MIN_TOKENS = 2**12
SCALES = ("q_scale", "k_scale", "v_scale")  # of ragged calls, read with caches of 8 bits


def long_prefill(work: Work, arrays: Arrays) -> Arrays:
    """Returns ``o [T, h, d]`` with the rows of long prefill and of ``decode_rows``; others
    unset."""
    p, rows = work.problem.paged, work.problem.rows
    cache = arrays["k"].reshape(p.pages, p.page_size, -1, p.dim)
    tables = (arrays[name] for name in ("tables", "work_tiles", "decode_rows"))
    # only a batch-invariant call has rows that are no multiple, or less than a tile: its batch may
    # not choose the kernel
    missing = max(-rows % ROW_ALIGNMENT, MIN_ROWS - rows)
    q = jnp.pad(arrays["q"], ((0, missing), (0, 0), (0, 0))) if missing else arrays["q"]
    scales = [arrays.get(name) for name in ("k_scale", "v_scale")]
    scaled = any(x is not None for x in scales)
    problem = replace(work.problem, rows=rows + missing)
    kernel = prefill_kernel(problem, work.target.cores, scaled=scaled)
    factors = scale_factors(kernel.form, *scales)
    return {"o": prefill(kernel, q, cache, *tables, factors)[:rows]}


class Ragged(XlaGradients, ComposedKernel, PallasKernel):
    """Ragged attention with the long prefill of Hopper and the other stages of Triton."""

    base_platform = "triton"
    chip = staticmethod(current_chip)
    stages: ClassVar[Mapping[str, Stage]] = {"long_prefill": long_prefill}

    def unread_argument(self, a: Mapping[str, Any]) -> str | None:
        unread = super().unread_argument(a)
        if unread is not None or is_eight_bit(a[self.call.boundary.pools[0]]):
            return unread
        # decoding in the same launch knows no scales
        return next((name for name in SCALES if a.get(name) is not None), None)

    def unsupported_reason(self, problem: RaggedProblem, target: Any) -> str | None:
        p, reason = problem.paged, super().unsupported_reason(problem, target)
        if reason is not None:
            return reason
        if p.query_dtype not in DTYPES or p.key_dtype not in (p.query_dtype, *EIGHT_BIT):
            return (
                f"queries: {p.query_dtype} on {p.key_dtype}; supported are {' and '.join(DTYPES)} "
                f"on the same or {', '.join(EIGHT_BIT)}"
            )
        if p.dim not in DIMS or p.layout.key_stride != 2 * p.dim:
            return f"queries: head dim {p.dim} is not among {DIMS}, or pages are padded to more"
        if p.page_size < 16 or p.page_size & (p.page_size - 1):
            cache = self.call.boundary.pools[0]
            return f"{cache}: pages of {p.page_size} are no power of two from 16 on"
        if is_batch_invariant():
            return None  # whatever rows there are
        long = long_prefill_of(problem, target.cores)
        if problem.max_query_len is not None and problem.max_query_len < long.min_rows:
            return f"plan: max_query_len={problem.max_query_len} leaves out long prefill"
        enough = long.min_total_rows
        if problem.rows % ROW_ALIGNMENT or problem.rows < enough:
            return f"queries: {problem.rows} rows are no multiple of 8, or fewer than {enough}"
        return None

    def priority_for(self, call: BoundCall) -> int:
        """Ahead of the kernels for every GPU; behind XLA with pages that no GPU has compared."""
        return 110 if self.problem_of(call).paged.page_size <= MAX_COMPARED_PAGE else -1

    def choose(self, problem: RaggedProblem, target: Any) -> Any:
        long = long_prefill_of(problem, target.cores)
        return replace(super().choose(problem, target), long_prefill=long)

    def variant_reason(self, problem: RaggedProblem) -> str | None:
        return self.base.variant_reason(problem)

    def sequence_problem(self, problem: RaggedProblem) -> RaggedProblem:
        return self.base.sequence_problem(problem)

    def fix_order(self, tiles: Any) -> Any:
        # a tile may begin up to 7 rows before its sequence, but a row's sums have no part of other
        # rows; sequences of one token have the splits of the base kernel
        long = replace(tiles.long_prefill, min_total_rows=0, decodes=False)
        return replace(self.base.fix_order(tiles), long_prefill=long)

    def heuristic(self, call: BoundCall) -> dict[str, Any]:
        problem = self.problem_of(call)
        if call.route.batch_invariant:
            problem = self.sequence_problem(problem)
        return self.choose(problem, self.target()).fields

    def candidates(self, call: BoundCall) -> list[dict[str, Any]]:
        return [self.heuristic(call)]


class RaggedPageAttention(Ragged):
    """Packed rows of any mix of prefill and decoding over pages, on a Hopper GPU.

    Sequences of at least 128 new tokens go through the mainloop of flash attention, where a call
    has enough of them to fill the GPU. Sequences of one new token are decoded in the same kernel,
    unless one of these takes long by itself. In batch-invariant calls the kernel has every sequence
    of at least 128 new tokens and no other. All other stages belong to the implementation for every
    GPU, which must be installed. Queries are float16 or bfloat16, the cache of their dtype, or with
    scales int8, float8_e4m3fn or float8_e5m2, which has no sequences decoded here; head dims 64 or
    128, pages powers of two of at least 16, the packed rows a multiple of 8 (in batch-invariant
    calls any number). No windows or sinks. The tangent of a soft cap is the hardware's, exact to
    2^-11. Two runs give the same bits. ``cfg`` is that of the implementation for every GPU.

    Source: Shah et al. 2024, FlashAttention-3 (arXiv 2407.08608); Kwon et al. 2023,
    "PagedAttention" (arXiv 2309.06180).
    """

    call = calls.RaggedPageAttention
    reads = arguments.RAGGED | arguments.CACHE_SCALES | {"softmax_scale", "logits_soft_cap"}


class RaggedPageAttentionv3(Ragged):
    """Ragged attention after writing the new keys and values to their pages, on a Hopper GPU.

    The cache is written in place, by the implementation for every GPU.
    """

    call = calls.RaggedPageAttentionv3
    reads = (
        arguments.RAGGED_UPDATE
        | arguments.CACHE_SCALES
        | {"softmax_scale", "logits_soft_cap", "q_scale"}
    )


def decode_stage(work: Work, arrays: Arrays) -> Arrays:
    """Returns the arrays of ``MLADecodeKernel.outputs``."""
    kernel = _latent_kernel(work)
    outputs = kernel.outputs()
    read = [arrays[name] for name in ("q", "k", "tables", "lens")]
    results = _launch_in_int32(kernel, outputs, *read, *_scale(arrays))
    return dict(zip(outputs, results, strict=True))


def _latent_kernel(work: Work) -> MLADecodeKernel:
    return MLADecodeKernel(work.problem, work.target.cores, work.batch_invariant)


def merge_stage(work: Work, arrays: Arrays) -> Arrays:
    """Returns the output, and the log-sum-exp if the call returns it."""
    log2_unit, fixed = _latent_kernel(work).log2_unit, work.batch_invariant
    read = [arrays[name] for name in ("o", "partial_o", "m", "total", "cut_sequences", "lens")]
    o = arrays["o"]
    types = {"o": o}
    if work.problem.return_lse:
        types["lse"] = jax.ShapeDtypeStruct(o.shape[:2], jnp.float32)

    def run(o: jax.Array, partial_o: jax.Array, *sums: jax.Array) -> tuple[jax.Array, ...]:
        if fixed or work.problem.batch == 1:
            o = merge_at_once(log2_unit, o, partial_o, *sums, fixed=fixed)
        else:
            o = merge(log2_unit, o, partial_o, *sums)
        lse = merge_fixed_lse if fixed else merge_lse
        return (o, lse(log2_unit, *sums)) if work.problem.return_lse else (o,)

    return dict(zip(types, _launch_in_int32(run, types, *read, *_scale(arrays)), strict=True))


def _scale(arrays: Arrays) -> tuple[jax.Array, ...]:
    """Returns the scale of the cache, float32 ``[1 or b]``, if there is one."""
    scale = arrays.get("k_scale")
    return () if scale is None else (scale.reshape(-1).astype(jnp.float32),)


def _launch_in_int32(
    run: Any, outputs: dict[str, Any], *operands: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the results of kernels, which count in int32."""

    def in_int32(*operands: jax.Array) -> tuple[jax.Array, ...]:
        with jax.enable_x64(False):
            return run(*operands)

    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs.values())
    return tuple(untracked(in_int32, types)(*operands))


class MLADecode(XlaGradients, StagedKernel, PallasKernel):
    """Latent attention of the last tokens over a paged cache, on a Hopper GPU.

    Queries are float16 or bfloat16, the cache of their dtype, int8, float8_e4m3fn or float8_e5m2;
    the latent part is 512 and the rotary part 64; heads come in multiples of 64; pages are powers
    of two of at least 8. No window, soft cap, sinks or number of splits. Two runs give equal bits.
    The XLA implementation has the gradients.
    """

    call = calls.MLADecode
    reads = arguments.PAGES | {
        "query",
        "latent_cache",
        "latent_dim",
        "softmax_scale",
        "k_scale",
        "return_lse",
    }
    fixed_tiles = True
    chip = staticmethod(current_chip)
    stages: ClassVar[Mapping[str, Stage]] = {"decode": decode_stage, "merge": merge_stage}

    def unsupported_reason(self, problem: LatentProblem, target: Chip) -> str | None:
        p = problem
        if p.query_dtype not in DTYPES or p.key_dtype not in (p.query_dtype, *EIGHT_BIT):
            return (
                f"query: {p.query_dtype} on {p.key_dtype}; supported are {' and '.join(DTYPES)} "
                f"on the same or {', '.join(EIGHT_BIT)}"
            )
        if p.latent_dim != LATENT:
            return f"latent_dim: {p.latent_dim} is not {LATENT}"
        if p.rope_dim != ROPE:
            return f"latent_cache: {p.dim} with {p.latent_dim} is not {LATENT + ROPE} with {LATENT}"
        if p.heads % ROWS:
            return f"query: {p.heads} heads are no multiple of {ROWS}"
        if p.page_size < 8 or p.page_size & (p.page_size - 1):
            return f"latent_cache: pages of {p.page_size} are no power of two from 8 on"
        return None

    def variant_reason(self, problem: LatentProblem) -> str | None:
        return None  # splits that each sequence decides for itself, merged in their order

    def priority_for(self, call: BoundCall) -> int:
        """Ahead of the kernels for every GPU where there is enough to read.

        And in batch-invariant calls, whose batch may not choose.
        """
        p = self.problem_of(call)
        leads = call.route.batch_invariant or p.batch * p.capacity >= MIN_TOKENS
        return 110 if leads else 90


ragged_page_attention = RaggedPageAttention()
ragged_page_attention_v3 = RaggedPageAttentionv3()
mla_decode = MLADecode()

"""Latent decoding on Hopper as one kernel object, with the stages decode and merge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.compat import untracked
from ejkernel.kernels.pallas.gpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.gpu.serving.mla_decode import LATENT, ROPE, ROWS, MLADecodeKernel
from ejkernel.kernels.pallas.gpu.serving.mla_merge import merge, merge_lse
from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.ops.core.invocation import BoundCall
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.stages import Stage, StagedKernel
from ejkernel.ops.xla_gradients import XlaGradients
from ejkernel.types import calls
from ejkernel.types.calls import arguments
from ejkernel.types.serving.problem import LatentProblem

DTYPES = ("float16", "bfloat16")
EIGHT_BIT = ("int8", "float8_e4m3fn", "float8_e5m2")
# Tokens that the tables can hold, from which on it is faster than the kernels for every GPU: on an
# H200 with 128 heads 20 against 19 us at 2^13, 24 to 26 against 25 to 31 at 2^14
MIN_TOKENS = 2**14


def decode_stage(work: Work, arrays: Arrays) -> Arrays:
    """Returns the arrays of ``MLADecodeKernel.outputs``."""
    kernel = MLADecodeKernel(work.problem, work.target.cores)
    outputs = kernel.outputs()
    read = [arrays[name] for name in ("q", "k", "tables", "lens")]
    return dict(zip(outputs, _launch(kernel, outputs, *read, *_scale(arrays)), strict=True))


def merge_stage(work: Work, arrays: Arrays) -> Arrays:
    """Returns the output, and the log-sum-exp if the call returns it."""
    c = MLADecodeKernel(work.problem, work.target.cores).c
    read = [arrays[name] for name in ("o", "partial_o", "m", "total", "cuts", "lens")]
    o = arrays["o"]
    types = {"o": o}
    if work.problem.return_lse:
        types["lse"] = jax.ShapeDtypeStruct(o.shape[:2], jnp.float32)

    def run(o: jax.Array, partial_o: jax.Array, *sums: jax.Array) -> tuple[jax.Array, ...]:
        outputs = (merge(c, o, partial_o, *sums),)
        return (*outputs, merge_lse(c, *sums)) if work.problem.return_lse else outputs

    return dict(zip(types, _launch(run, types, *read, *_scale(arrays)), strict=True))


def _scale(arrays: Arrays) -> tuple[jax.Array, ...]:
    """Returns the scale of the cache, float32 ``[1 or b]``, if there is one."""
    scale = arrays.get("k_scale")
    return () if scale is None else (scale.reshape(-1).astype(jnp.float32),)


def _launch(run: Any, outputs: dict[str, Any], *operands: jax.Array) -> tuple[jax.Array, ...]:
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
    of two from 8 on. No window, soft cap, sinks or number of splits. Two runs give the same bits.
    Gradients are those of the XLA implementation.
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

    def priority_for(self, call: BoundCall) -> int:
        """Ahead of the kernels for every GPU where there is enough to read."""
        p = self.problem_of(call)
        return 110 if p.batch * p.capacity >= MIN_TOKENS else 90


mla_decode = MLADecode()

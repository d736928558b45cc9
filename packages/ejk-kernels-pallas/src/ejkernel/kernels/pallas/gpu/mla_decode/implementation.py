"""Latent decoding on Hopper as one kernel object: one product of each kind a step.

The kernel for every GPU (``ejkernel.kernels.triton``, found through the registry) says what a call
is, maps it and differentiates it; its two launches are replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.common import units
from ejkernel.kernels.pallas.compat import untracked
from ejkernel.kernels.pallas.gpu.common.beside_triton import BesideTriton
from ejkernel.kernels.pallas.gpu.mla_decode.eight_bit import EightBitSteps
from ejkernel.kernels.pallas.gpu.mla_decode.merge import merge, merged_lse
from ejkernel.kernels.pallas.gpu.mla_decode.runs import ROWS, STEP
from ejkernel.kernels.pallas.gpu.mla_decode.shares import shares
from ejkernel.kernels.pallas.gpu.mla_decode.steps import LATENT, ROPE, Steps
from ejkernel.ops.core.invocation import BoundCall
from ejkernel.types import calls
from ejkernel.types.attention.problem import LOG2E
from ejkernel.types.calls import arguments
from ejkernel.types.serving.problem import LatentProblem

DTYPES = ("float16", "bfloat16")
KINDS = ("int8", "float8_e4m3fn", "float8_e5m2")  # of caches beside those
# Tokens that the tables can hold, from which on it is faster than the kernels for every GPU: on an
# H200 with 128 heads 20 against 19 us at 2^13, 24 to 26 against 25 to 31 at 2^14
ENOUGH = 2**14


@dataclass(frozen=True)
class WholeStep:
    """What the launches for every GPU compute, by the kernels here.

    Attributes:
        cores: multiprocessors.
    """

    cores: int

    def __call__(
        self,
        p: LatentProblem,
        q: jax.Array,
        cache: jax.Array,
        lengths: jax.Array,
        tables: jax.Array,
        k_scale: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """o ``[b, rows, latent]`` and, if ``p.return_lse``, lse float32 ``[b, rows]``."""
        of = Steps if p.key_dtype == p.query_dtype else partial(EightBitSteps, kind=p.key_dtype)
        steps = of(
            batch=q.shape[0], rows=q.shape[1], tokens=p.tokens, page=p.page_size,
            pages=cache.shape[0], columns=tables.shape[1],
            dtype=p.query_dtype,
            c=units.unit(p) * LOG2E, negative=p.scale < 0.0, cores=self.cores,
        )  # fmt: skip

        def launch(
            q: jax.Array, cache: jax.Array, lengths: jax.Array, tables: jax.Array, *scale: jax.Array
        ) -> tuple[jax.Array, ...]:
            with jax.enable_x64(False):  # the kernels count in int32
                whole, o, m, total, cuts = steps(q, cache, tables, lengths, *scale)
                found = (merge(whole, o, m, total, cuts, lengths, steps.c, *scale),)
                if p.return_lse:
                    _, sequences = shares(jnp.clip(lengths, 0, p.capacity), steps.groups, STEP)
                    found += (merged_lse(m, total, sequences, steps.c, *scale),)
            return found

        kinds = (
            jax.ShapeDtypeStruct((*q.shape[:2], LATENT), q.dtype),
            jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
        )
        run = untracked(launch, kinds if p.return_lse else kinds[:1])
        scale = () if k_scale is None else (k_scale.reshape(-1).astype(jnp.float32),)
        return tuple(run(q, cache, lengths, tables, *scale))


class MLADecode(BesideTriton):
    """Latent attention of the last tokens over a paged cache, on a Hopper GPU.

    Queries are float16 or bfloat16, the cache of their dtype, int8, float8_e4m3fn or float8_e5m2;
    the latent part is 512 and the rotary part 64; heads come in multiples of 64; pages are powers
    of two from 8 on. No window, soft cap, sinks or number of splits. Two runs give the same bits.
    The implementation for every GPU must be installed: it differentiates and maps.
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

    def unsupported_reason(self, problem: Any, target: Any) -> str | None:
        p, reason = problem, self.rest.unsupported_reason(problem, target)
        if reason is not None:
            return reason
        if p.query_dtype not in DTYPES or p.key_dtype not in (p.query_dtype, *KINDS):
            return (
                f"query: {p.query_dtype} on {p.key_dtype}; supported are {' and '.join(DTYPES)} "
                f"on the same or {', '.join(KINDS)}"
            )
        if (p.value_dim, p.dim) != (LATENT, LATENT + ROPE):
            return f"latent_cache: {p.dim} with {p.value_dim} is not {LATENT + ROPE} with {LATENT}"
        if p.heads % ROWS:
            return f"query: {p.heads} heads are no multiple of {ROWS}"
        if p.page_size < 8 or p.page_size & (p.page_size - 1):
            return f"latent_cache: pages of {p.page_size} are no power of two from 8 on"
        return None

    def priority_for(self, call: BoundCall) -> int:
        """Ahead of the kernels for every GPU where there is enough to read."""
        p = self.problem_of(call)
        return 110 if p.batch * p.capacity >= ENOUGH else 90

    def choose(self, problem: Any, target: Any) -> Any:
        return replace(self.rest.choose(problem, target), whole=WholeStep(target.cores))

    def apply_config(self, chosen: Any, cfg: Any, problem: Any, target: Any) -> Any:
        return chosen


mla_decode = MLADecode()

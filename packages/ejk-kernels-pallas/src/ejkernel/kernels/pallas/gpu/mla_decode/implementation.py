"""Latent decoding on Hopper as one kernel object: one product of each kind a step.

The kernel for every GPU (``ejkernel.kernels.triton``, found through the registry) says what a call
is, maps it and differentiates it; its two launches are replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.common import units
from ejkernel.kernels.pallas.compat import untracked
from ejkernel.kernels.pallas.gpu.common.beside_triton import BesideTriton
from ejkernel.kernels.pallas.gpu.mla_decode.merge import merge, merged_lse
from ejkernel.kernels.pallas.gpu.mla_decode.runs import ROWS, STEP
from ejkernel.kernels.pallas.gpu.mla_decode.shares import shares
from ejkernel.kernels.pallas.gpu.mla_decode.steps import LATENT, ROPE, Steps
from ejkernel.types import calls
from ejkernel.types.problem import LOG2E

DTYPES = ("float16", "bfloat16")
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
        self, p: Any, q: jax.Array, cache: jax.Array, lengths: jax.Array, tables: jax.Array
    ) -> tuple[jax.Array, ...]:
        """o ``[b, rows, latent]`` and, if ``p.lse``, lse float32 ``[b, rows]``."""
        steps = Steps(
            batch=q.shape[0], rows=q.shape[1], tokens=p.tokens, page=p.page_size,
            pages=cache.shape[0], columns=tables.shape[1], dtype=p.query,
            c=units.unit(p) * LOG2E, negative=p.scale < 0.0, cores=self.cores,
        )  # fmt: skip

        def launch(
            q: jax.Array, cache: jax.Array, lengths: jax.Array, tables: jax.Array
        ) -> tuple[jax.Array, ...]:
            with jax.enable_x64(False):  # the kernels count in int32
                whole, o, m, total, cuts = steps(q, cache, tables, lengths)
                found = (merge(whole, o, m, total, cuts, lengths, steps.c),)
                if p.lse:
                    _, sequences = shares(jnp.clip(lengths, 0, p.capacity), steps.groups, STEP)
                    found += (merged_lse(m, total, sequences, steps.c),)
            return found

        kinds = (
            jax.ShapeDtypeStruct((*q.shape[:2], LATENT), q.dtype),
            jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
        )
        run = untracked(launch, kinds if p.lse else kinds[:1])
        return tuple(run(q, cache, lengths, tables))


class MLADecode(BesideTriton):
    """Latent attention of the last tokens over a paged cache, on a Hopper GPU.

    Queries and cache are of one dtype, float16 or bfloat16, the latent part 512 and the rotary
    part 64; heads come in multiples of 64; pages are powers of two from 8 on. No window, soft cap,
    sinks, scales or number of splits. Two runs give the same bits. The implementation for every
    GPU must be installed: it differentiates and maps.
    """

    call = calls.MLADecode
    own_tiles = True
    unsupported = ("softmax_aux", "k_scale")

    def refuse(self, problem: Any, target: Any) -> str | None:
        p, reason = problem, self.rest.refuse(problem, target)
        if reason is not None:
            return reason
        if p.query not in DTYPES or p.key != p.query:
            return f"query: {p.query} on {p.key}, only {' and '.join(DTYPES)} are supported"
        if (p.value_dim, p.dim) != (LATENT, LATENT + ROPE):
            return f"latent_cache: {p.dim} with {p.value_dim} is not {LATENT + ROPE} with {LATENT}"
        if p.heads % ROWS:
            return f"query: {p.heads} heads are no multiple of {ROWS}"
        if p.page_size < 8 or p.page_size & (p.page_size - 1):
            return f"latent_cache: pages of {p.page_size} are no power of two from 8 on"
        for name, value in (
            ("sliding_window", p.left), ("logits_soft_cap", p.soft_cap), ("num_splits", p.splits),
        ):  # fmt: skip
            if value is not None:
                return f"{name}: not supported"
        return None

    def priority_for(self, inv: Any) -> int:
        """Ahead of the kernels for every GPU where there is enough to read."""
        p = self.facts(inv)[0]
        return 110 if p.batch * p.capacity >= ENOUGH else 90

    def choose(self, problem: Any, target: Any) -> Any:
        return replace(self.rest.choose(problem, target), whole=WholeStep(target.cores))

    def honour(self, chosen: Any, cfg: Any, problem: Any, target: Any) -> Any:
        return chosen


mla_decode = MLADecode()

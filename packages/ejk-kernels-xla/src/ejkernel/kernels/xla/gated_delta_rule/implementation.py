"""The gated delta rule: the recurrence for a few tokens, chunks for the others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._common.packed import packing
from ejkernel.kernels.xla.gated_delta_rule import core, step
from ejkernel.kernels.xla.gated_delta_rule.chunk import Rows
from ejkernel.kernels.xla.linear_attention.implementation import LinearKernel
from ejkernel.kernels.xla.linear_attention.inputs import initial_states
from ejkernel.ops.differentiate import Arrays
from ejkernel.ops.execution.program_cache import bounded_jit
from ejkernel.ops.varying import vary_alike
from ejkernel.types import calls
from ejkernel.types.calls import arguments

NORM_EPSILON = 1e-6


def normalize_vectors(x: jax.Array) -> jax.Array:
    """Returns vectors of length 1; a vector of zeros stays zero."""
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPSILON)


@bounded_jit
def _rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    beta: jax.Array | None,
    cu_seqlens: jax.Array | None,
    *,
    dtype: Any,
    scale: float,
    normalize: bool,
) -> Rows:
    """Returns rows ``[batch, seq, heads, channels]`` in ``dtype``, that of the matmuls."""
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    if normalize:
        if cu_seqlens is not None:  # the gradient would multiply NaN in padding by 0
            is_valid = packing(cu_seqlens, q.shape[1]).sequence < cu_seqlens.shape[0] - 1
            q, k = (jnp.where(is_valid[None, :, None, None], x, 0) for x in (q, k))
        q, k = normalize_vectors(q), normalize_vectors(k)
    groups = v.shape[2] // k.shape[2] if k.shape[2] else 1
    q, k = (jnp.repeat(x, groups, axis=2) for x in (q * scale, k))
    beta = jnp.ones_like(v[..., :1]) if beta is None else beta.astype(dtype)[..., None]
    if g is not None:
        g = (g if g.ndim == 4 else g[..., None]).astype(dtype)
    return Rows(q, k, v, beta, g)


class GatedDeltaRule(LinearKernel):
    """Linear attention that replaces what a key reads, one ``[dk, dv]`` state a value head.

    Everything accumulates in float32, in float64 when query, key or value is float64; states are
    returned in that dtype. ``cfg``: ``time_tile``, the chunk length, a power of two.
    Differentiable in reverse mode in query, key, value, g, beta and initial_state, through the
    output and the state, in memory ``s + (s / chunk) dk dv`` per head.
    """

    call = calls.GatedDeltaRule
    reads = arguments.RECURRENCE | {"g", "beta", "normalize_qk"}
    advance = staticmethod(step.advance)
    chunked = staticmethod(core.chunked)

    def inputs(self, problem: Any, arrays: Arrays) -> tuple[Rows, jax.Array]:
        q, k, v = (arrays[name] for name in ("query", "key", "value"))
        dtype = accumulation_dtype(q, k, v)
        rows = _rows(
            q,
            k,
            v,
            arrays.get("g"),
            arrays.get("beta"),
            arrays.get("cu_seqlens"),
            dtype=dtype,
            scale=problem.softmax_scale,
            normalize=problem.normalize_qk,
        )
        shape = (v.shape[0], v.shape[2], q.shape[3], v.shape[3])
        return vary_alike((rows, initial_states(arrays, shape, dtype)))


gated_delta_rule = GatedDeltaRule()

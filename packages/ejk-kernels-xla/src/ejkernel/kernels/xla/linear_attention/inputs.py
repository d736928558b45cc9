"""A call of linear attention as rows of one form.

All gates become at most three log decays, kv heads are repeated, the scale is multiplied into the
query and everything is in the accumulation dtype. JAX differentiates these steps by itself, so
the kernels need gradients for the canonical arrays only.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla.linear_attention.chunk import Rows
from ejkernel.ops.differentiate import Arrays
from ejkernel.ops.execution.program_cache import bounded_jit
from ejkernel.ops.varying import vary_alike


def _add(*gates: jax.Array | None) -> jax.Array | None:
    present = [g for g in gates if g is not None]
    return sum(present[1:], present[0]) if present else None


@bounded_jit
def _rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    gk: jax.Array | None,
    gv: jax.Array | None,
    g_scalar: jax.Array | None,
    gamma: jax.Array | None,
    *,
    dtype: Any,
    scale: float,
    groups: int,
) -> Rows:
    """Returns arrays in the dtype of the matmuls, gates as at most three log decays."""

    def convert(x):
        return None if x is None else x.astype(dtype)

    q, k, v, g, gk, gv, g_scalar, gamma = map(convert, (q, k, v, g, gk, gv, g_scalar, gamma))
    if g_scalar is not None:
        g_scalar = g_scalar[..., None]
    if gamma is not None:
        gamma = jnp.broadcast_to(gamma[None, None, :, None], (1, *q.shape[1:3], 1))
    key, scalar = _add(g, gk), _add(g_scalar, gamma)
    if key is not None and scalar is not None:
        key, scalar = key + scalar, None
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    return Rows(q=q * scale, k=k, v=v, key=key, value=gv, scalar=scalar)


def rows_and_states(arrays: Arrays, gates: Arrays, scale: float) -> tuple[Rows, jax.Array]:
    """Rows ``[batch, seq, heads, channels]`` and initial states ``[b or n, heads, dk, dv]``."""
    q, k, v = (arrays[name] for name in ("query", "key", "value"))
    g, gamma, gk, gv = (gates.get(name) for name in ("g", "g_gamma", "gk", "gv"))
    per_head = g is not None and g.ndim == 3
    g, g_scalar = (None, g) if per_head else (g, None)
    (b, _, h, dk), dv = q.shape, v.shape[3]
    acc = accumulation_dtype(q, k, v)
    groups = h // k.shape[2] if h else 1
    rows = _rows(q, k, v, g, gk, gv, g_scalar, gamma, dtype=acc, scale=scale, groups=groups)
    return vary_alike((rows, initial_states(arrays, (b, h, dk, dv), acc)))


def initial_states(arrays: Arrays, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The states given, or zeros: ``shape`` [batch, heads, dk, dv], packed one per sequence."""
    states, cu = arrays.get("initial_state"), arrays.get("cu_seqlens")
    if states is not None:
        return states.astype(dtype)
    count = shape[0] if cu is None else cu.shape[0] - 1
    return jnp.zeros((count, *shape[1:]), dtype)

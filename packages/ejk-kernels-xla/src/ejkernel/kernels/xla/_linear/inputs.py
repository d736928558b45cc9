"""A call of linear attention, checked and brought into canonical form.

All gates become at most three log decays, kv heads are repeated, the scale is multiplied into the
query and everything is in the accumulation dtype. JAX differentiates these steps by itself, so
the kernels need gradients for the canonical arrays only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._common.packed import cumulative_lengths
from ejkernel.kernels.xla._linear.chunk import Rows
from ejkernel.ops.varying import vary_alike
from ejkernel.types.attention import (
    float_array,
    invalid,
    query_key_value,
    scale_of,
)


@dataclass(frozen=True)
class Gates:
    """The gates as the caller gave them."""

    g: Any = None
    g_gamma: Any = None
    gk: Any = None
    gv: Any = None


@dataclass(frozen=True)
class Canonical:
    """``rows`` hold ``[batch, seq, heads, channels]``; ``table`` ``[b or n, heads, dk, dv]``."""

    rows: Rows
    table: jax.Array
    cu_seqlens: jax.Array | None
    dtype: Any


def _gate(x: Any, argument: str, shape: tuple[int, ...], axes: str) -> jax.Array | None:
    if x is None:
        return None
    x = float_array(x, argument, axes)
    if x.shape != shape:
        raise invalid(argument, f"float[{', '.join(map(str, shape))}] ({axes})", x)
    return x


def _add(*gates: jax.Array | None) -> jax.Array | None:
    given = [g for g in gates if g is not None]
    return sum(given[1:], given[0]) if given else None


@partial(jax.jit, static_argnames=("dtype", "scale", "groups"))
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
    """Checked arrays in the dtype of the products, gates as at most three log decays."""

    def widen(x):
        return None if x is None else x.astype(dtype)

    q, k, v, g, gk, gv, g_scalar, gamma = map(widen, (q, k, v, g, gk, gv, g_scalar, gamma))
    if g_scalar is not None:
        g_scalar = g_scalar[..., None]
    if gamma is not None:
        gamma = jnp.broadcast_to(gamma[None, None, :, None], (1, *q.shape[1:3], 1))
    key, scalar = _add(g, gk), _add(g_scalar, gamma)
    if key is not None and scalar is not None:
        key, scalar = key + scalar, None
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    return Rows(q=q * scale, k=k, v=v, key=key, value=gv, scalar=scalar)


def canonicalise(
    query: Any,
    key: Any,
    value: Any,
    gates: Gates,
    initial_state: Any,
    cu_seqlens: Any,
    softmax_scale: Any,
) -> Canonical:
    q, k, v = query_key_value(query, key, value)
    b, s, h, dk = q.shape
    dv = v.shape[3]
    if k.shape[1] != s:
        raise invalid("key", f"float[batch, {s}, kv_heads, head_dim], as long as the query", k)
    acc, dtype = accumulation_dtype(q, k, v), q.dtype
    if cu_seqlens is not None:
        if b != 1:
            raise invalid("query", "float[1, seq, heads, head_dim] with cu_seqlens", q)
        cu_seqlens = cumulative_lengths(cu_seqlens, "cu_seqlens", s)

    per_key = (b, s, h, dk)
    if getattr(gates.g, "ndim", 4) == 3:
        g, g_scalar = None, _gate(gates.g, "g", (b, s, h), "batch seq heads")
    else:
        g, g_scalar = _gate(gates.g, "g", per_key, "batch seq heads head_dim"), None
    gk = _gate(gates.gk, "gk", per_key, "batch seq heads head_dim")
    gv = _gate(gates.gv, "gv", (b, s, h, dv), "batch seq heads value_dim")
    gamma = _gate(gates.g_gamma, "g_gamma", (h,), "heads")
    states = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is None:
        table = jnp.zeros((states, h, dk, dv), acc)
    else:
        table = float_array(initial_state, "initial_state", "sequences heads head_dim value_dim")
        if table.shape != (states, h, dk, dv):
            raise invalid("initial_state", f"float[{states}, {h}, {dk}, {dv}]", table)

    groups = h // k.shape[2] if h else 1
    given = (q, k, v, g, gk, gv, g_scalar, gamma)
    rows = _rows(*given, dtype=acc, scale=scale_of(softmax_scale, dk), groups=groups)
    table = table.astype(acc)
    return Canonical(*vary_alike((rows, table, cu_seqlens)), dtype)

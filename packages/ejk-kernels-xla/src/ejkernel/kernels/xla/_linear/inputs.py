"""A call of linear attention, checked and brought into canonical form.

All gates become at most three log decays, kv heads are repeated, the scale is multiplied into the
query and everything is in the accumulation dtype. JAX differentiates these steps by itself, so
the kernels need gradients for the canonical arrays only.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    if gamma is not None:
        gamma = jnp.broadcast_to(gamma[None, None, :, None], (1, s, h, 1))

    states = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is None:
        table = jnp.zeros((states, h, dk, dv), acc)
    else:
        table = float_array(initial_state, "initial_state", "sequences heads head_dim value_dim")
        if table.shape != (states, h, dk, dv):
            raise invalid("initial_state", f"float[{states}, {h}, {dk}, {dv}]", table)

    def widen(x):
        return None if x is None else x.astype(acc)

    g, gk, gv, gamma, table = map(widen, (g, gk, gv, gamma, table))
    g_scalar = None if g_scalar is None else widen(g_scalar)[..., None]
    key_gate, scalar = _add(g, gk), _add(g_scalar, gamma)
    if key_gate is not None and scalar is not None:
        key_gate, scalar = key_gate + scalar, None
    groups = h // k.shape[2] if h else 1
    rows = Rows(
        q=widen(q) * scale_of(softmax_scale, dk),
        k=jnp.repeat(widen(k), groups, axis=2),
        v=jnp.repeat(widen(v), groups, axis=2),
        key=key_gate,
        value=gv,
        scalar=scalar,
    )
    return Canonical(*vary_alike((rows, table, cu_seqlens)), dtype)

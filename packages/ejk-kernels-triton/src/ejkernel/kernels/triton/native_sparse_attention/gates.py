"""The gradients of branches that are added under their gates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops.differentiate import Arrays


def pull(branches: Arrays, do: jax.Array) -> tuple[Arrays, Arrays]:
    """(cotangents of the branches, do . o of each ``[b, s, h]``), which is that of its gate.

    ``branches``: ``o_cmp``, ``o_slc``, ``o_swa [b, s, h, dv]``, those there are, and ``g_cmp``,
    ``g_slc``, ``g_swa`` float32 ``[b, s, h]``; a branch without a gate has 1. do is that of their
    sum.
    """
    names = [name for name in branches if name.startswith("o_")]
    parts = [under_gate(branches, name, do).astype(branches[name].dtype) for name in names]
    # XLA makes one kernel of these products and the sums below, which takes twice the time
    *parts, do = lax.optimization_barrier((*parts, do))
    wide = do.astype(jnp.float32)
    sums = {name: jnp.sum(wide * branches[name].astype(jnp.float32), -1) for name in names}
    return dict(zip(names, parts, strict=True)), sums


def under_gate(branches: Arrays, name: str, x: jax.Array) -> jax.Array:
    """``x [b, s, h]`` or ``[b, s, h, dv]`` in float32 under the gate of a branch."""
    gate = branches.get(gate_of(name))
    x = x.astype(jnp.float32)
    return x if gate is None else gate.reshape(*gate.shape, *[1] * (x.ndim - gate.ndim)) * x


def gate_of(name: str) -> str:
    return name.replace("o_", "g_", 1)

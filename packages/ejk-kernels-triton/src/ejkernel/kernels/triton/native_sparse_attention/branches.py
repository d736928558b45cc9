"""The branches: flash attention over block means and over a window, and the gates of all three."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.triton.flash_attention.implementation import FlashAttention
from ejkernel.ops.differentiate import Arrays
from ejkernel.types.masks.combine import mask_of
from ejkernel.types.masks.token_blocks import TokenBlocks, block_means, means_mask

OTHERS = ("o_cmp", "o_swa", "g_cmp", "g_slc", "g_swa")
"""Outputs of the other branches and all gates, which the selected branch's kernel adds."""


class Branch(FlashAttention):
    """Flash attention of finite rows, as one branch of a sum that knows do . o of its branches.

    The sum gives -delta as the cotangent of lse, so that o and do are not read again for it. Rows
    that see no key are not cleared.
    """

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        do, minus_delta = cotangents
        return self.gradients(work, arrays | {"do": do, "base": saved, "delta": -minus_delta})


def compressed(p: Any, cores: int, q: Any, k: Any, v: Any, blocks: TokenBlocks) -> Arrays:
    """Returns attention over block means: ``o_cmp [b, s, h, dv]``, ``lse_cmp [b, s, h]``."""
    k, v = (block_means(x, blocks).astype(q.dtype) for x in (k, v))
    if k.shape[0] * k.shape[2] * -(-blocks.count // 64) < 2 * cores:
        # few means: a copy for each query head gives their gradients enough programs
        group = q.shape[2] // k.shape[2]
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    return _attend(p, "cmp", q, k, v, means_mask(blocks, q.shape[0]))


def sliding(p: Any, q: Any, k: Any, v: Any, cu: Any) -> Arrays:
    """Returns attention over the window: ``o_swa``, ``lse_swa``."""
    mask = {"query": q, "key": k, "cum_seqlens_q": cu, "causal": True}
    return _attend(p, "swa", q, k, v, mask_of({**mask, "sliding_window": p.sliding_window}))


def _attend(p: Any, name: str, q: jax.Array, k: jax.Array, v: jax.Array, mask: Any) -> Arrays:
    o, lse = branch.run_canonical(
        query=q, key=k, value=v, mask_info=mask, softmax_scale=p.softmax_scale, return_lse=True
    )
    return {f"o_{name}": o, f"lse_{name}": lse}


branch = Branch()


def gated_cotangents(branches: Arrays, do: jax.Array) -> tuple[Arrays, Arrays]:
    """Returns the cotangents of the branches, and do . o ``[b, s, h]``, the gates' gradients.

    ``branches``: ``o_cmp``, ``o_slc``, ``o_swa [b, s, h, dv]`` as far as they exist, and ``g_cmp``,
    ``g_slc``, ``g_swa`` float32 ``[b, s, h]``; a branch without a gate has 1. do is the cotangent
    of the sum of the gated branches.
    """
    names = [name for name in branches if name.startswith("o_")]
    parts = [apply_gate(branches, name, do).astype(branches[name].dtype) for name in names]
    # XLA fuses these multiplications and the reductions below, which takes twice the time
    *parts, do = lax.optimization_barrier((*parts, do))
    wide = do.astype(jnp.float32)
    dots = {name: jnp.sum(wide * branches[name].astype(jnp.float32), -1) for name in names}
    return dict(zip(names, parts, strict=True)), dots


def apply_gate(branches: Arrays, name: str, x: jax.Array) -> jax.Array:
    """Returns ``x [b, s, h]`` or ``[b, s, h, dv]`` in float32 times the gate of a branch."""
    gate = branches.get(gate_of(name))
    x = x.astype(jnp.float32)
    return x if gate is None else gate.reshape(*gate.shape, *[1] * (x.ndim - gate.ndim)) * x


def gate_of(name: str) -> str:
    """Returns the name of the gate of a branch."""
    return name.replace("o_", "g_", 1)

"""The compressed and the sliding branch: flash attention over block means, and over a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.flash_attention.implementation import FlashAttention
from ejkernel.ops.differentiate import Arrays
from ejkernel.types.masks.combine import mask_of
from ejkernel.types.masks.token_blocks import Blocks, block_means, means_mask


class Branch(FlashAttention):
    """Flash attention of finite rows, as one branch of a sum that knows do . o of its branches.

    The sum gives -delta as the cotangent of lse, so that o and do are not read again for it. Rows
    that see no key need not be cleared.
    """

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        do, less = cotangents
        return self.gradients(work, arrays | {"do": do, "base": saved, "delta": -less})


def compressed(p: Any, cores: int, q: Any, k: Any, v: Any, blocks: Blocks) -> Arrays:
    """Attention over the means of blocks: ``o_cmp [b, s, h, dv]``, ``lse_cmp [b, s, h]``."""
    k, v = (block_means(x, blocks).astype(q.dtype) for x in (k, v))
    if k.shape[0] * k.shape[2] * -(-blocks.count // 64) < 2 * cores:
        # means are few: the programs of their gradients are as many with a copy for each query head
        group = q.shape[2] // k.shape[2]
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    return _attend(p, "cmp", q, k, v, means_mask(blocks, q.shape[0]))


def sliding(p: Any, q: Any, k: Any, v: Any, cu: Any) -> Arrays:
    """Attention over the window: ``o_swa``, ``lse_swa``."""
    mask = {"query": q, "key": k, "cum_seqlens_q": cu, "causal": True}
    return _attend(p, "swa", q, k, v, mask_of({**mask, "sliding_window": p.sliding_window}))


def _attend(p: Any, name: str, q: jax.Array, k: jax.Array, v: jax.Array, mask: Any) -> Arrays:
    o, lse = branch.run_canonical(
        query=q, key=k, value=v, mask_info=mask, softmax_scale=p.softmax_scale, return_lse=True
    )
    return {f"o_{name}": o, f"lse_{name}": lse}


branch = Branch()

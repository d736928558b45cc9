"""mla_attention: keys and values expanded from a latent row, then blockwise attention.

The expansion costs ``2 * k * r * hk * (dn + dv)`` operations per batch row, once; attention costs
``2 * q * k * h * (dn + dr + dv)``. Past a few thousand tokens the expansion is the small part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel.kernels.xla._common.tiles import Passes
from ejkernel.kernels.xla.flash_attention import tiles
from ejkernel.kernels.xla.flash_attention.implementation import flash_attention, ring_attention
from ejkernel.kernels.xla.kernel import XlaKernel
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.attention.latent import drop_masked_rows, expand_rows
from ejkernel.types.calls import arguments
from ejkernel.types.calls.shared_sequence import ShardedCall
from ejkernel.types.masks.combine import mask_of


class FlashMLA(XlaKernel):
    """Attention over keys and values that are expanded from latent rows.

    ``cfg``: as for flash attention, which sees the expanded head dims. Differentiable in every
    float array.
    """

    by_rows = True

    call = calls.FlashMLA
    reads = arguments.FLASH_MLA | arguments.DROPOUT | {"bias"}

    def choose(self, problem: Any, target: Any) -> Passes:
        heads, (_, kv_heads, dim) = problem.query.shape[2], problem.w_kc.shape
        rotary = 0 if problem.b_k is None else problem.b_k.shape[2]
        return tiles.choose(heads // max(kv_heads, 1), dim + rotary)

    def operands(self, a: Mapping[str, Any], problem: Any) -> Arrays:
        """The arrays of the call, cumulative lengths joined with the mask."""
        arrays = self.call.array_arguments(a)
        cu = arrays.pop("cu_seqlens", None)
        if cu is not None:
            arrays.pop("attention_mask", None)
            arrays["mask_info"] = mask_of({**a, "key": a["key_value"], "cum_seqlens_q": cu})
        return arrays

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p = work.problem
        q, k, v = expand_rows(drop_masked_rows(arrays, arrays["mask_info"]))
        options = {n: arrays.get(n) for n in ("bias", "softmax_aux", "dropout_seed", "mask_info")}
        static = ("softmax_scale", "dropout_prob", "logits_soft_cap")
        options |= {name: getattr(p, name) for name in static}
        cfg = work.tiles.fields
        return flash_attention.run_canonical(
            query=q, key=k, value=v, **options, return_lse=True, cfg=cfg
        ), ()


mla_attention = FlashMLA()
mla_attention.context, mla_attention.sharded_call = ring_attention, ShardedCall

"""Scaled dot product attention, differentiable in every mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel.kernels.xla._common.dots import DotPolicy
from ejkernel.kernels.xla._common.plain import Visibility, probabilities, weighted_values
from ejkernel.kernels.xla.kernel import XlaKernel
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.attention.softmax import name_output
from ejkernel.types.calls import arguments
from ejkernel.types.masks.combine import mask_of


class ScaledDotProductAttention(XlaKernel):
    """Softmax attention in O(q * k) memory.

    Differentiable in forward and reverse mode, to any order, in every float array.
    """

    call = calls.ScaledDotProductAttention
    reads = arguments.ATTENTION | arguments.PACKED | {"bias"}

    def operands(self, a: Mapping[str, Any], problem: Any) -> Arrays:
        mask = a["mask_info"] if a["cum_seqlens_q"] is None else mask_of(a)
        return {**self.call.array_arguments(a), "mask_info": mask}

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        q, k, v = (arrays[name] for name in ("query", "key", "value"))
        dots = DotPolicy.for_arrays(q, k, v)
        visibility = Visibility.from_mask(arrays["mask_info"], q.shape[1], k.shape[1])
        scale, bias = work.problem.softmax_scale, arrays.get("bias")
        p = probabilities(q, k, bias, None, visibility, scale=scale, soft_cap=None, dots=dots)
        return (name_output(weighted_values(p, v, dots, visibility).astype(q.dtype)),), ()


scaled_dot_product_attention = ScaledDotProductAttention()

"""Scaled dot-product attention in Triton: flash attention with fewer options."""

from __future__ import annotations

from ejkernel.kernels.triton.flash_attention.implementation import FlashAttention
from ejkernel.types import calls
from ejkernel.types.calls import arguments


class ScaledDotProductAttention(FlashAttention):
    """The kernels of flash attention for the operation of this name, whose options are fewer.

    Dtypes and head dims are as in ``flash_attention``; tiles are the kernel's own choice.
    """

    call = calls.ScaledDotProductAttention
    reads = arguments.ATTENTION | arguments.PACKED | {"bias"}
    fixed_tiles = True


scaled_dot_product_attention = ScaledDotProductAttention()

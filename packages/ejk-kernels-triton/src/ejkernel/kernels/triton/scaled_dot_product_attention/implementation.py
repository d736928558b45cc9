"""Scaled dot-product attention in Triton: flash attention with fewer options."""

from __future__ import annotations

from typing import Any

from ejkernel.kernels.triton.flash_attention.implementation import FlashAttention
from ejkernel.kernels.triton.flash_attention.tiles import FlashTiles
from ejkernel.kernels.triton.targets import Target
from ejkernel.types import calls
from ejkernel.types.problem import Problem


class ScaledDotProductAttention(FlashAttention):
    """The kernels of flash attention for the operation of this name, whose options are fewer.

    Dtypes and head dims are those of ``flash_attention``; tiles are the kernel's own choice.
    """

    call = calls.ScaledDotProductAttention

    @staticmethod
    def near(problem: Problem, target: Target, chosen: FlashTiles) -> list[FlashTiles]:
        return []

    def fields(self, chosen: FlashTiles) -> dict[str, Any]:
        return {}


scaled_dot_product_attention = ScaledDotProductAttention()

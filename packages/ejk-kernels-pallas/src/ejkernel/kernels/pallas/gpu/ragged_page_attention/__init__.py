"""Ragged attention over pages on Hopper."""

from ejkernel.kernels.pallas.gpu.ragged_page_attention.implementation import (
    ragged_page_attention,
    ragged_page_attention_v3,
)

__all__ = ["ragged_page_attention", "ragged_page_attention_v3"]

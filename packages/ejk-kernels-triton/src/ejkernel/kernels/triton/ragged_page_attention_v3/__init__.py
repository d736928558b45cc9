"""Ragged attention that also writes the cache, in Triton."""

from ejkernel.kernels.triton.ragged_page_attention_v3.implementation import (
    ragged_page_attention_v3,
)

__all__ = ["ragged_page_attention_v3"]

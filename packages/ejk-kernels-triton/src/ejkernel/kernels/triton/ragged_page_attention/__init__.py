"""Ragged attention over pages in Triton."""

from ejkernel.kernels.triton.ragged_page_attention.implementation import ragged_page_attention

__all__ = ["ragged_page_attention"]

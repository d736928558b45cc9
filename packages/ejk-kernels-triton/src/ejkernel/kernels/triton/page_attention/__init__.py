"""Paged decoding in Triton."""

from ejkernel.kernels.triton.page_attention.implementation import page_attention

__all__ = ["page_attention"]

"""Decoding from a paged key/value cache in Triton."""

from ejkernel.kernels.triton.page_attention.interface import page_attention

__all__ = ["page_attention"]

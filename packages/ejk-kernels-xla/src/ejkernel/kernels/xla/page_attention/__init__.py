"""Decoding from a paged key/value cache."""

from ejkernel.kernels.xla.page_attention.implementation import page_attention

__all__ = ["page_attention"]

"""Mixed prefill and decoding over a paged cache that already holds the new tokens."""

from ejkernel.kernels.xla.ragged_page_attention.implementation import ragged_page_attention

__all__ = ["ragged_page_attention"]

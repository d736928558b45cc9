"""Mixed prefill and decoding that also writes the new tokens into the cache."""

from ejkernel.kernels.xla.ragged_page_attention_v3.implementation import ragged_page_attention_v3

__all__ = ["ragged_page_attention_v3"]

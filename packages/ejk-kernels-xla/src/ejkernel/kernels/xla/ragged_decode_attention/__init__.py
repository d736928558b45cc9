"""Decoding from a contiguous key/value cache with a start and an end per row."""

from ejkernel.kernels.xla.ragged_decode_attention.implementation import ragged_decode_attention

__all__ = ["ragged_decode_attention"]

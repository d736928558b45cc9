"""Decoding from a contiguous cache in Triton."""

from ejkernel.kernels.triton.ragged_decode_attention.implementation import (
    ragged_decode_attention,
)

__all__ = ["ragged_decode_attention"]

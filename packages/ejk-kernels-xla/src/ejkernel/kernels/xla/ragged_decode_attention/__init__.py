"""Decoding from a contiguous key/value cache with a start and an end per row."""

from ejkernel.kernels.xla.ragged_decode_attention.interface import (
    heuristic,
    ragged_decode_attention,
    sample_inputs,
)

__all__ = ["heuristic", "ragged_decode_attention", "sample_inputs"]

"""Mixed prefill and decoding over a paged cache that already holds the new tokens."""

from ejkernel.kernels.xla.ragged_page_attention.interface import (
    heuristic,
    ragged_page_attention,
    sample_inputs,
)

__all__ = ["heuristic", "ragged_page_attention", "sample_inputs"]

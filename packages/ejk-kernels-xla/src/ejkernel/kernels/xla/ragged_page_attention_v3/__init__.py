"""Mixed prefill and decoding that also writes the new tokens into the cache."""

from ejkernel.kernels.xla.ragged_page_attention_v3.interface import (
    heuristic,
    ragged_page_attention_v3,
    sample_inputs,
)

__all__ = ["heuristic", "ragged_page_attention_v3", "sample_inputs"]

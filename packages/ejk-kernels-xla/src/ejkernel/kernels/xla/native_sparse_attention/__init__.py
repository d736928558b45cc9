"""Native sparse attention: compressed, selected and sliding branches."""

from ejkernel.kernels.xla.native_sparse_attention.interface import (
    heuristic,
    native_sparse_attention,
    sample_inputs,
)

__all__ = ["heuristic", "native_sparse_attention", "sample_inputs"]

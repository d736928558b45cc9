"""Native sparse attention: compressed, selected and sliding branches."""

from ejkernel.kernels.triton.native_sparse_attention.implementation import native_sparse_attention

__all__ = ["native_sparse_attention"]

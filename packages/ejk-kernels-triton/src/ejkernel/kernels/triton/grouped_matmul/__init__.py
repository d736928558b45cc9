"""Grouped matrix products in Triton."""

from ejkernel.kernels.triton.grouped_matmul.implementation import grouped_matmul

__all__ = ["grouped_matmul"]

"""Grouped matrix products in Triton."""

from ejkernel.kernels.triton.grouped_matmul.interface import grouped_matmul

__all__ = ["grouped_matmul"]

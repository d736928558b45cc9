"""Grouped matmul: consecutive runs of rows, each times its own matrix."""

from ejkernel.kernels.xla.grouped_matmul.implementation import grouped_matmul

__all__ = ["grouped_matmul"]

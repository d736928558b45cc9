"""Mean pooling over sequences, packed sequences and their chunks."""

from ejkernel.kernels.xla.mean_pooling.interface import mean_pooling

__all__ = ["mean_pooling"]

"""Mean pooling over sequences, packed sequences and their chunks."""

from ejkernel.kernels.xla.mean_pooling.implementation import mean_pooling

__all__ = ["mean_pooling"]

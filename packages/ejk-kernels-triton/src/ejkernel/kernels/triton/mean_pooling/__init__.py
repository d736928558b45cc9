"""Mean pooling in Triton, forward and backward."""

from ejkernel.kernels.triton.mean_pooling.implementation import mean_pooling

__all__ = ["mean_pooling"]

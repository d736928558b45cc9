"""Plain attention that also returns its weights."""

from ejkernel.kernels.xla.attention.implementation import attention

__all__ = ["attention"]

"""Plain attention that also returns its weights."""

from ejkernel.kernels.xla.attention.interface import attention

__all__ = ["attention"]

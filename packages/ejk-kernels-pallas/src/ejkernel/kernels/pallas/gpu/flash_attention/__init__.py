"""Flash attention for Hopper GPUs."""

from ejkernel.kernels.pallas.gpu.flash_attention.interface import flash_attention

__all__ = ["flash_attention"]

"""Flash attention for TPUs: forward, query gradient, key gradients."""

from ejkernel.kernels.pallas.tpu.flash_attention.interface import flash_attention

__all__ = ["flash_attention"]

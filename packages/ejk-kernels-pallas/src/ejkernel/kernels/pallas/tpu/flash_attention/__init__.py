"""Flash attention for TPUs: forward, query gradient, key gradients."""

from ejkernel.kernels.pallas.tpu.flash_attention.implementation import flash_attention

__all__ = ["flash_attention"]

"""Flash attention in Triton: forward, query gradient, key gradients, bias gradient."""

from ejkernel.kernels.triton.flash_attention.implementation import flash_attention

__all__ = ["flash_attention"]

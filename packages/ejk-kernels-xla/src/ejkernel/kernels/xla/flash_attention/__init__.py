"""Flash attention in XLA: blockwise forward and backward, memory linear in the lengths."""

from ejkernel.kernels.xla.flash_attention.implementation import flash_attention

__all__ = ["flash_attention"]

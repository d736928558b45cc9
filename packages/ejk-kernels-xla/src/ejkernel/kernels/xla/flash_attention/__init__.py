"""Flash attention in XLA: blockwise forward and backward, memory linear in the lengths."""

from ejkernel.kernels.xla.flash_attention.interface import flash_attention

__all__ = ["flash_attention"]

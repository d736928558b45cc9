"""Lightning attention: linear attention with a fixed decay per head and layer."""

from ejkernel.kernels.xla.lightning_attn.implementation import lightning_attention

__all__ = ["lightning_attention"]

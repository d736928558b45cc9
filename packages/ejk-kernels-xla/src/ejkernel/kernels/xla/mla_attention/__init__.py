"""Multi-head latent attention in expanded form."""

from ejkernel.kernels.xla.mla_attention.implementation import mla_attention

__all__ = ["mla_attention"]

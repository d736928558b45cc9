"""Latent attention in Triton: flash attention on what latent rows expand to."""

from ejkernel.kernels.triton.mla_attention.implementation import mla_attention

__all__ = ["mla_attention"]

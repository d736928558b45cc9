"""Latent attention over pages in Triton."""

from ejkernel.kernels.triton.mla_decode.implementation import mla_decode

__all__ = ["mla_decode"]

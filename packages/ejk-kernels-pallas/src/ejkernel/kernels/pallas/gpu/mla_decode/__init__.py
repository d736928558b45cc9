"""Latent decoding for Hopper GPUs."""

from ejkernel.kernels.pallas.gpu.mla_decode.implementation import mla_decode

__all__ = ["mla_decode"]

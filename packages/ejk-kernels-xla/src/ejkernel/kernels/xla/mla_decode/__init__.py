"""Decoding from a paged cache of latent rows."""

from ejkernel.kernels.xla.mla_decode.implementation import mla_decode

__all__ = ["mla_decode"]

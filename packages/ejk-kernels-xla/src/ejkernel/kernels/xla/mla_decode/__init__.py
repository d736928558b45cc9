"""Decoding from a paged cache of latent rows."""

from ejkernel.kernels.xla.mla_decode.interface import heuristic, mla_decode, sample_inputs

__all__ = ["heuristic", "mla_decode", "sample_inputs"]

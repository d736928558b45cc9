"""Multi-head latent attention in expanded form."""

from ejkernel.kernels.xla.mla_attention.interface import heuristic, mla_attention, sample_inputs

__all__ = ["heuristic", "mla_attention", "sample_inputs"]

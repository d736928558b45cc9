"""Gated linear attention."""

from ejkernel.kernels.xla.gla.implementation import gla_attention

__all__ = ["gla_attention"]

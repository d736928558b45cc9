"""Gated linear attention."""

from ejkernel.kernels.xla.gla.interface import gla_attention

__all__ = ["gla_attention"]

"""Recurrent attention: linear attention with every kind of gate."""

from ejkernel.kernels.xla.recurrent.implementation import recurrent_attention

__all__ = ["recurrent_attention"]

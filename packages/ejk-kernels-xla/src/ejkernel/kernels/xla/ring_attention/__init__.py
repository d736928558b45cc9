"""Ring attention in XLA: the sequence is spread over devices, keys and values travel."""

from ejkernel.kernels.xla.ring_attention.implementation import ring_attention

__all__ = ["ring_attention"]

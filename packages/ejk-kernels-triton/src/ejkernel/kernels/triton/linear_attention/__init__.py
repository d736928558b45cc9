"""Linear attention in Triton: recurrent, gated and lightning attention, forward and backward."""

from ejkernel.kernels.triton.linear_attention.implementation import (
    gla_attention,
    lightning_attention,
    recurrent_attention,
)

__all__ = ["gla_attention", "lightning_attention", "recurrent_attention"]

"""Scaled dot-product attention in Triton: flash attention with fewer options."""

from ejkernel.kernels.triton.scaled_dot_product_attention.implementation import (
    scaled_dot_product_attention,
)

__all__ = ["scaled_dot_product_attention"]

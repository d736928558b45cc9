"""Scaled dot product attention without extras."""

from ejkernel.kernels.xla.scaled_dot_product_attention.implementation import (
    scaled_dot_product_attention,
)

__all__ = ["scaled_dot_product_attention"]

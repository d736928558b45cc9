"""Scaled dot product attention without extras."""

from ejkernel.kernels.xla.scaled_dot_product_attention.interface import (
    scaled_dot_product_attention,
)

__all__ = ["scaled_dot_product_attention"]

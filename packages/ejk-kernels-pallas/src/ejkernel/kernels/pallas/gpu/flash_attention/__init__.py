"""Flash attention for Hopper GPUs."""

from ejkernel.kernels.pallas.gpu.flash_attention.implementation import (
    flash_attention,
    mla_attention,
    scaled_dot_product_attention,
)

__all__ = ["flash_attention", "mla_attention", "scaled_dot_product_attention"]

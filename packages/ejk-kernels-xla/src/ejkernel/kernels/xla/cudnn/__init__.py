"""cuDNN's attention through ``jax.nn.dot_product_attention``, for the calls it can do exactly.

Registered as platform "cuda" under the algorithms' own names; everything else is refused with a
reason, so that another implementation takes the call.
"""

from __future__ import annotations

from typing import Any

from ejkernel.ops.packages import add_tables

ALGORITHMS = ("flash_attention", "scaled_dot_product_attention")


def register(registry: Any) -> None:
    """Register the cuDNN paths; imports none of them."""
    package = "ejkernel.kernels.xla.cudnn"
    for name in ALGORITHMS:
        registry.register_lazy(
            name,
            "cuda",
            "gpu",
            50,
            target=f"{package}.interface:{name}",
            supports=f"{package}.support:supports",
            config_fields=(),
        )
    add_tables(registry, __name__)

"""An implementation of ragged_decode_attention for short caches on CPUs."""

from short_decode.implementation import ragged_decode_attention
from short_decode.tiles import heuristic, supports


def register(registry):
    """Adds the implementation to a registry of kernels."""
    registry.register(
        "ragged_decode_attention",
        "xla",
        "cpu",
        priority=10,
        supports=supports,
        heuristic=heuristic,
    )(ragged_decode_attention)

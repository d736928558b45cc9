"""Triton GPU kernels for ejkernel, through jax-triton."""

from ejkernel.kernels.triton._version import __version__

__all__ = ["__version__"]


def register(registry) -> None:
    """Register this package's implementations (none yet)."""

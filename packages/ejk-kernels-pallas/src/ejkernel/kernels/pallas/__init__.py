"""Pallas kernels for ejkernel: Mosaic TPU and Mosaic GPU."""

from ejkernel.kernels.pallas._version import __version__

__all__ = ["__version__"]


def register(registry) -> None:
    """Register this package's implementations (none yet)."""

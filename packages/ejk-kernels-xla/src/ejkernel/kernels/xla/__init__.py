"""One readable XLA implementation of every ejkernel operation."""

from ejkernel.kernels.xla._version import __version__

__all__ = ["__version__"]


def register(registry) -> None:
    """Register this package's implementations (none yet)."""
